"""A checkpoint: a directory from which sampling and training go on. Nothing in it is unpickled.

    step_00003000/
        model.safetensors               parameters, float32, in PyTorch's shapes, by the model's
                                        own names
        ema.safetensors                 their exponential moving average
        ema_0.999.safetensors           further ones by their decays, if the run keeps any
        ema_sigma_rel_0.1.safetensors   one of a power function, if tools/average.py made it
        optimizer.safetensors           exp_avg.NAME and exp_avg_sq.NAME
        timesteps.safetensors           losses of each timestep, if they say which are drawn
        state.json                      format, step, images seen, seed, data set
        config.yaml                     the whole configuration of the run
        SHA256SUMS                      digests of the files above

It is written aside, synced to the disk and renamed, so a directory of this name is always complete.
Whatever reads a file holds it against its digest first. Format 1 had no digests.
"""

import functools
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import ConfigError, first_of, writing
from ..models.flat_parameters import FlatParameters
from ..near_runs import runs_near
from ..settings import shown
from .checkpoint_folder import (
    checkpoint_name,
    latest_checkpoint,
    list_checkpoints,
    remove_checkpoint,
    set_aside,
    step_in_name,
    writing_place,
)
from .digests import SUMS, check_files, file_digest, read_sums, sums_text

Average = bool | float | str  # False: as trained; True: ema; a decay; "sigma_rel_0.1"

FORMAT = 2
_WITHOUT_SUMS = 1  # the format that had none
_GROUPS = ("model", "diffusion", "train")  # of its configuration, which are read again
_FILES = (
    "model.safetensors",
    "ema.safetensors",
    "optimizer.safetensors",
    "state.json",
    "config.yaml",
)
_TIMESTEPS = "timesteps.safetensors"
_INTERVAL = {"start": int, "skipped": int, "loss": float, "seconds": float}  # of the log
# whole numbers in state.json and the least they can be
_COUNTS = {"step": 0, "images": 0, "skipped_steps": 0, "seed": 0, "dataset_size": 1}


def save_checkpoint(
    folder: Path,  # RUN/checkpoints
    flat: FlatParameters,
    state: dict[str, Any],  # holds at least `step`, the number of updates done
    config: dict[str, Any],
    keep: int,  # how many of the newest stay
    timesteps: dict[str, Tensor] | None = None,  # of `LossAwareTimesteps`
) -> Path:
    """Write folder/step_NNNNNNNN and delete the oldest beyond `keep`. If the disk is full the older
    checkpoints stay, what was begun is removed, and a ConfigError says so."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / checkpoint_name(state["step"])
    partial = writing_place(final)
    shutil.rmtree(partial, ignore_errors=True)
    moments = {f"exp_avg.{name}": x for name, x in flat.views(flat.exp_avg).items()}
    moments |= {f"exp_avg_sq.{name}": x for name, x in flat.views(flat.exp_avg_sq).items()}
    tensors = {
        "model.safetensors": flat.views(flat.param),
        "ema.safetensors": flat.views(flat.ema),
        **{_weights_file(d): flat.views(average) for d, average in flat.averages.items()},
        "optimizer.safetensors": moments,
        **({} if timesteps is None else {_TIMESTEPS: timesteps}),
    }
    texts = {
        "state.json": json.dumps({"format": FORMAT, **state}, indent=2),
        "config.yaml": yaml.safe_dump(config, sort_keys=False),
    }
    try:
        partial.mkdir()
        with ThreadPoolExecutor(1) as pool:  # a file is hashed while the next one is written
            digests = {}
            for name, content in (tensors | texts).items():
                write = _write_tensors if name in tensors else _write_text
                write(partial / name, content)
                digests[name] = pool.submit(file_digest, partial / name)
            sums = sums_text({name: digest.result() for name, digest in digests.items()})
        _write_text(partial / SUMS, sums)
        _sync_folder(partial)
        if final in list_checkpoints(folder):
            set_aside(final)
        os.replace(partial, final)
        _sync_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        last = latest_checkpoint(folder)
        kept = (
            f"the last good checkpoint stays: {last}" if last else "there is no earlier checkpoint"
        )
        raise ConfigError(f"cannot save {final}: {error}; {kept}") from error
    for old in list_checkpoints(folder)[:-keep]:
        remove_checkpoint(old)
    return final


def find_checkpoint(path: str | Path, others: str = "") -> Path:
    """The checkpoint meant by a run's folder, its checkpoints folder, or a checkpoint itself.
    ConfigError: there is none; `others` is what else the caller takes."""
    path = Path(path)
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; {runs_near(path)}expected a run's folder or a"
            f" checkpoint's{others}"
        )
    if (path / "state.json").is_file():
        return path
    found = latest_checkpoint(path / "checkpoints") or latest_checkpoint(path)
    if found is None:
        raise ConfigError(
            f"{path} holds no checkpoint; expected a run's folder or RUN/checkpoints/step_NNNNNNNN"
            f"{others}{_runs_in(path)}"
        )
    return found


def _runs_in(folder: Path) -> str:
    """Which runs a folder has, such as that of a sweep."""
    runs = [file.parent for file in sorted(folder.glob("*/checkpoints"))]
    return f"; runs in it: {first_of(runs)}" if runs else ""


def read_state(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, config) of a checkpoint, all files of which are there and as long as they say.
    ConfigError: they are not, or state and configuration are not as they were written, or do not
    go with each other or with the name of the folder."""
    sums = read_sums(checkpoint)
    names = dict.fromkeys((*_FILES, *(sums or ())))
    missing = [name for name in names if not (checkpoint / name).is_file()]
    if missing:
        raise ConfigError(f"checkpoint {checkpoint} is incomplete: {', '.join(missing)} is missing")
    for name in _FILES:
        if name.endswith(".safetensors"):
            with _readable(checkpoint / name), safe_open(checkpoint / name, "pt"):
                pass
    if sums is not None:
        check_files(checkpoint, ("state.json", "config.yaml"), sums)
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        config = yaml.safe_load((checkpoint / "config.yaml").read_text())
        if not isinstance(state, dict) or not isinstance(config, dict):
            raise ValueError("state.json and config.yaml; expected a group of values in each")
        if state["format"] not in (FORMAT, _WITHOUT_SUMS):
            raise ValueError(
                f"format {shown(state['format'])}; this version reads format {FORMAT} and before"
            )
        if not all(isinstance(config[group], dict) for group in _GROUPS):
            raise ValueError(f"config.yaml; expected the groups {', '.join(_GROUPS)}")
        _check_state(checkpoint, state, config)
    except KeyError as error:
        raise ConfigError(f"checkpoint {checkpoint} does not say {error}: it is damaged") from error
    except RecursionError as error:
        raise ConfigError(f"checkpoint {checkpoint} is damaged: it is nested too deeply") from error
    except (ValueError, TypeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())  # YAML's are several lines
        raise ConfigError(f"checkpoint {checkpoint} cannot be read: {said}") from error
    if sums is None:
        if state["format"] != _WITHOUT_SUMS:
            raise ConfigError(f"checkpoint {checkpoint} is incomplete: {SUMS} is missing")
        _note_no_sums(checkpoint)
    return state, config


