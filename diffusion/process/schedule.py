r"""Noise schedules of the discrete-time Gaussian process, and respacing to fewer steps.

    q(x_t | x_0) = N(sqrt(alpha_bar_t) x_0, (1 - alpha_bar_t) I)
    alpha_bar_t  = prod_{s <= t} (1 - beta_s)

Everything is computed in float64 with numpy and cast to float32 at the very end, when a table is
put on a device.

References:
    Denoising Diffusion Probabilistic Models (Ho et al., 2020), https://arxiv.org/abs/2006.11239
    Improved Denoising Diffusion Probabilistic Models (Nichol and Dhariwal, 2021),
        https://arxiv.org/abs/2102.09672
    Common Diffusion Noise Schedules and Sample Steps are Flawed (Lin et al., 2023; names of the
        spacings), https://arxiv.org/abs/2305.08891
    Elucidating the Design Space of Diffusion-Based Generative Models (Karras et al., 2022),
        https://arxiv.org/abs/2206.00364
    High-Resolution Image Synthesis with Latent Diffusion Models (Rombach et al., 2022),
        https://arxiv.org/abs/2112.10752
    GeoDiff: a Geometric Diffusion Model for Molecular Conformation Generation (Xu et al., 2022),
        https://arxiv.org/abs/2203.02923
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .flow import FlowSchedule
from .levels import count_of, karras_sigmas

PREDICTIONS = ("epsilon", "sample", "v_prediction")
FIXED_VARIANCES = ("fixed_small", "fixed_large")
LEARNED_VARIANCES = ("learned_range", "learned")
SPACINGS = ("guided", "leading", "trailing", "linspace", "karras")


@dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """A chain of T noising steps, index 0 the least noisy.

    Arguments:
        betas: The variance beta_t of each step, in (0, 1), float64 [T].
        timestep_map: What the network is told at each step, [T]: the step's index in the chain that
            the network was trained on. None: 0 .. T - 1, the chain is the original one. Kept as
            int64, or as float64 if a level lies between two of that chain, or has another name
            (`edm`).
    """

    betas: np.ndarray
    timestep_map: np.ndarray | None = None

    def __post_init__(self) -> None:
        betas = np.asarray(self.betas, dtype=np.float64)
        if betas.ndim != 1 or not len(betas):
            raise ConfigError(f"betas has shape {list(betas.shape)}; give at least one beta")
        if not ((betas > 0) & (betas < 1)).all():
            raise ConfigError(
                f"betas run from {betas.min():g} to {betas.max():g}; each must lie strictly between"
                " 0 and 1 (take more num_timesteps, or smaller betas)"
            )
        steps = np.arange(len(betas)) if self.timestep_map is None else self.timestep_map
        steps = np.asarray(steps)
        if (steps == np.round(steps)).all():
            steps = steps.astype(np.int64)
        if steps.shape != betas.shape:
            raise ConfigError(f"timestep_map has {steps.size} entries; betas has {len(betas)}")
        object.__setattr__(self, "betas", betas)
        object.__setattr__(self, "timestep_map", steps)

    @classmethod
    def linear(
        cls,
        num_timesteps: int,
        beta_start: float | None = None,
        beta_end: float | None = None,
    ) -> "NoiseSchedule":
        r"""beta from 1e-4 to 0.02 in equal steps (Ho et al., 2020).

        The ends are scaled by 1000 / T, as in guided-diffusion, so that alpha_bar_T hardly depends
        on T; an end that is given is taken as it is.
        """
        return cls(np.linspace(*_ends(num_timesteps, beta_start, beta_end), num_timesteps))

    @classmethod
    def scaled_linear(
        cls,
        num_timesteps: int,
        beta_start: float | None = None,
        beta_end: float | None = None,
    ) -> "NoiseSchedule":
        r"""sqrt(beta) in equal steps (Rombach et al., 2022, from 8.5e-4 to 0.012); the ends are by
        themselves those of `linear`."""
        start, end = _ends(num_timesteps, beta_start, beta_end)
        return cls(np.linspace(start**0.5, end**0.5, num_timesteps) ** 2)

    @classmethod
    def sigmoid(
        cls,
        num_timesteps: int,
        beta_start: float | None = None,
        beta_end: float | None = None,
    ) -> "NoiseSchedule":
        r"""beta along a sigmoid from -6 to 6 (Xu et al., 2022, GeoDiff), between the ends of
        `linear` unless others are given."""
        start, end = _ends(num_timesteps, beta_start, beta_end)
        return cls(start + (end - start) / (1 + np.exp(-np.linspace(-6, 6, num_timesteps))))

    @classmethod
    def cosine(cls, num_timesteps: int, max_beta: float = 0.999) -> "NoiseSchedule":
        r"""The cosine schedule (Nichol and Dhariwal, 2021, eq. 17), squaredcos_cap_v2 in diffusers.

        alpha_bar(t) = cos((t / T + 0.008) / 1.008 * pi / 2)^2
        beta_t       = min(1 - alpha_bar(t + 1) / alpha_bar(t), max_beta)
        """
        total = count_of("num_timesteps", num_timesteps)
        # math.cos, number by number: numpy's vectorised cosine may differ in the last bit
        alpha_bar = [
            math.cos((t / total + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(total + 1)
        ]
        return cls(np.minimum(1 - np.divide(alpha_bar[1:], alpha_bar[:-1]), max_beta))

    @classmethod
    def edm(
        cls,
        num_timesteps: int,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        sigma_data: float = 0.5,
    ) -> "NoiseSchedule":
        r"""EDM's noise levels (Karras et al., 2022) in equal steps of ln(sigma), 1 % apart where
        there are 1,000, for images in units of sigma_data (see `edm`).

        alpha_bar = 1 / (1 + (sigma / sigma_data)^2), and the network is told ln(sigma) / 4
        """
        if not 0 < sigma_min < sigma_max < math.inf:
            raise ConfigError(
                f"sigma_min={sigma_min} and sigma_max={sigma_max} are not possible; give numbers"
                " above 0, sigma_max the larger"
            )
        sigmas = np.geomspace(
            sigma_min, sigma_max, count_of("num_timesteps", num_timesteps, least=2)
        )
        alpha_bar = 1 / (1 + (sigmas / sigma_data) ** 2)
        return cls(1 - alpha_bar / np.append(1.0, alpha_bar[:-1]), np.log(sigmas) / 4)

    @property
    def num_timesteps(self) -> int:
        """T."""
        return len(self.betas)

    @cached_property
    def alphas_cumprod(self) -> np.ndarray:  # [T]
        """alpha_bar_t."""
        return np.cumprod(1 - self.betas)

    @cached_property
    def alphas_cumprod_prev(self) -> np.ndarray:  # [T]
        """alpha_bar_{t-1}, which is 1 before the first step."""
        return np.append(1.0, self.alphas_cumprod[:-1])

    @property
    def snr(self) -> np.ndarray:  # [T]
        """alpha_bar_t / (1 - alpha_bar_t)."""
        return self.alphas_cumprod / (1 - self.alphas_cumprod)

    @property
    def sigmas(self) -> np.ndarray:  # [T]
        """The noise beside an x_0 of scale 1: x_t / sqrt(alpha_bar_t) = x_0 + sigma_t epsilon."""
        return np.sqrt(1 / self.snr)

    @property
    def drawn_sigmas(self) -> np.ndarray:  # [T]
        """The noise of each timestep that training may draw."""
        return self.sigmas

    @property
    def signal_and_noise(self) -> tuple[np.ndarray, np.ndarray]:  # [T], [T]
        """x_t = signal x_0 + noise epsilon."""
        return np.sqrt(self.alphas_cumprod), np.sqrt(1 - self.alphas_cumprod)

    @property
    def ode_levels(self) -> tuple[np.ndarray, np.ndarray]:  # scale [T], sigma [T]
        """The probability flow ODE is d(x / scale) / dsigma = (x / scale - x_0) / sigma."""
        return np.sqrt(self.alphas_cumprod), self.sigmas

    @property
    def posterior_variance(self) -> np.ndarray:  # [T]
        """beta~_t = beta_t (1 - alpha_bar_{t-1}) / (1 - alpha_bar_t) (Ho et al., 2020, eq. 7)."""
        return self.betas * (1 - self.alphas_cumprod_prev) / (1 - self.alphas_cumprod)

    @property
    def posterior_log_variance(self) -> np.ndarray:  # [T]
        """log beta~_t. beta~_0 is 0 and takes the value of beta~_1, as in guided-diffusion."""
        variance = self.posterior_variance
        # a chain of a single step has no second value; 1e-20 is the floor that diffusers uses
        variance[0] = variance[1] if len(variance) > 1 else 1e-20
        return np.log(variance)

    def posterior_mean(self) -> tuple[np.ndarray, np.ndarray]:  # c [T], d [T]
        """The mean of q(x_{t-1} | x_t, x_0) is c x_0 + d x_t (Ho et al., 2020, eq. 7)."""
        c = self.betas * np.sqrt(self.alphas_cumprod_prev) / (1 - self.alphas_cumprod)
        d = (1 - self.alphas_cumprod_prev) * np.sqrt(1 - self.betas) / (1 - self.alphas_cumprod)
        return c, d

    def x0_from_output(self, prediction: str) -> tuple[np.ndarray, np.ndarray]:  # a [T], b [T]
        r"""x_0 = a x_t + b output, for what the network predicts.

        | prediction   | output (A = alpha_bar)              | a         | b
        | epsilon      | epsilon                             | A^(-1/2)  | -sqrt(1 / A - 1)
        | sample       | x_0                                 | 0         | 1
        | v_prediction | sqrt(A) epsilon - sqrt(1 - A) x_0   | sqrt(A)   | -sqrt(1 - A)
        """
        alpha_bar = self.alphas_cumprod
        if prediction == "epsilon":
            return np.sqrt(1 / alpha_bar), -np.sqrt(1 / alpha_bar - 1)
        if prediction == "sample":
            return np.zeros_like(alpha_bar), np.ones_like(alpha_bar)
        if prediction == "v_prediction":
            return np.sqrt(alpha_bar), -np.sqrt(1 - alpha_bar)
        raise ConfigError(
            f"prediction={prediction} is unknown; choose one of {', '.join(PREDICTIONS)}"
        )

    def log_variance_range(self, variance: str) -> tuple[np.ndarray, np.ndarray]:  # min, max: [T]
        r"""The log variance of p(x_{t-1} | x_t) is f max + (1 - f) min, with f = (v + 1) / 2 and v
        the second half of the network's output (Nichol and Dhariwal, 2021, eq. 15).

        | variance      | min                            | max
        | fixed_small   | log beta~                      | log beta~
        | fixed_large   | log beta, at t = 0 log beta~_1 | the same
        | learned_range | log beta~                      | log beta
        | learned       | -1                             | 1, so v is the log variance itself
        """
        small, large = self.posterior_log_variance, np.log(self.betas)
        if variance == "fixed_small":
            return small, small
        if variance == "fixed_large":
            large[0] = small[0]
            return large, large
        if variance == "learned_range":
            return small, large
        if variance == "learned":
            return -np.ones_like(small), np.ones_like(small)
        raise ConfigError(
            f"variance={variance} is unknown; choose one of "
            + ", ".join(FIXED_VARIANCES + LEARNED_VARIANCES)
        )

    def respace(
        self,
        steps: int | str | Sequence[int] | None,
        spacing: str = "guided",
        *,
        above_zero: bool = False,
        fractional: bool = False,
    ) -> "NoiseSchedule":
        r"""The chain that visits only some of the noise levels.

        beta'_i = 1 - alpha_bar_{t_i} / alpha_bar_{t_{i-1}}, so alpha_bar of a kept step stays
        (Nichol and Dhariwal, 2021, eq. 19).

        Arguments:
            steps: As of `space_timesteps`; None: as many as there are, which is this chain itself
                unless the spacing is karras.
            spacing: As of `space_timesteps`, or karras: the levels sigma = sqrt(1 / alpha_bar - 1)
                between the chain's ends, in equal steps of sigma^(1/7) (Karras et al., 2022,
                eq. 5).
            above_zero: As of `space_timesteps`.
            fractional: Levels may lie between the chain's: linspace does not round, sigma being
                interpolated in t; and karras tells the network the t between two steps, found by
                interpolation in log sigma. Without it, karras has the same levels and tells the
                nearest step, unless the chain itself tells numbers that are not whole (`edm`).
        """
        if steps is None and spacing in SPACINGS and spacing != "karras":
            return self
        steps = self.num_timesteps if steps is None else steps
        if spacing in SPACINGS and spacing != "guided" and _in_sections(steps):
            raise ConfigError(
                f"steps={steps} goes with spacing=guided, and spacing is {spacing}; give a whole"
                " number of at least 1"
            )
        if spacing == "karras":
            sigmas = karras_sigmas(self.sigmas[0], self.sigmas[-1], count_of("steps", steps))
            t = np.interp(np.log(sigmas), np.log(self.sigmas), np.arange(self.num_timesteps))
            between = fractional or self.timestep_map.dtype.kind == "f"
            t = t if between else np.round(t)
        elif spacing == "linspace" and fractional:
            t = np.linspace(0, self.num_timesteps - 1, count_of("steps", steps))
            sigmas = np.interp(t, np.arange(self.num_timesteps), self.sigmas)
        else:
            t = space_timesteps(self.num_timesteps, steps, spacing, above_zero=above_zero)
            return self._visiting(self.alphas_cumprod[t], t)
        return self._visiting(1 / (1 + sigmas**2), t)

    def first(self, count: int) -> "NoiseSchedule":
        """The chain's so many least noisy steps."""
        return NoiseSchedule(self.betas[:count], self.timestep_map[:count])

    def _visiting(self, alpha_bar: np.ndarray, t: np.ndarray) -> "NoiseSchedule":  # [K], [K]
        betas = 1 - alpha_bar / np.append(1.0, alpha_bar[:-1])
        told = np.interp(t, np.arange(self.num_timesteps), self.timestep_map)
        return NoiseSchedule(betas, told)

    def training_table(self, device: torch.device | str = "cpu") -> Tensor:  # float32 [T, 2]
        """sqrt(alpha_bar), sqrt(1 - alpha_bar): the table of `q_sample`."""
        columns = np.stack(self.signal_and_noise, axis=1)
        return torch.tensor(columns, dtype=torch.float32, device=device)

    def target_table(self, device: torch.device | str = "cpu") -> Tensor:  # float32 [T, 2]
        """The same: the table of `denoise_loss`, of whose v these are the factors."""
        return self.training_table(device)


