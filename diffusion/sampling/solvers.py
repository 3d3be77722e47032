r"""Deterministic solvers: Euler, Heun and DPM-Solver++(2M).

All follow the probability-flow ODE, with alpha_t = sqrt(alpha_bar_t) and the noise level
sigma_t = sqrt(1 / alpha_bar_t - 1) of x_t / alpha_t, from one level to the next and at the end to
sigma = 0. Euler and Heun follow that of a flow in x and t, where it is straight (`ode_levels`).
Written with x_0 instead of the derivative or epsilon, a step of any is

    x_0   = clip(a x_t + b output)
    x     = c x_0 + d x_t + e x_0'         x_0' as it was one row before
    x_0' := x_0

with constants of the row alone. So a solver is a table. The columns are `denoise_step`'s (sigma,
log_min and log_max are 0) but for e, which here multiplies x_0' and not the output: `denoise_step`
with a memory, which it reads for the sum and overwrites, is the whole step in one launch. A learned
variance is unused.

Against diffusers. Heun is HeunDiscreteScheduler, which keeps x_t / alpha_t and starts linspace and
trailing from sigma_max epsilon, where x_T = epsilon is taken here unless Heun is made with
noise_alone=True (a difference of 2e-5 for the linear schedule, of 2e-3 for the scaled-linear one of
Rombach et al.; none for leading). DPMSolverPP2M is DPMSolverMultistepScheduler with its defaults
(dpmsolver++, order 2, midpoint, final_sigmas_type zero; lower_order_final changes nothing then),
and clip its thresholding with sample_max_value=1. It truncates the timesteps of use_karras_sigmas
with the cosine schedule and rounds them with others; here they are always rounded. Of a flow Euler
is FlowMatchEulerDiscreteScheduler and Heun FlowMatchHeunDiscreteScheduler, neither of which clips.

References:
    Elucidating the Design Space of Diffusion-Based Generative Models (Karras et al., 2022),
        https://arxiv.org/abs/2206.00364
    DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models (Lu et al.,
        2022), https://arxiv.org/abs/2211.01095
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..process.flow import FlowSchedule
from ..process.schedule import NoiseSchedule
from ..runtime.backend import Backend
from .sampler import Sampler, euler_table, executed


def dpmpp_2m_table(
    schedule: NoiseSchedule | FlowSchedule, prediction: str = "epsilon"
) -> np.ndarray:  # float64 [K, 8], rows in the order of execution
    r"""DPM-Solver++(2M) (Lu et al., 2022, algorithm 2), from the level s to the next, t:

        x_t = (alpha_t sigma_t) / (alpha_s sigma_s) x_s - alpha_t (exp(-h) - 1) D
        D   = (1 + h / 2h') x_0 - h / 2h' x_0',   h = lambda_t - lambda_s, lambda = -log sigma,

    h' being the h of the step before. The first step has no x_0' and the last, to sigma = 0, has
    no finite h: they are of first order, D = x_0.
    """
    a, b = schedule.x0_from_output(prediction)
    (alpha, noise), sigma = schedule.signal_and_noise, schedule.sigmas
    alpha_next, sigma_next = np.append(1.0, alpha[:-1]), np.append(0.0, sigma[:-1])
    h = -np.diff(np.log(sigma[::-1]))  # [K - 1], in the order of execution
    half = np.zeros_like(sigma)  # h / 2h'
    half[1:-1] = (h[1:] / (2 * h[:-1]))[::-1]  # 0 behind the infinite h of a flow's first step
    gain = alpha_next * (1 - sigma_next / sigma)  # -alpha_t (exp(-h) - 1)
    d = np.append(0.0, noise[:-1]) / noise
    zero = np.zeros_like(a)
    return executed(a, b, gain * (1 + half), d, -gain * half, zero, zero, zero)


def heun_table(
    schedule: NoiseSchedule | FlowSchedule, prediction: str = "epsilon"
) -> np.ndarray:  # float64 [2K - 1, 8], rows in the order of execution
    r"""Heun's method (Karras et al., 2022, algorithm 1 without its churn) on y = x / scale, from
    the level s to the next, t, in two rows. With y' = (y - x_0) / sigma:

        y_t = y_s + (sigma_t - sigma_s) y'_s            a step of Euler's, which is DDIM's
        y_t = y_s + (sigma_t - sigma_s) (y'_s + y'_t) / 2

    x_0 evaluated at s is x_0', and at the y_t of the first row is x_0, in the second row, which
    then reads

        y_t + (sigma_s - sigma_t) / (2 sigma_t) (x_0 - x_0').

    The last step, to sigma = 0, is Euler's alone.
    """
    a, b = schedule.x0_from_output(prediction)
    scale, sigma = schedule.ode_levels
    euler = euler_table(schedule, prediction)

    change = scale[:-1] * (sigma[1:] - sigma[:-1]) / (2 * sigma[:-1])
    zero, one = np.zeros_like(change), np.ones_like(change)
    correction = executed(a[:-1], b[:-1], change, one, -change, zero, zero, zero)

    table = np.empty((len(euler) + len(correction), 8))
    table[::2], table[1::2] = euler, correction
    return table


class Euler(Sampler):
    """Euler's method, see `euler_table`. One evaluation of the denoiser a step."""

    spacing = "leading"

    def table(self) -> np.ndarray:
        return euler_table(self.schedule, self.prediction)


class Solver(Sampler):
    """A sampler whose step also reads the x_0 of the row before, from its memory.

    Its spacing is leading unless told otherwise. A solver of second order takes x_0 for smooth
    between two levels, which fails across the ends of a chain: the cosine schedule falls from
    sigma = 2e4 in its first step (guided, trailing, linspace), and guided steps to t = 0 at last.
    """

    spacing = "leading"
    remembers = True

    def new_memory(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class DPMSolverPP2M(Solver):
    """DPM-Solver++(2M), see `dpmpp_2m_table`. One evaluation of the denoiser a step."""

    respacing = {"above_zero": True}

    def table(self) -> np.ndarray:
        return dpmpp_2m_table(self.schedule, self.prediction)


class Heun(Solver):
    """Heun's method, see `heun_table`. Two evaluations of the denoiser a step, one in the last.

    Arguments:
        noise_alone: Whether x_T / alpha_T is sigma_T epsilon (Karras et al., 2022, algorithm 1), as
            diffusers has it, for the spacings linspace, trailing and karras; of others, and if
            False, x_T is epsilon, which has the deviation of training.
    """

    respacing = {"fractional": True}

    def __init__(
        self,
        schedule: NoiseSchedule | FlowSchedule,
        backend: Backend,
        *,
        noise_alone: bool = False,
        **options: Any,  # of Sampler
    ) -> None:
        super().__init__(schedule, backend, **options)
        if noise_alone and self.spacing in ("linspace", "trailing", "karras"):
            self.start_deviation = float(self.schedule.signal_and_noise[1][-1])

    def table(self) -> np.ndarray:
        return heun_table(self.schedule, self.prediction)

    def row_timesteps(self) -> np.ndarray:
        return np.repeat(super().row_timesteps(), 2)[1:]

    def _behind(self, levels: np.ndarray) -> np.ndarray:
        return np.repeat(levels, 2, axis=0)[:-1]

    def row_sigmas(self) -> np.ndarray:
        return np.repeat(super().row_sigmas(), 2)[1:]
