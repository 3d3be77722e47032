"""Recorded rollouts, as they lie in .npz files.

An episode is two arrays of numbers, [L, O] of what was observed and [L, A] of what was done. A file
has them in one of these forms; other arrays in it are not read.

    observation_i and action_i      for each episode i
    observation and action          all episodes one behind the other, [sum L_i, O], with
        episode_ends                the step behind each episode's last, as in the replay buffers of
                                    Diffusion Policy; or
        terminals, timeouts         for each step, whether an episode ended with it, as in D4RL; or
        neither                     then it is one episode
    observation and action          [E, L, O] and [E, L, A], episodes of one length

Of the arrays without a number others of the names below do as well, behind any folder ("data/obs").
"""

import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import ConfigError, first_of

Episode = tuple[np.ndarray, np.ndarray]  # observations [L, O], actions [L, A]

_KINDS = ("observation", "action")
_NAMES = {  # of arrays of all episodes
    "observation": ("observation", "observations", "obs", "state", "states"),
    "action": ("action", "actions"),
}
_ENDS = "episode_ends"
_FLAGS = (  # of steps that end an episode
    *("terminals", "timeouts", "dones", "done", "terminations", "truncations"),
    *("terminated", "truncated"),
)


def read_rollouts(path: Path) -> list[Episode]:
    """The episodes of a file in its order, float32; or those of every .npz in a folder, by name.
    ConfigError: there is none, a file is damaged or of another kind, or episodes do not fit each
    other."""
    files = sorted(filter(Path.is_file, path.glob("*.npz"))) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        what = "is a folder without an .npz" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {what}; expected an .npz file of rollouts, or a folder of them")
    dims: dict[str, int] = {}
    episodes = []
    for file in files:
        for names, episode in _read_file(file):
            for kind, name, array in zip(_KINDS, names, episode, strict=True):
                if dims.setdefault(kind, array.shape[1]) != array.shape[1]:
                    raise ConfigError(
                        f"{file}: {name} has {array.shape[1]} dimensions; earlier episodes have"
                        f" {dims[kind]}"
                    )
            episodes.append(episode)
    return episodes


def _read_file(path: Path) -> list[tuple[tuple[str, str], Episode]]:  # the arrays' names, episode
    try:
        if not zipfile.is_zipfile(path):  # of which numpy says that it is a pickle
            single = path.suffix == ".npy"
            raise ValueError(
                "it holds a single array" if single else "it is no archive of arrays, or cut off"
            )
        with np.load(path, allow_pickle=False) as file:
            numbered = any(re.fullmatch(rf"({'|'.join(_KINDS)})_\d+", name) for name in file.files)
            return list(_numbered(path, file) if numbered else _joined(path, file))
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"rollouts {path} cannot be read as an .npz: {error}") from error


def _numbered(path: Path, file: np.lib.npyio.NpzFile) -> Iterator[tuple[tuple[str, str], Episode]]:
    """An array of each kind for each episode, in the order of their numbers."""
    found = {}
    for kind in _KINDS:
        matches = [re.fullmatch(rf"{kind}_(\d+)", name) for name in file.files]
        found[kind] = {int(match[1]): match[0] for match in matches if match}  # 7 may be 007
    observed, acted = (sorted(found[kind]) for kind in _KINDS)
    if observed != acted:
        raise ConfigError(
            f"{path} holds observation_i for i in {_few(observed)} and action_i for i in"
            f" {_few(acted)}; expected both for each episode"
        )
    for i in observed:
        names = tuple(found[kind][i] for kind in _KINDS)
        yield names, _episode(path, names, [file[name] for name in names])


def _joined(path: Path, file: np.lib.npyio.NpzFile) -> Iterator[tuple[tuple[str, str], Episode]]:
    """An array of each kind for all episodes."""
    place = {name.rpartition("/")[2]: name for name in file.files}
    names = tuple(
        next((place[name] for name in _NAMES[kind] if name in place), "") for kind in _KINDS
    )
    if "" in names:
        raise ConfigError(
            f"{path} holds the arrays {_few(file.files)}; expected observation_i and action_i for"
            f" each episode i, or observation, action and {_ENDS}"
        )
    arrays = [file[name] for name in names]
    if all(array.ndim == 3 for array in arrays) and len(arrays[0]) == len(arrays[1]):
        for episode in zip(*arrays, strict=True):
            yield names, _episode(path, names, list(episode))
        return
    observations, actions = _episode(path, names, arrays)
    steps = len(actions)
    if _ENDS in place:
        ends = _checked_ends(f"{path}: {place[_ENDS]}", file[place[_ENDS]], steps)
    else:
        over = np.zeros(steps, bool)
        for name in (place[name] for name in _FLAGS if name in place):
            over |= _checked_flags(f"{path}: {name}", file[name], steps)
        over[-1:] = True
        ends = np.flatnonzero(over) + 1
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        yield names, (observations[start:end], actions[start:end])


# --- checking -------------------------------------------------------------------------------------


def _episode(path: Path, names: tuple[str, str], arrays: list[np.ndarray]) -> Episode:
    observations, actions = (
        _checked(f"{path}: {name}", array) for name, array in zip(names, arrays, strict=True)
    )
    if len(observations) != len(actions):
        raise ConfigError(
            f"{path}: {names[0]} has {len(observations)} steps, {names[1]} {len(actions)}"
        )
    return observations, actions


def _checked(name: str, array: np.ndarray) -> np.ndarray:  # float32 [L, dims]
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "fiub":
        raise ConfigError(f"{name} is {array.dtype} {array.shape}; expected numbers [steps, dims]")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ConfigError(f"{name} has values that are not finite")
    return array


def _checked_ends(name: str, ends: np.ndarray, steps: int) -> np.ndarray:  # int [E]
    if ends.ndim != 1 or ends.dtype.kind not in "iu":
        raise ConfigError(f"{name} is {ends.dtype} {ends.shape}; expected whole numbers [episodes]")
    ends = ends.astype(np.int64)
    if len(ends) == 0 or ends[-1] != steps or (np.diff(ends, prepend=0) <= 0).any():
        raise ConfigError(
            f"{name} is {_few(ends.tolist())}; expected the step behind the last of each episode,"
            f" ascending up to {steps}"
        )
    return ends


def _checked_flags(name: str, flags: np.ndarray, steps: int) -> np.ndarray:  # bool [steps]
    if flags.shape not in ((steps,), (steps, 1)) or flags.dtype.kind not in "fiub":
        raise ConfigError(
            f"{name} is {flags.dtype} {flags.shape}; expected one number for each of {steps} steps"
        )
    return flags.reshape(steps) != 0


def _few(values: list) -> str:
    return first_of(values) or "none"
