"""The mean squared error of a network that denoises, per sample, and its gradient."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..reductions.last_program import zero_counters
from ..registry.choose import select
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import Spec, dtype_name
from ..runtime.device import describe
from ..runtime.library import derivative, once_differentiable, op
from .checks import check_batch, check_output, check_process
from .chunks import NUM_WARPS
from .loss_kernels import denoise_loss_bwd_kernel, denoise_loss_fwd_kernel

PREDICTIONS = ("epsilon", "sample", "v_prediction")

_GRAD_BLOCK = 2048  # elements of a program of its gradient
# Programs that share a sample: Triton 3.6 does not compile the sum of more than 64 slots, of which
# one counts.
_MOST_CHUNKS = 63


@configures("denoise_loss")
class _LossConfig(NamedTuple):
    block: int  # evaluations of Philox at a time, each good for four elements
    blocks: int  # of a program; with all of a sample's there are no partial sums to add
    num_warps: int


_LOSS_CONFIGS = [
    _LossConfig(512, 1, 4),
    _LossConfig(256, 1, 4),
    _LossConfig(256, 1, 8),
]


@dataclass(frozen=True)
class LossSpec(Spec):
    """The loss of n samples of c channels, of an output that has co."""

    h: int
    w: int
    c: int
    co: int
    prediction: str
    keep: bool  # also output - target


LOSS = Op(
    "denoise_loss",
    ("h", "w", "c", "co", "dtype", "prediction", "keep"),
    (Kernel("denoise_loss", _LossConfig, configs=lambda *_: _LOSS_CONFIGS),),
    similar=False,
)


def _fake_loss(output, images, *rest):
    n, height, width, _ = output.shape
    kept = (n, height, width, images.shape[3]) if rest[-1] else (0,)
    return tuple(output.new_empty(shape, dtype=torch.float32) for shape in ((n,), kept))


@op("denoise_loss", _fake_loss, differentiable=True)
def _denoise_loss(
    output: Tensor,
    images: Tensor,
    index: Tensor | None,
    flip: Tensor | None,
    t: Tensor,
    table: Tensor,
    rng: Tensor,
    first: int,
    prediction: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    return _loss(output, images, index, flip, t, table, rng, first, prediction, keep=keep)


def _loss(
    output: Tensor,
    images: Tensor,
    *process: Tensor | int | str | None,  # index, flip, t, table, rng, first, prediction
    keep: bool,
    config: _LossConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss, and output - target as float32 [N, H, W, C], or [0] unless it is to be kept."""
    *batch, first, prediction = process
    n, height, width, co = output.shape
    c = images.shape[3]
    elements = height * width * c
    if config is None:
        spec = LossSpec(n, dtype_name(output.dtype), height, width, c, co, prediction, keep)

        def run(config: _LossConfig) -> Tensor:
            return _loss(output, images, *process, keep=keep, config=config)[0]

        config = select(LOSS, spec, describe(output.device), run).config
    at_a_time = 4 * config.block
    blocks = max(config.blocks, triton.cdiv(elements, at_a_time * _MOST_CHUNKS))
    chunks = triton.cdiv(elements, at_a_time * blocks)
    kept = (n, height, width, c) if keep else (0,)
    difference = output.new_empty(kept, dtype=torch.float32)
    if n * elements == 0:  # the mean over nothing
        return torch.full((n,), float("nan"), device=output.device), difference
    loss = output.new_empty(n, dtype=torch.float32)
    slots = triton.next_power_of_2(chunks + 1)
    counters = zero_counters(n * slots, output.device) if chunks > 1 else None
    denoise_loss_fwd_kernel[(n * chunks,)](
        output, images, *batch, loss, counters, difference if keep else None,
        first, elements, chunks, W=width, C=c, CO=co, PREDICTION=prediction, BLOCK=config.block,
        BLOCKS=blocks, SLOTS=slots, QUADS=config.block == 32 * config.num_warps,
        num_warps=config.num_warps,
    )  # fmt: skip
    return loss, difference


def _fake_gradient(dloss, difference, channels, dtype):
    return difference.new_empty((*difference.shape[:3], channels), dtype=dtype)


@op("denoise_loss_backward", _fake_gradient)
def _denoise_loss_backward(
    dloss: Tensor, difference: Tensor, channels: int, dtype: torch.dtype
) -> Tensor:
    """The gradient of an output that had so many channels and this dtype."""
    n, height, width, c = difference.shape
    shape = (n, height, width, channels)
    doutput = difference.new_empty(shape, dtype=dtype)
    if doutput.numel() > 0:
        elements = height * width * c
        chunks = triton.cdiv(height * width * channels, _GRAD_BLOCK)
        denoise_loss_bwd_kernel[(n * chunks,)](
            dloss, dloss.stride(0), difference, doutput, elements, chunks,
            C=c, CO=channels, BLOCK=_GRAD_BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return doutput


@derivative(of=_denoise_loss)
class _DenoiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, *rest):
        loss, difference = _denoise_loss.below_autograd(output, *rest)
        ctx.save_for_backward(difference)
        ctx.output = output.shape[3], output.dtype
        ctx.mark_non_differentiable(difference)
        ctx.set_materialize_grads(False)
        return loss, difference

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, _):
        (difference,) = ctx.saved_tensors
        doutput = None if dloss is None else _denoise_loss_backward(dloss, difference, *ctx.output)
        return doutput, *[None] * 9


def denoise_loss(
    output: Tensor,  # [N, H, W, C] or, with a learned variance, [N, H, W, 2C]
    images: Tensor,  # uint8 or float32 [M, H, W, C]
    t: Tensor,  # int64 [N]
    table: Tensor,  # float32 [T, 2]: sqrt(alpha_bar), sqrt(1 - alpha_bar)
    rng: Tensor,  # int64 [2]: seed, step
    *,
    first: int = 0,
    index: Tensor | None = None,  # int64 [N]
    flip: Tensor | None = None,  # bool [N]
    prediction: str = "epsilon",
) -> Tensor:  # float32 [N]
    """Mean squared error per sample of the first C channels against epsilon, x_0 ("sample") or
    v = sqrt(alpha_bar) epsilon - sqrt(1 - alpha_bar) x_0 ("v_prediction"; Salimans and Ho 2022),
    with the noise of `q_sample`, drawn again from its counter. Only `output` has a gradient. The
    sum has the same bits in every run."""
    if prediction not in PREDICTIONS:
        raise ValueError(f"prediction is {prediction!r}; expected one of {', '.join(PREDICTIONS)}")
    n = check_batch(images, index, flip)
    check_process(n, t, table, rng)
    check_output(output, n, *images.shape[1:])
    process = (images, index, flip, t, table, rng, first, prediction)
    loss, _ = _denoise_loss(output, *process, output.requires_grad)
    return loss
