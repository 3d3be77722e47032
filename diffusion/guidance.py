r"""Classifier-free guidance (Ho and Salimans, 2022, https://arxiv.org/abs/2207.12598).

Training replaces some labels by a null class, so that one network learns the conditional and the
unconditional distribution (algorithm 1). Sampling goes from the one through the other:

    output = null + scale (conditional - null)

scale = w + 1 in the paper's terms: 0 is unconditional, 1 conditional, more is more typical of the
class and less diverse. The output is an affine function of x_0 with the same coefficients for both,
so this is the same for every prediction.
"""

import math

import torch
from torch import Tensor

from triton_kernels import reference
from triton_kernels.philox import LABEL_DROP

from .errors import ConfigError
from .objective import Denoiser


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


def guide(denoiser: Denoiser, scale: float, null_label: int | None) -> Denoiser:
    """The denoiser with guidance of that scale. Both halves are one batch, twice as large. Of a
    learned variance the conditional half is taken.

    ConfigError: a scale that is no number >= 0, or other than 1 without a null class.
    """
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale < math.inf:
        raise ConfigError(f"guidance={scale} is not possible; give a number of at least 0")
    if scale == 1:
        return denoiser
    if null_label is None:
        raise ConfigError(
            f"guidance={scale} needs a network with classes that was trained with"
            " model.label_dropout above 0; leave it at 1"
        )

    def guided(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        twice = torch.cat((labels, torch.full_like(labels, null_label)))
        output = denoiser(torch.cat((x, x)), torch.cat((t, t)), twice)
        conditional, null = output.float().chunk(2)
        channels = x.shape[-1]
        mean, null = conditional[..., :channels], null[..., :channels]
        mean = null + scale * (mean - null)
        return torch.cat((mean, conditional[..., channels:]), dim=-1)

    return guided
