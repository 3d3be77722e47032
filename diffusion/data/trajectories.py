"""Recorded rollouts, cut into chunks of actions and the observations before them.

In which forms they are read, `rollout_file` says. As Diffusion Policy (Chi et al. 2023) does, a
chunk starts at every time s from 1 - observation_steps to L - horizon + action_steps - 1: its
actions are those of s, ..., s + horizon - 1, its condition is the observations of s, ...,
s + observation_steps - 1, and beyond the ends of the episode the first and the last are repeated.
The policy acts out the `action_steps` actions from s + observation_steps - 1 on, the time of the
last observation, and observes again.
"""

from pathlib import Path

import numpy as np
import torch

from ..errors import ConfigError, counted
from .action_chunks import CONSTANT, ActionChunks, Chunks, Normaliser, PolicySpec
from .rollout_file import Episode, read_rollouts

_SPLITS = ("episodes", "tails")


def load_trajectories(
    path: str | None = None,
    *,
    horizon: int = 16,
    observation_steps: int = 2,
    action_steps: int = 8,
    held_out: float = 0.1,
    split: str = "episodes",
    seed: int = 0,
) -> ActionChunks:
    """Read the rollouts in `path`, a file or a folder of them, and cut them into chunks.

    `held_out` is the share that is not trained on: of the episodes, whole ones chosen by `seed`, at
    least one and never all (split=episodes); or the last part of each episode (split=tails). Ranges
    are those of the rest. Raises ConfigError for a file that is missing, damaged or of another
    kind, and for impossible options.
    """
    check_options(horizon, observation_steps, action_steps, held_out, split, seed)
    if path is None:
        raise ConfigError(
            "dataset.path is not set; give the .npz with the rollouts, or a folder of them"
        )
    return cut_episodes(
        read_rollouts(Path(path)),
        path,
        horizon=horizon,
        observation_steps=observation_steps,
        action_steps=action_steps,
        held_out=held_out,
        split=split,
        seed=seed,
    )


def cut_episodes(
    episodes: list[Episode],
    source: str,  # where they are from
    *,
    horizon: int,
    observation_steps: int,
    action_steps: int,
    held_out: float,
    split: str,
    seed: int,
) -> ActionChunks:
    """The episodes as chunks; see `load_trajectories` for the options."""
    check_options(horizon, observation_steps, action_steps, held_out, split, seed)
    train, rest = _split(episodes, held_out, split, seed)
    spec = PolicySpec(
        horizon,
        observation_steps,
        action_steps,
        Normaliser.of(np.concatenate([observations for observations, _ in train])),
        Normaliser.of(np.concatenate([actions for _, actions in train])),
    )
    parts = {"to train on": _chunks(train, spec), "held out": _chunks(rest, spec)}
    for name, part in parts.items():
        if len(part) == 0 and (name == "to train on" or held_out > 0):
            raise ConfigError(
                f"{source}: what is {name} is too short for dataset.horizon={horizon}; use a"
                f" shorter horizon or another dataset.held_out than {held_out}"
            )
    name, notes = Path(source).absolute().name, _notes(train + rest, spec, split)
    return ActionChunks(*parts.values(), spec, name, len(episodes), notes)


def check_options(
    horizon: int, observation_steps: int, action_steps: int, held_out: float, split: str, seed: int
) -> None:
    """Raise ConfigError for the first option of `load_trajectories` that is impossible."""
    steps = {
        "horizon": horizon,
        "observation_steps": observation_steps,
        "action_steps": action_steps,
    }
    for name, value in steps.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"dataset.{name}={value}; expected a whole number, at least 1")
    if observation_steps - 1 + action_steps > horizon:
        raise ConfigError(
            f"dataset.action_steps={action_steps} actions from the last of"
            f" dataset.observation_steps={observation_steps} on do not fit into"
            f" dataset.horizon={horizon}"
        )
    if isinstance(held_out, bool) or not isinstance(held_out, int | float) or not 0 <= held_out < 1:
        raise ConfigError(f"dataset.held_out={held_out}; expected a share from 0 to below 1")
    if split not in _SPLITS:
        raise ConfigError(f"dataset.split={split} is unknown; choose one of {', '.join(_SPLITS)}")
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"dataset.seed={seed}; expected a whole number, at least 0")


# --- cutting --------------------------------------------------------------------------------------


def _split(
    episodes: list[Episode], share: float, split: str, seed: int
) -> tuple[list[Episode], list[Episode]]:  # to train on, held out
    if share == 0:
        return episodes, []
    if split == "tails":
        cuts = [min(max(round(len(a) * (1 - share)), 1), len(a)) for _, a in episodes]
        cut = list(zip(episodes, cuts, strict=True))
        return [(o[:n], a[:n]) for (o, a), n in cut], [(o[n:], a[n:]) for (o, a), n in cut]
    count = len(episodes)
    if count == 1:
        raise ConfigError(
            "a single episode cannot be split by episodes; use dataset.split=tails or"
            " dataset.held_out=0 (if there are more, episode_ends says where they end)"
        )
    held = min(max(round(count * share), 1), count - 1)
    chosen = set(np.random.default_rng(seed).choice(count, held, replace=False).tolist())
    return (
        [episode for i, episode in enumerate(episodes) if i not in chosen],
        [episode for i, episode in enumerate(episodes) if i in chosen],
    )


def _chunks(episodes: list[Episode], spec: PolicySpec) -> Chunks:
    actions, conditions = [], []
    for observed, acted in episodes:
        length = len(acted)
        starts = np.arange(1 - spec.observation_steps, length - spec.horizon + spec.action_steps)
        # [M, steps]; beyond an end of the episode its first or last step is repeated
        times = (starts[:, None] + np.arange(spec.horizon)).clip(0, max(length - 1, 0))
        actions.append(acted[times])
        conditions.append(observed[times[:, : spec.observation_steps]])
    shapes = ((0, spec.horizon, spec.action_dim), (0, spec.observation_steps, spec.observation_dim))
    a, o = (
        torch.from_numpy(np.concatenate([np.empty(shape, np.float32), *parts]))
        for shape, parts in zip(shapes, (actions, conditions), strict=True)
    )
    return Chunks(
        spec.actions.normalise(a).unsqueeze(1).contiguous(),
        spec.observations.normalise(o).flatten(1),
    )


def _notes(parts: list[Episode], spec: PolicySpec, split: str) -> tuple[str, ...]:
    """What of the data is not learned from."""
    notes = []
    needed = spec.most_action_steps - spec.action_steps + 1
    if short := sum(len(actions) < needed for _, actions in parts):
        found = counted(short, "episodes" if split == "episodes" else "heads or tails of episodes")
        notes.append(f"too short for a chunk, with fewer than {needed} steps: {found}")
    for kind, normaliser in (("observations", spec.observations), ("actions", spec.actions)):
        if flat := normaliser.flattened():
            notes.append(
                f"of the {kind} dimension {', '.join(map(str, flat))} varies by less than"
                f" {CONSTANT} and is taken as constant; use smaller units if it is not"
            )
    return tuple(notes)
