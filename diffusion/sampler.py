r"""Sampling: the reverse process from noise to images.

DDPM and DDIM, for every prediction and variance, are one linear step with other constants:

    x_0     = clip(a x_t + b output)
    x_{t-1} = c x_0 + d x_t + e output + sigma z

So a sampler is a table with a row a step, which `denoise_step` indexes on the device: the loop
never waits for the host, and one launch is a step. A solver that needs more than that (a second
evaluation, a memory of earlier steps) is a class that overrides `Sampler.table` and `Sampler.step`.

Against diffusers. DDPMScheduler is the same for every spacing but in one case: it adds noise in the
last step whenever that step's timestep is above 0 (spacing trailing), which matters with
fixed_large and the learned variances; here, as in guided-diffusion, the last step adds none.
DDIMScheduler (set_alpha_to_one, steps_offset=0) is the same where its previous timestep,
t - T // steps, is the next one visited: spacing leading always, trailing if steps divides T,
linspace only if steps is T or 1. Elsewhere it steps to a noise level that it then does not continue
from; here the levels join.

References:
    Denoising Diffusion Probabilistic Models (Ho et al., 2020), https://arxiv.org/abs/2006.11239
    Improved Denoising Diffusion Probabilistic Models (Nichol and Dhariwal, 2021),
        https://arxiv.org/abs/2102.09672
    Denoising Diffusion Implicit Models (Song et al., 2021), https://arxiv.org/abs/2010.02502
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from triton_kernels.philox import INITIAL

from .backend import Backend
from .errors import ConfigError
from .objective import Denoiser, check_output
from .schedule import LEARNED_VARIANCES, NoiseSchedule

SAMPLERS = ("ddpm", "ddim")


def ddpm_table(
    schedule: NoiseSchedule, prediction: str = "epsilon", variance: str = "fixed_small"
) -> np.ndarray:  # float64 [K, 8], rows in the order of execution
    r"""Ancestral sampling (Ho et al., 2020, algorithm 2):

        x_{t-1} = c x_0 + d x_t + sigma_t z,   c x_0 + d x_t the mean of q(x_{t-1} | x_t, x_0)

    sigma_t^2 is beta~_t (fixed_small), beta_t (fixed_large) or between them by the network's word
    (learned_range). The last step adds no noise.
    """
    a, b = schedule.x0_from_output(prediction)
    c, d = schedule.posterior_mean()
    log_min, log_max = schedule.log_variance_range(variance)
    if variance in LEARNED_VARIANCES:
        sigma = np.ones(schedule.num_timesteps)
    else:
        sigma = np.exp(0.5 * log_min)
        log_min = log_max = np.zeros(schedule.num_timesteps)
    sigma[0] = 0
    return _executed(a, b, c, d, np.zeros_like(c), sigma, log_min, log_max)


def ddim_table(
    schedule: NoiseSchedule,
    prediction: str = "epsilon",
    eta: float = 0.0,
    use_clipped_model_output: bool = True,
) -> np.ndarray:  # float64 [K, 8], rows in the order of execution
    r"""Song et al., 2021, equations 12 and 16, with A_t = alpha_bar_t for the paper's alpha_t:

        x_{t-1} = sqrt(A_{t-1}) x_0 + sqrt(1 - A_{t-1} - sigma_t^2) epsilon + sigma_t z
        sigma_t = eta sqrt((1 - A_{t-1}) / (1 - A_t)) sqrt(1 - A_t / A_{t-1})

    epsilon is derived again from the clipped x_0, (x_t - sqrt(A_t) x_0) / sqrt(1 - A_t), as
    guided-diffusion does; or, with use_clipped_model_output=False, it is the network's own, which
    is the default of diffusers. The two differ where x_0 was clipped. A learned variance is unused.

    guided-diffusion rounds alpha_bar to float32 before it takes 1 - alpha_bar, which costs 3e-4 of
    x_t at t = 1 of 1000. Its form is reproduced with that rounding, so that its images come out;
    the other form is exact.
    """
    a, b = schedule.x0_from_output(prediction)
    alpha_bar, previous = schedule.alphas_cumprod, schedule.alphas_cumprod_prev
    dtype = np.float32 if use_clipped_model_output else np.float64
    sigma, direction = _ddim_deviations(alpha_bar.astype(dtype), previous.astype(dtype), eta)

    # epsilon = p x_0 + q x_t before the clipping of x_0 = a x_t + b output, or after it
    p, q = -np.sqrt(alpha_bar / (1 - alpha_bar)), 1 / np.sqrt(1 - alpha_bar)
    if use_clipped_model_output:
        c, d, e = np.sqrt(previous) + direction * p, direction * q, np.zeros_like(p)
    else:
        c, d, e = np.sqrt(previous), direction * (p * a + q), direction * p * b
    zero = np.zeros_like(sigma)
    return _executed(a, b, c, d, e, sigma, zero, zero)


def _ddim_deviations(
    alpha_bar: np.ndarray, previous: np.ndarray, eta: float
) -> tuple[np.ndarray, np.ndarray]:  # sigma [T], sqrt(1 - previous - sigma^2) [T]
    """In the precision of the arguments, and with their roundings."""
    sigma = eta * np.sqrt((1 - previous) / (1 - alpha_bar)) * np.sqrt(1 - alpha_bar / previous)
    return sigma, np.sqrt(1 - previous - sigma**2)


def _executed(*columns: np.ndarray) -> np.ndarray:
    """The columns as a table whose first row is the noisiest step."""
    return np.stack(columns, axis=1)[::-1].copy()


class Sampler:
    r"""Draws images with a trained denoiser.

    Arguments:
        schedule: The chain that the denoiser was trained on.
        backend: Whose ops draw the noise and make the step.
        sampler: ddpm or ddim.
        steps: How many steps of the chain to take, or guided-diffusion's strings ("ddim50",
            "10,15,20"); None: all of them. See `schedule.space_timesteps`.
        spacing: Which steps: guided, leading, trailing or linspace.
        eta: DDIM's noise, from 0 (none) to 1 (as much as DDPM).
        clip: x_0 is clamped to [-clip, clip] in every step; None: it is not.
        prediction: What the denoiser predicts: epsilon, sample or v_prediction.
        variance: fixed_small, fixed_large, learned_range or learned.
        use_clipped_model_output: Which epsilon DDIM goes on with, see `ddim_table`.
        device: Where to sample.
    """

    def __init__(
        self,
        schedule: NoiseSchedule,
        backend: Backend,
        sampler: str = "ddpm",
        *,
        steps: int | str | Sequence[int] | None = None,
        spacing: str = "guided",
        eta: float = 0.0,
        clip: float | None = 1.0,
        prediction: str = "epsilon",
        variance: str = "fixed_small",
        use_clipped_model_output: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        if sampler not in SAMPLERS:
            raise ConfigError(f"sampler={sampler} is unknown; choose one of {', '.join(SAMPLERS)}")
        if not 0 <= eta <= 1:
            raise ConfigError(f"eta={eta} is not possible; give a number from 0 to 1")
        if eta and sampler != "ddim":
            raise ConfigError(f"eta={eta} has no meaning with sampler={sampler}; use sampler=ddim")
        if clip is not None and clip <= 0:
            raise ConfigError(f"clip={clip} is not possible; give a number above 0, or null")
        self.backend = backend
        self.schedule = schedule if steps is None else schedule.respace(steps, spacing)
        self.sampler = sampler
        self.eta = eta
        self.clip = clip
        self.prediction = prediction
        self.variance = variance
        self.use_clipped_model_output = use_clipped_model_output
        self.schedule.log_variance_range(variance)  # an unknown name fails here for DDIM too

        self.rows = torch.tensor(self.table(), dtype=torch.float32, device=device)  # [K, 8]
        timesteps = self.schedule.timestep_map[::-1].copy()
        self.timesteps = torch.tensor(timesteps, device=device)  # int64 [K]

    @property
    def num_steps(self) -> int:
        """K."""
        return len(self.timesteps)

    def table(self) -> np.ndarray:  # float64 [K, 8]
        """The constants of `denoise_step`: a, b, c, d, e, sigma, log_min, log_max; row k is the
        k-th step executed."""
        if self.sampler == "ddpm":
            return ddpm_table(self.schedule, self.prediction, self.variance)
        return ddim_table(self.schedule, self.prediction, self.eta, self.use_clipped_model_output)

    def step(
        self,
        denoiser: Denoiser,
        x: Tensor,  # float32 [N, H, W, C]
        row: Tensor,  # int64 [1]: k, on the device
        rng: Tensor,  # int64 [2]: seed, 0
        *,
        labels: Tensor | None = None,  # [N]
        first: int = 0,
    ) -> Tensor:  # float32 [N, H, W, C]
        """x_t -> x_{t-1}. Depends on no host value that changes from step to step, so that one
        captured graph serves all of them."""
        t = self.timesteps[row.expand(x.shape[0])]
        output = denoiser(x.to(self.backend.dtype), t, labels)
        check_output(output, x, self.variance)
        return self.backend.ops.denoise_step(
            x, output, self.rows, row, rng, first=first, clip=self.clip
        )

    @torch.no_grad()
    def sample(
        self,
        denoiser: Denoiser,
        shape: tuple[int, int, int, int],  # N, H, W, C
        *,
        seed: int,
        labels: Tensor | None = None,  # [N]
        first: int = 0,
        progress: Callable[[int, int], None] | None = None,
        x: Tensor | None = None,  # float32 [N, H, W, C]
    ) -> Tensor:  # float32 [N, H, W, C]
        """N images, numbers first .. first + N - 1 of this seed.

        Image i is a function of (seed, i) alone: the way a set of images is cut into batches does
        not change it. `x` replaces the noise x_T that the chain starts from. `progress` is called
        with (steps done, steps in all) after each step is queued.
        """
        device = self.rows.device
        rng = torch.tensor([seed, 0], dtype=torch.int64, device=device)
        if x is None:
            x = self.backend.ops.normal(tuple(shape), rng, stream=INITIAL, first=first)
        elif x.shape != tuple(shape):
            raise ValueError(f"x has shape {list(x.shape)}; shape says {list(shape)}")
        steps = torch.arange(self.num_steps, device=device)
        for k in range(self.num_steps):
            x = self.step(denoiser, x, steps[k : k + 1], rng, labels=labels, first=first)
            if progress is not None:
                progress(k + 1, self.num_steps)
        return x
