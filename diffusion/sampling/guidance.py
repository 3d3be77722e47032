r"""Classifier-free guidance (Ho and Salimans, 2022, https://arxiv.org/abs/2207.12598).

Training replaces some labels by a null class, so that one network learns the conditional and the
unconditional distribution (algorithm 1). Sampling goes from the one through the other:

    output = null + scale (conditional - null)

scale = w + 1 in the paper's terms: 0 is unconditional, 1 conditional, more is more typical of the
class and less diverse. The output is an affine function of x_0 with the same coefficients for both,
so this is the same for every prediction.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_kernels import reference
from triton_kernels.noise.philox import LABEL_DROP

from ..errors import ConfigError
from ..process.objective import Denoiser
from .chain import TabulatedDenoiser, tabulated


def drop_labels(
    labels: Tensor,  # int64 [N]
    rng: Tensor,  # int64 [2]: seed, step
    probability: float,
    null_label: int,
    *,
    first: int = 0,  # the global index of sample 0
) -> Tensor:  # int64 [N]
    """The labels, each replaced by `null_label` with the given probability; which ones is a
    function of (seed, step, first + n). No host synchronisation."""
    words = reference.random_words(rng, len(labels), 1, LABEL_DROP, first=first)[:, 0]
    return labels.masked_fill(words < round(probability * 2**32), null_label)


def check_scale(scale: float) -> None:
    """ConfigError unless it is a number of at least 0."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < math.inf:
        raise ConfigError(f"guidance={scale} is not possible; give a number of at least 0")


def guide(
    denoiser: Denoiser | TabulatedDenoiser,
    scale: float,
    null_label: int | None,
    dtype: torch.dtype | None = None,  # that a denoiser without tables is given x in
) -> Denoiser | TabulatedDenoiser:
    """The denoiser with guidance of that scale. Both halves are one batch, twice as large. Of a
    learned variance the conditional half is taken.

    ConfigError: a scale that is no number >= 0, or other than 1 without a null class.
    """
    check_scale(scale)
    if scale == 1:
        return denoiser
    if null_label is None:
        raise ConfigError(
            f"guidance={scale} needs a network with classes that was trained with"
            " model.label_dropout above 0; leave it at 1"
        )
    return Guided(denoiser, scale, null_label, dtype)


@dataclass(frozen=True)
class Guided:
    """What `guide` returns: a plain denoiser, and one with tables (see `TabulatedDenoiser`).
    ValueError unless there is a label for each sample."""

    denoiser: Denoiser | TabulatedDenoiser
    scale: float
    null_label: int
    dtype: torch.dtype | None = None

    def __call__(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        labels = self._twice(labels, len(x))
        output = self.denoiser(torch.cat((x, x)), torch.cat((t, t)), labels)
        return self._combine(output, x.shape[-1])

    def tabulate(self, timesteps: Tensor, labels: Tensor, n: int) -> tuple[Tensor, ...]:
        inner = tabulated(self.denoiser, self.dtype)
        return inner.tabulate(timesteps, self._twice(labels, n), 2 * n)

    def at_row(self, x: Tensor, row: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        inner = tabulated(self.denoiser, self.dtype)
        return self._combine(inner.at_row(torch.cat((x, x)), row, tables), x.shape[-1])

    def _twice(self, labels: Tensor | None, n: int) -> Tensor:
        if labels is None or labels.shape != (n,):
            given = "missing" if labels is None else f"of shape {list(labels.shape)}"
            raise ValueError(
                f"labels are {given}; guidance={self.scale} goes from the null class to that of"
                f" each sample: expected [{n}]"
            )
        return torch.cat((labels, torch.full_like(labels, self.null_label)))

    def _combine(self, output: Tensor, channels: int) -> Tensor:
        conditional, null = output.float().chunk(2)
        mean, null = conditional[..., :channels], null[..., :channels]
        mean = null + self.scale * (mean - null)
        return torch.cat((mean, conditional[..., channels:]), dim=-1)
