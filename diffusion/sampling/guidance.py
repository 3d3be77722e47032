r"""Guidance: away from what a worse or another prediction says.

    output = negative + scale (output - negative)

Classifier-free (Ho and Salimans, 2022): training replaces some labels by a null class, so that one
network learns the conditional and the unconditional distribution (algorithm 1), and negative is
what it says of the null class. scale = w + 1 in the paper's terms: 0 is unconditional, 1
conditional, more is more typical of the class and less diverse. Or negative is what it says of
another class; or what a second network says of the same class, a smaller or an earlier one
(autoguidance, Karras et al., 2024). The output is an affine function of x_0 with the same
coefficients for both, so this is the same for every prediction.

Guidance may be limited to levels of noise, low < sigma <= high, where it helps (Kynkaanniemi et
al., 2024); elsewhere the scale is 1. And it may be kept from raising the deviation of the output,
which oversaturates images: `rescale` of the way back to that before (Lin et al., 2023, section
3.4). `denoise_step` does all of it in the launch that makes the step.

References:
    Classifier-Free Diffusion Guidance (Ho and Salimans, 2022), https://arxiv.org/abs/2207.12598
    Guiding a Diffusion Model with a Bad Version of Itself (Karras et al., 2024),
        https://arxiv.org/abs/2406.02507
    Applying Guidance in a Limited Interval Improves Sample and Distribution Quality in Diffusion
        Models (Kynkaanniemi et al., 2024), https://arxiv.org/abs/2404.07724
    Common Diffusion Noise Schedules and Sample Steps are Flawed (Lin et al., 2023),
        https://arxiv.org/abs/2305.08891
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import ConfigError
from ..models.conditions import Conditions, Given, joined
from ..process.objective import Denoiser
from .chain import GuidedOutput, TabulatedDenoiser, tabulated


@dataclass(frozen=True)
class Guidance:
    """How far, where, and from what. ConfigError: numbers that are none, or that have no effect.

    Arguments:
        scale: 1 is none.
        interval: (low, high) of sigma, the noise beside x_0 in the data's own units; None: all.
        rescale: From 0, not at all, to 1, all the way.
        negative: The label of the class to go away from; None: the null class.
    """

    scale: float = 1.0
    interval: tuple[float, float] | None = None
    rescale: float = 0.0
    negative: int | None = None

    def __post_init__(self) -> None:
        check_scale(self.scale)
        if self.interval is not None:
            low, high = self.interval
            if not 0 <= low < high:
                raise ConfigError(
                    f"guidance_interval={[low, high]} is not possible; give two levels of noise,"
                    " at least 0, the lower one first, such as [0.2, 5]"
                )
            object.__setattr__(self, "interval", (low, high))
        if not 0 <= self.rescale <= 1:
            raise ConfigError(
                f"guidance_rescale={self.rescale} is not possible; give a number from 0 to 1,"
                " such as 0.7"
            )
        if self.scale == 1:
            for name, value, none in (
                ("guidance_interval", self.interval, None),
                ("guidance_rescale", self.rescale, 0),
                ("negative", self.negative, None),
            ):
                if value != none:
                    raise ConfigError(f"{name}={value} has no effect with guidance=1; give 2 to 5")

    def scales(self, sigmas: Sequence[float]) -> tuple[float, ...]:
        """The scale at each of these levels."""
        low, high = (-1.0, math.inf) if self.interval is None else self.interval
        return tuple(self.scale if low < sigma <= high else 1.0 for sigma in sigmas)


def check_scale(scale: float) -> None:
    """ConfigError unless it is a number of at least 0."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < math.inf:
        raise ConfigError(f"guidance={scale} is not possible; give a number of at least 0")


def guide(
    denoiser: Denoiser | TabulatedDenoiser,
    guidance: float | Guidance,
    null_label: int | None,
    dtype: torch.dtype | None = None,  # that a denoiser without tables is given x in
    *,
    sigmas: Sequence[float] | None = None,  # of a chain's rows, which an interval needs
    weaker: Denoiser | TabulatedDenoiser | None = None,  # to go away from, instead of a class
    drops: bool = False,  # whether training dropped conditions, which is gone away from as well
) -> Denoiser | TabulatedDenoiser:
    """The denoiser with guidance. Both halves are one batch, twice as large, or with a `weaker`
    denoiser a batch of each. Of a learned variance the conditional half is taken.

    ConfigError: a scale that is no number >= 0, or other than 1 without anything to go away from.
    ValueError: an interval, and no sigmas.
    """
    guidance = guidance if isinstance(guidance, Guidance) else Guidance(guidance)
    if guidance.scale == 1:
        return denoiser
    negative = null_label if guidance.negative is None else guidance.negative
    drops = drops and guidance.negative is None and weaker is None
    if weaker is None and negative is None and not drops:
        raise ConfigError(
            f"guidance={guidance.scale} needs a network with classes that was trained with"
            " model.label_dropout above 0, or one with conditions and model.condition_dropout, or"
            " guide=CHECKPOINT of a weaker one, or negative=CLASS; leave it at 1"
        )
    scales = None
    if guidance.interval is not None:
        if sigmas is None:
            raise ValueError(
                f"an interval {guidance.interval} needs the sigmas of the chain's rows"
            )
        scales = guidance.scales(sigmas)
    return Guided(
        denoiser, guidance.scale, negative if weaker is None else None, dtype, scales,
        guidance.rescale, weaker, drops,
    )  # fmt: skip