@functools.cache  # said once, though a checkpoint is read several times
def _note_no_sums(checkpoint: Path) -> None:
    warnings.warn(
        f"{checkpoint} was written without digests ({SUMS}): damage to its numbers is not seen",
        stacklevel=1,
    )


def verify_checkpoint(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `read_state`, and every file is held against its digest: all is read once."""
    found = read_state(checkpoint)
    sums = read_sums(checkpoint)
    if sums is not None:
        check_files(checkpoint, sums, sums)
    return found


def newest_good(folder: Path, before: Path) -> Path | None:
    """The newest checkpoint of a folder that is older than one of it and not damaged."""
    newest = step_in_name(before)
    for checkpoint in reversed(list_checkpoints(folder)):
        if newest is not None and step_in_name(checkpoint) < newest:
            try:
                verify_checkpoint(checkpoint)
            except ConfigError:
                continue
            return checkpoint
    return None


@contextmanager
def naming_good_one(checkpoint: Path) -> Iterator[None]:
    """Within the block an error that comes of a damaged checkpoint also names the newest good one
    of the same run."""
    try:
        yield
    except ConfigError as error:
        try:
            verify_checkpoint(checkpoint)
        except ConfigError:
            good = newest_good(checkpoint.parent, before=checkpoint)
            if good is not None:
                raise ConfigError(f"{error}; the newest good one is {good}") from error
        raise


def read_weights(checkpoint: Path, ema: Average) -> dict[str, Tensor]:
    """The trained or averaged parameters by name, on the CPU; for a number the further average of
    that decay, for sigma_rel_0.1 that of a power function. ConfigError if there is none, or it is
    not as it was written."""
    path = checkpoint / _weights_file(ema)
    if not isinstance(ema, bool) and not path.is_file():
        known = [file.stem.removeprefix("ema_") for file in checkpoint.glob("ema_*.safetensors")]
        others = f" and those of {', '.join(sorted(known))}" if known else ""
        what = f"of {ema}" if isinstance(ema, str) else f"of decay {ema}"
        raise ConfigError(f"{checkpoint} has no average {what}; it has that of ema=true{others}")
    return _read_tensors(path)


def write_average(checkpoint: Path, value: float | str, weights: dict[str, Tensor]) -> Path:
    """Add an average to a checkpoint, which `read_weights` then has for ema=value; returns its
    file. ConfigError if there is one of that value, or the disk is full."""
    path = checkpoint / _weights_file(value)
    sums = read_sums(checkpoint)
    if path.exists() and (sums is None or path.name in sums):  # else it was never finished
        raise ConfigError(f"{path} is there already")
    with writing(path):
        _replace(path, lambda partial: _write_tensors(partial, weights))
        if sums is not None:
            text = sums_text(sums | {path.name: file_digest(path)})
            _replace(checkpoint / SUMS, lambda partial: _write_text(partial, text))
        _sync_folder(checkpoint)
    return path


def _average(checkpoint: Path, decay: float) -> dict[str, Tensor]:
    """One of optim.more_ema that is to go on."""
    try:
        return read_weights(checkpoint, ema=decay)
    except ConfigError as error:
        raise ConfigError(f"{error}; optim.more_ema cannot grow where a run goes on") from error


def _weights_file(ema: Average) -> str:
    if isinstance(ema, bool):
        return "ema.safetensors" if ema else "model.safetensors"
    if isinstance(ema, str) and not re.fullmatch(r"sigma_rel_[\d.e-]+", ema):
        raise ConfigError(
            f"ema={ema} is wrong; expected true, false, a decay such as 0.999, or sigma_rel_0.1 of"
            " tools/average.py"
        )
    return f"ema_{ema}.safetensors"


def _check_state(checkpoint: Path, state: dict[str, Any], config: dict[str, Any]) -> None:
    """ValueError if a number of the state is impossible, or is not that of the folder's name or of
    the configuration."""
    for name, least in _COUNTS.items():
        value = state["step"] if name == "step" else state.get(name, least)
        if type(value) is not int or not least <= value < 2**63:
            raise ValueError(
                f"{name} {shown(value)} in state.json; expected a whole number, at least {least}"
            )
    if state.get("skipped_steps", 0) > state["step"]:
        raise ValueError(f"{state['skipped_steps']} skipped steps of {state['step']} in state.json")
    named = step_in_name(checkpoint)
    if named not in (None, state["step"]):
        raise ValueError(f"step {state['step']} in state.json, which is not that of the folder")
    interval = state.get("interval", {"start": 0, "skipped": 0, "loss": 0.0, "seconds": 0.0})
    if (
        not isinstance(interval, dict)
        or {name: type(value) for name, value in interval.items()} != _INTERVAL
        or not 0 <= interval["start"] <= state["step"]
        or not 0 <= interval["skipped"] <= state["step"]
    ):
        raise ValueError(f"interval {shown(interval)} in state.json; expected that of a log")
    if not isinstance(state.get("policy", {}), dict):
        raise ValueError(
            f"policy {shown(state['policy'])} in state.json; expected a group of values"
        )
    seed = config["train"].get("seed")
    if seed is not None and seed != state.get("seed", seed):
        raise ValueError(f"seed {state['seed']} in state.json and {shown(seed)} in config.yaml")


def load_into(checkpoint: Path, flat: FlatParameters) -> None:
    """Copy parameters, EMA and moments into `flat`, bit for bit."""
    moments = _read_tensors(checkpoint / "optimizer.safetensors")
    split = {
        kind: {
            name.removeprefix(f"{kind}."): x
            for name, x in moments.items()
            if name.startswith(f"{kind}.")
        }
        for kind in ("exp_avg", "exp_avg_sq")
    }
    sources = {
        "model.safetensors": (flat.param, read_weights(checkpoint, ema=False)),
        "ema.safetensors": (flat.ema, read_weights(checkpoint, ema=True)),
        **{
            _weights_file(decay): (average, _average(checkpoint, decay))
            for decay, average in flat.averages.items()
        },
        "optimizer.safetensors, exp_avg": (flat.exp_avg, split["exp_avg"]),
        "optimizer.safetensors, exp_avg_sq": (flat.exp_avg_sq, split["exp_avg_sq"]),
    }
    for where, (buffer, stored) in sources.items():
        check_same_model(f"{checkpoint} ({where})", stored, flat.views(buffer))
    for buffer, stored in sources.values():
        for name, view in flat.views(buffer).items():
            view.copy_(stored[name])


def read_timesteps(checkpoint: Path) -> dict[str, Tensor]:
    """What `LossAwareTimesteps.load` wants, on the CPU. ConfigError: there is none."""
    return _read_tensors(checkpoint / _TIMESTEPS, torch.float32, torch.int32)


def check_same_model(where: str, stored: dict[str, Tensor], model: dict[str, Tensor]) -> None:
    """Raise ConfigError naming the first parameter in which the two differ."""
    for name in [*model, *stored]:
        if name not in stored or name not in model:
            side = "the file lacks" if name not in stored else "the configured model lacks"
            raise ConfigError(f"{where} is of another model: {side} {name}")
        if stored[name].shape != model[name].shape:
            raise ConfigError(
                f"{where} is of another model: {name} is {tuple(stored[name].shape)} there and"
                f" {tuple(model[name].shape)} in the configured model"
            )


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file under another name, and then give it its own."""
    partial = writing_place(path)
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_tensors(path: Path, *dtypes: torch.dtype) -> dict[str, Tensor]:
    """As float32, but those of one of the dtypes, if any are given, as they are."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    sums = read_sums(path.parent)
    if sums is not None:
        check_files(path.parent, [path.name], sums)
    with _readable(path):
        tensors = load_file(path)
    return {name: x if x.dtype in dtypes else x.float() for name, x in tensors.items()}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read, it may be truncated: {error}") from error