_SCHEDULES = {
    "linear": NoiseSchedule.linear,
    "scaled_linear": NoiseSchedule.scaled_linear,
    "sigmoid": NoiseSchedule.sigmoid,
    "cosine": NoiseSchedule.cosine,
    "edm": NoiseSchedule.edm,
    "flow": FlowSchedule.of,
}


def make_schedule(
    name: str, num_timesteps: int = 1000, **options: float | None
) -> NoiseSchedule | FlowSchedule:
    """The schedule of that name: linear, scaled_linear or sigmoid (beta_start, beta_end), cosine
    (max_beta), edm (sigma_min, sigma_max, sigma_data) or flow (shift).

    An option that is None keeps its default. ConfigError: unknown name or option, impossible value.
    """
    if name not in _SCHEDULES:
        raise ConfigError(f"schedule={name} is unknown; choose one of {', '.join(_SCHEDULES)}")
    build = _SCHEDULES[name]
    options = {key: value for key, value in options.items() if value is not None}
    known = [key for key in inspect.signature(build).parameters if key != "num_timesteps"]
    for key in options:
        if key not in known:
            raise ConfigError(f"schedule={name} has no option {key}; it has {', '.join(known)}")
    return build(num_timesteps, **options)


def space_timesteps(
    num_timesteps: int,
    steps: int | str | Sequence[int],
    spacing: str = "guided",
    *,
    above_zero: bool = False,
) -> np.ndarray:  # int64 [K], ascending
    r"""Which of the timesteps 0 .. T - 1 a shorter chain visits.

    | spacing  | T = 10, steps = 4
    | guided   | 0 3 6 9  as guided-diffusion: both ends, equal fractional strides
    | leading  | 0 2 4 6  as diffusers: multiples of T // steps
    | trailing | 1 4 7 9  as diffusers: from T - 1 down by T / steps
    | linspace | 0 3 6 9  as diffusers: linspace(0, T - 1, steps), rounded

    Arguments:
        num_timesteps: T.
        steps: The number of steps. With "guided" also guided-diffusion's strings: "10,15,20" (or a
            list) cuts the chain into equal sections and takes so many steps of each; "ddim50" takes
            the multiples of the first integer stride that gives exactly 50 (Song et al., 2021).
        spacing: guided, leading, trailing or linspace.
        above_zero: Take leading and linspace for one step more and leave timestep 0 out, as
            diffusers does for its multistep solvers.

    ConfigError: a count below 1 or above what there is, a "ddimN" that no integer stride gives.
    """
    if spacing not in SPACINGS:
        raise ConfigError(f"spacing={spacing} is unknown; choose one of {', '.join(SPACINGS)}")
    if spacing == "karras":
        raise ValueError("spacing=karras has levels between the timesteps: see NoiseSchedule")
    if spacing == "guided":
        if isinstance(steps, str) and steps.startswith("ddim"):
            return _ddim_stride(num_timesteps, count_of("steps", steps[len("ddim") :], name=steps))
        return _sections(num_timesteps, _section_counts(steps))
    count = count_of("steps", steps)
    above_zero = above_zero and spacing != "trailing"
    if count > num_timesteps - above_zero:
        raise ConfigError(
            f"steps={count} is more than the chain has with spacing={spacing};"
            f" give 1 to {num_timesteps - above_zero}"
        )
    count += above_zero
    if spacing == "leading":
        kept = np.arange(count) * (num_timesteps // count)
    elif spacing == "trailing":
        # rounding errors of the stride can add an element past the end: cut it off
        kept = np.round(np.arange(num_timesteps, 0, -num_timesteps / count))[:count][::-1] - 1
    else:
        kept = np.round(np.linspace(0, num_timesteps - 1, count))
    return kept.astype(np.int64)[int(above_zero) :]


def _ends(
    num_timesteps: int, beta_start: float | None, beta_end: float | None
) -> tuple[float, float]:
    scale = 1000 / count_of("num_timesteps", num_timesteps)
    for key, value in (("beta_start", beta_start), ("beta_end", beta_end)):
        if value is not None and not 0 < value < 1:
            raise ConfigError(f"{key}={value:g} is impossible; expected a number between 0 and 1")
    if beta_end is None and scale * 0.02 >= 1:
        raise ConfigError(
            f"num_timesteps={num_timesteps} is too small for beta_end=20/{num_timesteps}, which has"
            " to be below 1; expected at least 21, or give beta_end"
        )
    beta_start = scale * 1e-4 if beta_start is None else beta_start
    beta_end = scale * 0.02 if beta_end is None else beta_end
    return beta_start, beta_end


def _ddim_stride(num_timesteps: int, count: int) -> np.ndarray:
    counts = [-(-num_timesteps // stride) for stride in range(1, num_timesteps)]
    if count not in counts:
        near = sorted(sorted(set(counts), key=lambda c: abs(c - count))[:2])
        raise ConfigError(
            f"steps=ddim{count}: no integer stride over {num_timesteps} timesteps gives so many;"
            f" the nearest that exist: {', '.join(f'ddim{c}' for c in near) or 'none'}"
        )
    return np.arange(0, num_timesteps, counts.index(count) + 1, dtype=np.int64)


def _sections(num_timesteps: int, counts: list[int]) -> np.ndarray:
    size, extra = divmod(num_timesteps, len(counts))
    sizes = [size + (i < extra) for i in range(len(counts))]
    kept, start = [], 0
    for size, count in zip(sizes, counts, strict=True):
        if count > size:
            raise ConfigError(
                f"steps={','.join(map(str, counts))} asks for {count} of {size} timesteps;"
                f" give at most {size} there"
            )
        stride = (size - 1) / (count - 1) if count > 1 else 1
        # a running sum, not a product: guided-diffusion rounds the sum
        kept.append(start + np.round(np.cumsum([0.0] + [stride] * (count - 1))[:count]))
        start += size
    return np.concatenate(kept).astype(np.int64)


def _section_counts(steps: int | str | Sequence[int]) -> list[int]:
    if isinstance(steps, str):
        steps = steps.split(",")
    elif not isinstance(steps, Sequence):
        steps = [steps]
    name = ",".join(map(str, steps))
    if len(steps) == 1:
        return [count_of("steps", steps[0])]
    # a section may be left out, not all of them
    counts = [count_of("steps", s, least=0, name=name) for s in steps]
    if not sum(counts):
        raise ConfigError(f"steps={name} takes no step at all; give at least 1")
    return counts


def _in_sections(steps: int | str | Sequence[int]) -> bool:
    """Whether these are guided-diffusion's strings, or a list."""
    text = isinstance(steps, str)
    return ("," in steps or steps.startswith("ddim")) if text else isinstance(steps, Sequence)
