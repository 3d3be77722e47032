r"""Sampling: the reverse process from noise to images.

DDPM and DDIM, for every prediction and variance, are one linear step with other constants:

    x_0     = clip(a x_t + b output)
    x_{t-1} = c x_0 + d x_t + e output + sigma z

So a sampler is a table with a row a step, which `denoise_step` indexes on the device: the loop
never waits for the host, one launch is a step, and on a GPU the steps are one CUDA graph (`chain`).
The solvers of higher order, which remember the x_0 of the step before, are in `solvers`.

Against diffusers. DDPMScheduler is the same for every spacing but in one case: it adds noise in the
last step whenever that step's timestep is above 0 (spacing trailing), which matters with
fixed_large and the learned variances; here, as in guided-diffusion, the last step adds none, unless
DDPM is made with noisy_end=True.
DDIMScheduler (set_alpha_to_one, steps_offset=0) is the same where its previous timestep,
t - T // steps, is the next one visited: spacing leading always, trailing if steps divides T,
linspace only if steps is T or 1. Elsewhere it steps to a noise level that it then does not continue
from; here the levels join, unless DDIM is made with joined=False, which is diffusers' everywhere.

References:
    Denoising Diffusion Probabilistic Models (Ho et al., 2020), https://arxiv.org/abs/2006.11239
    Improved Denoising Diffusion Probabilistic Models (Nichol and Dhariwal, 2021),
        https://arxiv.org/abs/2102.09672
    Denoising Diffusion Implicit Models (Song et al., 2021), https://arxiv.org/abs/2010.02502
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from triton_kernels.noise.philox import INITIAL
from triton_kernels.runtime.dependent_launch import dependent_launches

from ..errors import ConfigError
from ..process.edm import in_units
from ..process.flow import FlowSchedule
from ..process.objective import Denoiser, check_output
from ..process.schedule import LEARNED_VARIANCES, NoiseSchedule
from ..runtime.backend import Backend
from .chain import Bound, Chain, GuidedOutput, Progress, TabulatedDenoiser, tabulated
from .edit import Edit, check_visits, kept_steps, revisited


def ddpm_table(
    schedule: NoiseSchedule,
    prediction: str = "epsilon",
    variance: str = "fixed_small",
    noisy_end: bool = False,
) -> np.ndarray:  # float64 [K, 8], rows in the order of execution
    r"""Ancestral sampling (Ho et al., 2020, algorithm 2):

        x_{t-1} = c x_0 + d x_t + sigma_t z,   c x_0 + d x_t the mean of q(x_{t-1} | x_t, x_0)

    sigma_t^2 is beta~_t (fixed_small), beta_t (fixed_large) or between them by the network's word
    (learned_range). The last step adds no noise; with `noisy_end`, none at timestep 0, and else
    that of its beta, beta~ being 1e-20, as in diffusers.
    """
    a, b = schedule.x0_from_output(prediction)
    c, d = schedule.posterior_mean()
    log_min, log_max = schedule.log_variance_range(variance)
    noisy_end = noisy_end and schedule.timestep_map[0] > 0
    if noisy_end and variance != "learned":
        log_min, log_max = log_min.copy(), log_max.copy()
        least, most = np.log(1e-20), np.log(schedule.betas[0])
        log_min[0] = most if variance == "fixed_large" else least
        log_max[0] = least if variance == "fixed_small" else most
    if variance in LEARNED_VARIANCES:
        sigma = np.ones(schedule.num_timesteps)
    else:
        sigma = np.exp(0.5 * log_min)
        log_min = log_max = np.zeros(schedule.num_timesteps)
    if not noisy_end:
        sigma[0] = 0
    return executed(a, b, c, d, np.zeros_like(c), sigma, log_min, log_max)


def ddim_table(
    schedule: NoiseSchedule,
    prediction: str = "epsilon",
    eta: float = 0.0,
    use_clipped_model_output: bool = True,
    previous: np.ndarray | None = None,
) -> np.ndarray:  # float64 [K, 8], rows in the order of execution
    r"""Song et al., 2021, equations 12 and 16, with A_t = alpha_bar_t for the paper's alpha_t:

        x_{t-1} = sqrt(A_{t-1}) x_0 + sqrt(1 - A_{t-1} - sigma_t^2) epsilon + sigma_t z
        sigma_t = eta sqrt((1 - A_{t-1}) / (1 - A_t)) sqrt(1 - A_t / A_{t-1})

    epsilon is derived again from the clipped x_0, (x_t - sqrt(A_t) x_0) / sqrt(1 - A_t), as
    guided-diffusion does; or, with use_clipped_model_output=False, it is the network's own, which
    is the default of diffusers. The two differ where x_0 was clipped. A learned variance is unused.

    guided-diffusion rounds alpha_bar to float32 before it takes 1 - alpha_bar, which costs 3e-4 of
    x_t at t = 1 of 1000. Its form is reproduced with that rounding, so that its images come out;
    the other form is exact, and so are both for levels of their own.

    `previous` is A_{t-1} of each step, [K]; None: of the next one visited.
    """
    a, b = schedule.x0_from_output(prediction)
    alpha_bar = schedule.alphas_cumprod
    dtype = np.float32 if use_clipped_model_output and previous is None else np.float64
    previous = schedule.alphas_cumprod_prev if previous is None else previous
    sigma, direction = _ddim_deviations(alpha_bar.astype(dtype), previous.astype(dtype), eta)

    # epsilon = p x_0 + q x_t before the clipping of x_0 = a x_t + b output, or after it
    p, q = -np.sqrt(alpha_bar / (1 - alpha_bar)), 1 / np.sqrt(1 - alpha_bar)
    if use_clipped_model_output:
        c, d, e = np.sqrt(previous) + direction * p, direction * q, np.zeros_like(p)
    else:
        c, d, e = np.sqrt(previous), direction * (p * a + q), direction * p * b
    zero = np.zeros_like(sigma)
    return executed(a, b, c, d, e, sigma, zero, zero)


def euler_table(
    schedule: NoiseSchedule | FlowSchedule, prediction: str = "epsilon"
) -> np.ndarray:  # float64 [K, 8], rows in the order of execution
    r"""Euler's method on y = x / scale, from the level s to the next, t:

        y_t = y_s + (sigma_t - sigma_s) y'_s,   y' = (y - x_0) / sigma

    DDIM without noise is the same step; of a flow it is x + (t - s) v."""
    a, b = schedule.x0_from_output(prediction)
    scale, sigma = schedule.ode_levels
    scale_next, sigma_next = np.append(1.0, scale[:-1]), np.append(0.0, sigma[:-1])
    c = scale_next * (1 - sigma_next / sigma)
    d = scale_next * sigma_next / (scale * sigma)
    zero = np.zeros_like(a)
    return executed(a, b, c, d, zero, zero, zero, zero)


def _ddim_deviations(
    alpha_bar: np.ndarray, previous: np.ndarray, eta: float
) -> tuple[np.ndarray, np.ndarray]:  # sigma [T], sqrt(1 - previous - sigma^2) [T]
    """In the precision of the arguments, and with their roundings."""
    sigma = eta * np.sqrt((1 - previous) / (1 - alpha_bar)) * np.sqrt(1 - alpha_bar / previous)
    return sigma, np.sqrt(1 - previous - sigma**2)


def executed(*columns: np.ndarray) -> np.ndarray:
    """The columns as a table whose first row is the noisiest step."""
    return np.stack(columns, axis=1)[::-1].copy()


class Sampler:
    r"""Draws images with a trained denoiser. A subclass says by which table.

    Arguments:
        schedule: The chain that the denoiser was trained on.
        backend: Whose ops draw the noise and make the step.
        steps: How many steps of the chain to take, or guided-diffusion's strings ("ddim50",
            "10,15,20"); None: all of them. See `schedule.space_timesteps`.
        spacing: Which steps: guided, leading, trailing, linspace or karras; None: what suits the
            sampler, guided for DDPM and DDIM, leading for the solvers; linspace for a flow.
        clip: x_0 is clamped to [-clip, clip] in every step; None: it is not.
        prediction: What the denoiser predicts: epsilon, sample or v_prediction; of a flow velocity.
        variance: fixed_small, fixed_large, learned_range or learned.
        sigma_data: What x_0 is divided by in the chain that the denoiser knows, see `edm`.
        strength: The share of the steps that are taken, the last ones; see `edit`.
        resample: How often each level is gone to, see `edit`.
        device: Where to sample.
        capture: Whether a CUDA graph runs the chain, which asks that the denoiser never waits for
            the device; None: on a GPU. The graph of the batch drawn last is kept, with its memory.
    """

    spacing = "guided"
    respacing: Mapping[str, bool] = {}  # options of NoiseSchedule.respace
    remembers = False  # whether a step reads the x_0 of the one before
    start_deviation = 1.0  # of the noise x_T

    def __init__(
        self,
        schedule: NoiseSchedule | FlowSchedule,
        backend: Backend,
        *,
        steps: int | str | Sequence[int] | None = None,
        spacing: str | None = None,
        clip: float | None = 1.0,
        prediction: str = "epsilon",
        variance: str = "fixed_small",
        sigma_data: float = 1.0,
        strength: float = 1.0,
        resample: int = 1,
        device: torch.device | str = "cpu",
        capture: bool | None = None,
    ) -> None:
        if clip is not None and not (_is_number(clip) and clip > 0):
            raise ConfigError(f"clip={clip} is not possible; give a number above 0, or null")
        if isinstance(schedule, FlowSchedule):
            self._check_flow()
            spacing = "linspace" if spacing is None else spacing
        self.backend = backend
        self.spacing = self.spacing if spacing is None else spacing
        check_visits(resample)
        if resample > 1 and self.remembers:
            raise ConfigError(
                f"resample={resample} is for samplers that remember no step; choose one of ddpm,"
                " ddim, euler"
            )
        whole = schedule.respace(steps, self.spacing, **self.respacing)
        self.strength, self.all_steps = strength, whole.num_timesteps
        kept = kept_steps(strength, self.all_steps)
        self.schedule = whole if kept == self.all_steps else whole.first(kept)
        self.clip = clip
        self.prediction = prediction
        self.variance = variance
        self.schedule.log_variance_range(variance)  # an unknown name fails, used or not

        self.sigma_data = sigma_data
        table, levels, timesteps = self.table(), self._levels(), self.row_timesteps()
        behind = self._behind(np.append(levels[1:], [[1.0, 0.0]], axis=0))
        self._visited: np.ndarray | None = None  # rows of the table, if they are not all, in turn
        if resample > 1:
            table, behind, self._visited = revisited(table, levels, behind, resample)
            timesteps = timesteps[self._visited]
        if sigma_data != 1:
            table = in_units(table, sigma_data, self.remembers)
            levels, behind = levels / (sigma_data, 1), behind / (sigma_data, 1)
            behind[-1] = 1, 0
        self.rows = torch.tensor(table, dtype=torch.float32, device=device)  # [K, 8]
        # signal and noise that the chain begins with, and behind each row
        self.start_level = torch.tensor(levels[:1], dtype=torch.float32, device=device)  # [1, 2]
        self.levels = torch.tensor(behind, dtype=torch.float32, device=device)  # [K, 2]
        timesteps = torch.tensor(timesteps, device=device)  # [K]
        # int64, but for levels between the timesteps
        self.timesteps = timesteps.float() if timesteps.is_floating_point() else timesteps
        self.capture = self.rows.is_cuda if capture is None else capture
        self._captured: tuple[Any, Chain] | None = None  # what it is of, and the chain

    def _check_flow(self) -> None:
        """ConfigError unless this can follow a flow."""

    @property
    def num_steps(self) -> int:
        """K, the number of evaluations of the denoiser."""
        return len(self.timesteps)

    def table(self) -> np.ndarray:  # float64 [K, 8]
        """The constants of `denoise_step`: a, b, c, d, e, sigma, log_min, log_max; row k is the
        k-th step executed."""
        raise NotImplementedError

    def row_timesteps(self) -> np.ndarray:  # [K]
        """What the denoiser is told in each row of the table."""
        return self.schedule.timestep_map[::-1].copy()

    def row_sigmas(self) -> np.ndarray:  # [K]
        """The noise in each row beside x_0, in the units of the data."""
        sigmas = self.schedule.sigmas[::-1] * self.sigma_data
        return sigmas if self._visited is None else sigmas[self._visited]

    def _levels(self) -> np.ndarray:  # float64 [L, 2]
        """Signal and noise of each level, in the order of execution."""
        return np.stack(self.schedule.signal_and_noise, axis=1)[::-1].copy()

    def _behind(self, levels: np.ndarray) -> np.ndarray:  # [L, 2] -> [K, 2]
        """Signal and noise that each row of the table leads to, of those that each level does."""
        return levels

    def new_memory(self, x: Tensor) -> Tensor | None:
        """What `step` is to carry from one step to the next, if anything: x_0 is written there."""
        return None

    def step(
        self,
        denoiser: Denoiser | TabulatedDenoiser | Bound,
        x: Tensor,  # float32 [N, H, W, C]
        row: Tensor,  # int64 [1]: k, on the device
        rng: Tensor,  # int64 [2]: seed, 0
        *,
        labels: Tensor | None = None,  # [N], but for a Bound, which has them
        first: int | Tensor = 0,  # the number of sample 0, or int64 [1] on the device
        memory: Tensor | None = None,  # of new_memory
        known: tuple[Tensor, Tensor] | None = None,  # of an `Edit`
    ) -> Tensor:  # float32 [N, H, W, C]
        """x_t -> x_{t-1}. Depends on no host value that changes from step to step, so that one
        captured graph serves all of them."""
        output = self.evaluate(denoiser, x, row, labels)
        options: dict[str, Any] = {"first": first, "clip": self.clip, "memory": memory}
        if isinstance(output, GuidedOutput):
            output, *guidance = output
            options |= zip(("negative", "scales", "rescale"), guidance, strict=True)
        if known is not None:
            options |= {"known": known[0], "mask": known[1], "levels": self.levels}
        return self.backend.ops.denoise_step(x, output, self.rows, row, rng, **options)

    def evaluate(
        self,
        denoiser: Denoiser | TabulatedDenoiser | Bound,
        x: Tensor,
        row: Tensor,
        labels: Tensor | None,
    ) -> Tensor | GuidedOutput:  # [N, H, W, C or 2C]
        """What the denoiser says at the timestep of this row."""
        if not isinstance(denoiser, Bound):
            denoiser = self._bind(denoiser, labels, len(x))
        output = denoiser(x, row)
        check_output(
            output.output if isinstance(output, GuidedOutput) else output, x, self.variance
        )
        return output

    @torch.no_grad()
    def sample(
        self,
        denoiser: Denoiser | TabulatedDenoiser,
        shape: tuple[int, int, int, int],  # N, H, W, C
        *,
        seed: int,
        labels: Tensor | None = None,  # [N]
        first: int = 0,
        progress: Progress | None = None,
        x: Tensor | None = None,  # float32 [N, H, W, C]
        edit: Edit | None = None,
    ) -> Tensor:  # float32 [N, H, W, C]
        """N images, numbers first .. first + N - 1 of this seed.

        The noise of image i is a function of (seed, i) alone: the way a set of images is cut into
        batches does not change it, nor the image, beyond what a network rounds otherwise in a batch
        of another size. `x` replaces the noise x_T that the chain starts from, and so do, with a
        strength below 1, the images of an `edit`, with noise. `progress` is called
        with (steps done, steps in all) after each step is queued, or each graph of several.

        ValueError: a seed that is no whole number of 64 bits, numbers of images that do not fit
        into 32, x of another shape, or what the denoiser finds wrong with labels.
        """
        _check_counters(seed, first, len(x) if x is not None else shape[0])
        device = self.rows.device
        rng = torch.tensor([seed, 0], dtype=torch.int64, device=device)
        known = None
        if edit is not None:
            index = edit.of(first, len(x) if x is not None else shape[0])
            known = edit.known(index)
        if x is None and edit is not None and self.strength < 1:
            t = torch.zeros_like(index)
            x = self.backend.ops.q_sample(
                edit.images, t, self.start_level, rng, first=first, index=index
            )
        elif x is None:
            x = self.backend.ops.normal(tuple(shape), rng, stream=INITIAL, first=first)
            x = x if self.start_deviation == 1 else x * self.start_deviation
        elif x.shape != tuple(shape):
            raise ValueError(f"x has shape {list(x.shape)}; shape says {list(shape)}")
        bound = self._bind(denoiser, labels, len(x))
        if self.capture and x.numel():
            chain = self._chain(denoiser, bound, x, known)
            return chain.run(x, seed, first, bound.tables, progress, known)
        steps = torch.arange(self.num_steps, device=device)
        memory = self.new_memory(x)
        for k in range(self.num_steps):
            row = steps[k : k + 1]
            x = self.step(bound, x, row, rng, first=first, memory=memory, known=known)
            if progress is not None:
                progress(k + 1, self.num_steps)
        return x

    @torch.no_grad()
    def rehearse(
        self,
        denoiser: Denoiser | TabulatedDenoiser,
        shape: tuple[int, int, int, int],  # N, H, W, C
        labels: Tensor | None = None,  # [N]
    ) -> None:
        """Launch what a chain on a GPU launches; see `triton_kernels.runtime.launch_recorder`."""
        device = self.rows.device
        pairs = torch.zeros(1, 2, dtype=torch.int64, device=device)
        row, first = pairs[0, :1], torch.zeros(1, dtype=torch.int64, device=device)
        x = self.backend.ops.normal(tuple(shape), pairs[0], stream=INITIAL, first=0)
        bound, memory = self._bind(denoiser, labels, len(x)), self.new_memory(x)
        with dependent_launches(x[..., 0].numel()):
            for _ in range(2):  # the second finds memory that the first has made
                self.step(bound, x, row, pairs[0], first=first, memory=memory)

    def _bind(self, denoiser: Denoiser | TabulatedDenoiser, labels: Tensor | None, n: int) -> Bound:
        denoiser = tabulated(denoiser, self.backend.dtype)
        return Bound(denoiser, denoiser.tabulate(self.timesteps, labels, n))

    def _chain(
        self,
        denoiser: Denoiser | TabulatedDenoiser,
        bound: Bound,
        x: Tensor,
        known: tuple[Tensor, Tensor] | None,
    ) -> Chain:
        """The captured chain for this denoiser and these shapes."""
        tables = [(table.shape, table.dtype) for table in bound.tables]
        what = (denoiser, x.shape, tables, known is None)
        if self._captured is None or self._captured[0] != what:
            self._captured = None  # first, so that its memory serves the next
            self._captured = what, Chain(self, bound.denoiser, x, bound.tables, known)
        return self._captured[1]


class DDPM(Sampler):
    """Ancestral sampling, see `ddpm_table`.

    Arguments:
        noisy_end: Whether the last step adds noise if its timestep is above 0, as in diffusers.
    """

    def __init__(
        self,
        schedule: NoiseSchedule | FlowSchedule,
        backend: Backend,
        *,
        noisy_end: bool = False,
        **options: Any,  # of Sampler
    ) -> None:
        self.noisy_end = noisy_end
        super().__init__(schedule, backend, **options)

    def _check_flow(self) -> None:
        raise ConfigError(
            "sampler=ddpm draws noise in every step, which a flow has not; choose one of euler,"
            " heun, dpmpp_2m"
        )

    def table(self) -> np.ndarray:
        return ddpm_table(self.schedule, self.prediction, self.variance, self.noisy_end)


class DDIM(Sampler):
    """Implicit sampling, see `ddim_table`.

    Arguments:
        eta: The noise, from 0 (none) to 1 (as much as DDPM).
        use_clipped_model_output: Which epsilon to go on with.
        joined: Whether a step leads to the level that the next one starts from. False: to that of
            timestep t - T // steps, as in diffusers, see above; for spacings that diffusers has,
            whose steps are about so far apart.
    """

    def __init__(
        self,
        schedule: NoiseSchedule | FlowSchedule,
        backend: Backend,
        *,
        eta: float = 0.0,
        use_clipped_model_output: bool = True,
        joined: bool = True,
        **options: Any,  # of Sampler
    ) -> None:
        if not (_is_number(eta) and 0 <= eta <= 1):
            raise ConfigError(f"eta={eta} is not possible; give a number from 0 to 1")
        self.eta = eta
        self.use_clipped_model_output = use_clipped_model_output
        joined = joined or isinstance(schedule, FlowSchedule)
        self._all_levels = None if joined else schedule.alphas_cumprod  # [T]
        super().__init__(schedule, backend, **options)

    def _check_flow(self) -> None:
        if self.eta:
            raise ConfigError(f"eta={self.eta} has no meaning with a flow; leave it at 0")

    def table(self) -> np.ndarray:
        if isinstance(self.schedule, FlowSchedule):
            return euler_table(self.schedule, self.prediction)  # which DDIM without noise is
        previous = None
        if self._all_levels is not None and self.spacing in ("leading", "trailing", "linspace"):
            t = self.schedule.timestep_map - len(self._all_levels) // self.all_steps
            previous = np.where(t < 0, 1.0, self._all_levels[np.maximum(t, 0)])
        return ddim_table(
            self.schedule, self.prediction, self.eta, self.use_clipped_model_output, previous
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_counters(seed: int, first: int, n: int) -> None:
    """ValueError unless the counters of the noise hold them: others would draw the noise of some
    other seed or image."""
    if not isinstance(seed, int | np.integer) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed is {seed}; expected a whole number from -2^63 to 2^63 - 1")
    if not isinstance(first, int | np.integer) or not 0 <= first <= 2**32 - n:
        raise ValueError(
            f"first is {first}; expected a whole number from 0 to 2^32 - {n}, the images' number"
        )
