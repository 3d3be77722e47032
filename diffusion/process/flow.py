r"""Rectified flow, also called flow matching: straight paths from images to noise, and their
velocity.

    x_t = (1 - t) x_0 + t epsilon,   t in (0, 1]
    v   = dx_t / dt = epsilon - x_0,   x_0 = x_t - t v

The network is told 1000 t (of T = 1000 levels, T t of others) and compared with v. That is the loss
of v prediction with another table: x_t is made with the columns 1 - t and t, and the target of the
columns 1 and 1. Training takes its times from T levels i / T; uniformly, or so that logit(t) is
normal (Esser et al., 2024, section 3.1): sigma = t / (1 - t) is the noise beside an x_0 of scale 1,
so that is EDM's distribution, ln(sigma) ~ N(p_mean, p_std^2).

A shift s moves all times towards noise, t -> s t / (1 + (s - 1) t). It is for images of more pixels
than those that a schedule was found for, which lose as much to noise only at a larger t: with m for
n pixels s = sqrt(m / n) (Esser et al., 2024, eq. 23).

References:
    Flow Straight and Fast: Learning to Generate and Transfer Data with Rectified Flow (Liu et al.,
        2023), https://arxiv.org/abs/2209.03003
    Flow Matching for Generative Modeling (Lipman et al., 2023), https://arxiv.org/abs/2210.02747
    Scaling Rectified Flow Transformers for High-Resolution Image Synthesis (Esser et al., 2024),
        https://arxiv.org/abs/2403.03206
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .levels import count_of, karras_sigmas

PREDICTIONS = ("velocity",)
SPACINGS = ("linspace", "trailing", "karras")


@dataclass(frozen=True, eq=False)
class FlowSchedule:
    """Levels of a rectified flow, index 0 the least noisy. It has what objectives and samplers ask
    of a `NoiseSchedule`.

    Arguments:
        times: t of each level, ascending in (0, 1], float64 [K].
        num_train_timesteps: T: the network is told T t.
        shift: s, of the times that `respace` makes.
        least: t of the least noisy level in training.
    """

    times: np.ndarray
    num_train_timesteps: int
    shift: float
    least: float

    @classmethod
    def of(cls, num_timesteps: int = 1000, shift: float = 1.0) -> "FlowSchedule":
        """The T levels of training, i / T shifted. ConfigError: an impossible count or shift."""
        total = count_of("num_timesteps", num_timesteps, least=2)
        if not 0 < shift < math.inf:
            raise ConfigError(f"diffusion.shift={shift} is not possible; give a number above 0")
        times = _shifted(np.arange(1, total + 1) / total, shift)
        return cls(times, total, shift, times[0])

    @property
    def num_timesteps(self) -> int:
        """K."""
        return len(self.times)

    @cached_property
    def timestep_map(self) -> np.ndarray:  # [K]
        """What the network is told: T t, as float64 unless all are whole."""
        told = self.times * self.num_train_timesteps
        whole = np.round(told)
        return whole.astype(np.int64) if np.abs(told - whole).max() < 1e-9 else told

    @property
    def signal_and_noise(self) -> tuple[np.ndarray, np.ndarray]:  # [K], [K]
        """x_t = signal x_0 + noise epsilon."""
        return 1 - self.times, self.times

    @property
    def ode_levels(self) -> tuple[np.ndarray, np.ndarray]:  # scale [K], sigma [K]
        """The ODE is d(x / scale) / dsigma = (x / scale - x_0) / sigma."""
        return np.ones_like(self.times), self.times

    @property
    def sigmas(self) -> np.ndarray:  # [K]
        """The noise beside an x_0 of scale 1; infinite at t = 1."""
        with np.errstate(divide="ignore"):
            return self.times / (1 - self.times)

    @property
    def snr(self) -> np.ndarray:  # [K]
        return ((1 - self.times) / self.times) ** 2

    @property
    def drawn_sigmas(self) -> np.ndarray:  # [T]
        """`sigmas` of the levels of training before the shift, which is what times are drawn by."""
        total = self.num_train_timesteps
        with np.errstate(divide="ignore"):
            return np.arange(1, total + 1) / np.arange(total - 1, -1, -1)

    def x0_from_output(self, prediction: str) -> tuple[np.ndarray, np.ndarray]:  # a [K], b [K]
        """x_0 = a x_t + b output."""
        if prediction not in PREDICTIONS:
            raise ConfigError(
                f"prediction={prediction} is not for a flow; choose one of {', '.join(PREDICTIONS)}"
            )
        return np.ones_like(self.times), -self.times

    def log_variance_range(self, variance: str) -> tuple[np.ndarray, np.ndarray]:  # [K], [K]
        """Nothing is drawn in sampling. ConfigError: a variance that a network says."""
        if variance not in ("fixed_small", "fixed_large"):
            raise ConfigError(f"variance={variance} is not for a flow, which has fixed_small")
        return np.zeros_like(self.times), np.zeros_like(self.times)

    def respace(
        self,
        steps: int | str | Sequence[int] | None,
        spacing: str = "linspace",
        **_: bool,  # of NoiseSchedule
    ) -> "FlowSchedule":
        r"""The levels of a chain of so many steps, from t = 1, before the last one leads to t = 0.

        | spacing  | before the shift
        | linspace | from 1 to the least of training, in equal steps: diffusers'
                     FlowMatchEulerDiscreteScheduler, which shifts that least time again
        | trailing | 1, 1 - 1/K, ..., 1/K
        | karras   | the shifted ends of linspace, between them in equal steps of t^(1/7) (Karras et
                     al., 2022, eq. 5), as diffusers has it

        ConfigError: another spacing, or a number of steps that is none.
        """
        if spacing not in SPACINGS:
            raise ConfigError(
                f"spacing={spacing} is not for a flow; choose one of {', '.join(SPACINGS)}"
            )
        if steps is None and spacing != "karras":
            return self
        count = count_of("steps", self.num_timesteps if steps is None else steps)
        if spacing == "trailing":
            times = np.arange(1, count + 1) / count
        else:
            times = np.linspace(1.0, self.least, count)[::-1]
        times = _shifted(times, self.shift)
        if spacing == "karras":
            times = karras_sigmas(_shifted(self.least, self.shift), 1.0, count)
        return FlowSchedule(times, self.num_train_timesteps, self.shift, self.least)

    def first(self, count: int) -> "FlowSchedule":
        """The chain's so many least noisy levels."""
        return replace(self, times=self.times[:count])

    def training_table(self, device: torch.device | str = "cpu") -> Tensor:  # float32 [K, 2]
        """1 - t, t: the table of `q_sample`."""
        columns = np.stack(self.signal_and_noise, axis=1)
        return torch.tensor(columns, dtype=torch.float32, device=device)

    def target_table(self, device: torch.device | str = "cpu") -> Tensor:  # float32 [K, 2]
        """1, 1: the table of `denoise_loss`, whose v is then epsilon - x_0."""
        return torch.ones(self.num_timesteps, 2, device=device)


def _shifted(times: np.ndarray | float, shift: float) -> np.ndarray | float:
    return shift * times / (1 + (shift - 1) * times)