@dataclass(frozen=True)
class Guided:
    """What `guide` returns: a plain denoiser, and one with tables (see `TabulatedDenoiser`).
    ValueError unless there is a label for each sample."""

    denoiser: Denoiser | TabulatedDenoiser
    scale: float
    negative: int | None  # label; None: `weaker` has the same labels, or there are none
    dtype: torch.dtype | None = None
    scales: tuple[float, ...] | None = None  # of each row; None: the same
    rescale: float = 0.0
    weaker: Denoiser | TabulatedDenoiser | None = None
    drops: bool = False  # whether the negative half has no conditions but the label

    def __call__(self, x: Tensor, t: Tensor, labels: Given) -> Tensor:
        """As `denoise_step` has it, in plain PyTorch. ValueError: with an interval, for which a
        timestep does not say enough."""
        if self.scales is not None:
            raise ValueError("guidance in an interval is for chains: hand it to a sampler")
        if self.weaker is not None:
            output, negative = self.denoiser(x, t, labels), self.weaker(x, t, labels)
        else:
            labels = self._twice(labels, len(x))
            both = self.denoiser(torch.cat((x, x)), torch.cat((t, t)), labels)
            output, negative = both.chunk(2)
        output, channels = output.float(), x.shape[-1]
        positive, negative = output[..., :channels], negative[..., :channels].float()
        guided = negative + self.scale * (positive - negative)
        if self.rescale:
            wanted, found = (y.std(dim=(1, 2, 3), keepdim=True) for y in (positive, guided))
            guided = guided * (self.rescale * wanted / found + 1 - self.rescale)
        return torch.cat((guided, output[..., channels:]), dim=-1)

    def tabulate(self, timesteps: Tensor, labels: Given, n: int) -> tuple[Tensor, ...]:
        """The scales, the tables of the denoiser, and those of the weaker one; between them a
        tensor whose length says where."""
        rows = len(timesteps)
        scales = (self.scale,) * rows if self.scales is None else self.scales
        if len(scales) != rows:
            raise ValueError(
                f"there are {len(scales)} scales of guidance; the chain has {rows} rows"
            )
        inner = tabulated(self.denoiser, self.dtype)
        if self.weaker is None:
            own, others = inner.tabulate(timesteps, self._twice(labels, n), 2 * n), ()
        else:
            own = inner.tabulate(timesteps, labels, n)
            others = tabulated(self.weaker, self.dtype).tabulate(timesteps, labels, n)
        scales = torch.tensor(scales, dtype=torch.float32, device=timesteps.device)
        return scales, scales.new_zeros(len(own)), *own, *others

    def at_row(self, x: Tensor, row: Tensor, tables: tuple[Tensor, ...]) -> GuidedOutput:
        scales, lengths, *tables = tables
        own, others = tuple(tables[: len(lengths)]), tuple(tables[len(lengths) :])
        inner = tabulated(self.denoiser, self.dtype)
        if self.weaker is None:
            output, negative = inner.at_row(torch.cat((x, x)), row, own).chunk(2)
        else:
            output = inner.at_row(x, row, own)
            negative = tabulated(self.weaker, self.dtype).at_row(x, row, others)
        return GuidedOutput(output, negative, scales, self.rescale)

    def _twice(self, given: Given, n: int) -> Given:
        labels = given.labels if isinstance(given, Conditions) else given
        negative = labels
        if self.negative is not None:
            if labels is None or labels.shape != (n,):
                found = "missing" if labels is None else f"of shape {list(labels.shape)}"
                raise ValueError(
                    f"labels are {found}; guidance={self.scale} goes from one class to that of"
                    f" each sample: expected [{n}]"
                )
            negative = torch.full_like(labels, self.negative)
        if not isinstance(given, Conditions):
            return joined(labels, negative)
        return joined(given, replace(given.none() if self.drops else given, labels=negative))
