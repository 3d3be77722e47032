r"""Averages of weights made after training, from those that checkpoints hold.

Every average that a run keeps is sum_tau p(tau) theta(tau), with a known profile p over its steps.
So is the one that is wanted; its weights are those of the stored averages that come closest to its
profile in the least squares, and sum to 1 (Karras et al., 2024, section 3.2, where all are of power
functions).

References:
    Analyzing and Improving the Training Dynamics of Diffusion Models (Karras et al., 2024),
        https://arxiv.org/abs/2312.02696
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, counted
from ..formats.checkpoint import find_checkpoint, read_state, read_weights, write_average
from ..formats.checkpoint_folder import list_checkpoints
from ..settings import construct
from .optimizer import OptimizerSettings

_BINS = 20_000  # steps are taken together so that a profile has about so many numbers
_FAR = 0.2  # of its norm; a profile that is further off is another average
_LONGEST = 12**-0.5  # sigma_rel of the mean of all steps


@dataclass(frozen=True, kw_only=True)
class AverageSettings:
    """The configuration; see configs/average.yaml."""

    ckpt: str
    decay: float | None = None
    sigma_rel: float | None = None

    def __post_init__(self) -> None:
        if (self.decay is None) == (self.sigma_rel is None):
            raise ConfigError(
                "give either decay, as of an EMA, or sigma_rel, as of a power function"
            )
        if self.decay is not None and not 0 < self.decay < 1:
            raise ConfigError(f"decay={self.decay}; expected a number in (0, 1)")
        if self.sigma_rel is not None and not 0 < self.sigma_rel < _LONGEST:
            raise ConfigError(f"sigma_rel={self.sigma_rel}; expected one in (0, {_LONGEST:.4f})")


def ema_profile(
    optim: OptimizerSettings, decay: float, steps: int
) -> np.ndarray:  # float64 [steps + 1]
    """What the parameters after each update weigh in the EMA of that decay after `steps` of them;
    the first number is that of the initial ones."""
    decays = np.fromiter((optim.ema_decay_at(i, decay) for i in range(steps)), float, steps)
    later = np.append(np.cumprod(decays[::-1])[::-1], 1.0)  # the product of this and all later ones
    return later * np.append(1.0, 1 - decays)


def power_profile(sigma_rel: float, steps: int) -> np.ndarray:  # float64 [steps + 1]
    r"""The same of the average with profile tau^gamma (equation 123), whose deviation is sigma_rel
    of the length of training: sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3))."""
    t = sigma_rel**-2
    gamma = max(np.roots([1, 7, 16 - t, 12 - t]).real)
    return np.append(0.0, np.diff((np.arange(steps + 1) / max(steps, 1)) ** (gamma + 1)))


def combine(
    profiles: list[np.ndarray],  # float64, each [its steps + 1]
    wanted: np.ndarray,  # float64 [T + 1], of the most steps
) -> tuple[np.ndarray, float]:
    """(the weights of the profiles, how far their sum is off relative to the norm of `wanted`)."""
    edges = np.unique(np.linspace(0, len(wanted), min(_BINS, len(wanted)) + 1).astype(int))[:-1]
    widths = np.diff(np.append(edges, len(wanted)))

    def binned(profile: np.ndarray) -> np.ndarray:
        padded = np.pad(profile, (0, len(wanted) - len(profile)))
        return np.add.reduceat(padded, edges) / np.sqrt(widths)

    basis = np.stack([binned(profile) for profile in profiles], axis=1)  # [bins, B]
    target = binned(wanted)
    # the weights sum to 1: the last one is what the others leave, and the rest is free
    free = basis[:, :-1] - basis[:, -1:]
    weights = np.linalg.lstsq(free, target - basis[:, -1], rcond=1e-10)[0]
    weights = np.append(weights, 1 - weights.sum())
    return weights, float(np.linalg.norm(basis @ weights - target) / np.linalg.norm(target))


def average(config: dict[str, Any]) -> Path:
    """Make the configured average of what a run's checkpoints hold, write it beside the others of
    the last one and say how near it is; returns the file."""
    settings = construct(AverageSettings, config, "")
    last = find_checkpoint(settings.ckpt)
    state, stored = read_state(last)
    steps, optim = state["step"], _optimizer(stored)
    if settings.decay is not None:
        value = settings.decay
        wanted = ema_profile(optim, settings.decay, steps)
    else:
        value = f"sigma_rel_{settings.sigma_rel}"  # a number would be taken for a decay
        wanted = power_profile(settings.sigma_rel, steps)
    found, profiles = [], []
    for checkpoint in list_checkpoints(last.parent):
        its_state, its_config = read_state(checkpoint)
        if its_state["step"] > steps:
            continue
        if _optimizer(its_config) != optim:
            raise ConfigError(f"{checkpoint} has other averages than {last}")
        for decay in (optim.ema_decay, *optim.more_ema):
            found.append((checkpoint, True if decay == optim.ema_decay else decay))
            profiles.append(ema_profile(optim, decay, its_state["step"]))
    weights, off = combine(profiles, wanted)
    if off > _FAR:
        raise ConfigError(
            f"the {len(found)} averages of {last.parent} come no nearer than {100 * off:.0f} % to"
            f" this one; keep more checkpoints (train.keep, train.save_every) or averages"
            " (optim.more_ema)"
        )
    path = write_average(last, value, _sum(found, weights))
    print(
        f"{path}: of {counted(len(found), 'averages')}, its profile within {100 * off:.2g} %;"
        " sample with"
        f" ema={value}"
    )
    return path


def _optimizer(config: dict[str, Any]) -> OptimizerSettings:
    """What of the settings decides on averages."""
    names = ("ema_decay", "ema_warmup", "more_ema")
    given = config.get("optim", {})
    return construct(OptimizerSettings, {k: given[k] for k in names if k in given}, "optim")


def _sum(found: list[tuple[Path, bool | float]], weights: np.ndarray) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for (checkpoint, ema), weight in zip(found, weights, strict=True):
        for name, values in read_weights(checkpoint, ema).items():
            term = values.double() * weight
            total[name] = total[name] + term if name in total else term
    return {name: values.to(torch.float32) for name, values in total.items()}
