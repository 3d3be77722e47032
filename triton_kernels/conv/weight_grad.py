"""The weight gradient of one convolution: its kernels, which of them runs, and its sum over parts.

    dweight[co, ci, r, s] = sum_{n, p, q} dy[n, p, q, co] x[n, p d + r - pad, q d + s - pad, ci]

with stride d. Every kernel cuts the sum over pixels into parts, which `reductions.column_sum` adds
up; the number of parts is the last field of a configuration, measured with the tile and the adding.
"""

import torch
from torch import Tensor

from ..reductions.column_sum import partials, sum_partials
from ..registry.choose import expected, select
from ..registry.kernel import Op
from ..registry.spec import ConvSpec, WeightGradsSpec, dtype_name
from ..runtime.device import Device, describe
from .configs import SplitKernel, WgradOperands, kernel_of_tile
from .hopper import fp16_split_wgrad, mma_wgrad, row_wgrad
from .plain import (
    gather_wgrad,
    im2col_wgrad,
    pointer_wgrad,
    pointwise_wgrad,
    tma_stride,
    tma_wgrad,
)
from .plain.tma_boxes import aligned

WEIGHT_GRAD = Op(
    "conv_weight_grad",
    key=("h", "w", "k", "c", "r", "s", "stride", "dtype"),
    kernels=(
        row_wgrad.WEIGHT_GRAD,
        tma_wgrad.WEIGHT_GRAD,
        tma_stride.WEIGHT_GRAD,
        pointer_wgrad.WEIGHT_GRAD,
        pointwise_wgrad.WEIGHT_GRAD,
        mma_wgrad.WEIGHT_GRAD,
        fp16_split_wgrad.WEIGHT_GRAD,
        im2col_wgrad.WEIGHT_GRAD,
        gather_wgrad.WEIGHT_GRAD,
    ),
)


def one_after_one(spec: WeightGradsSpec, gpu: Device) -> float | None:
    """Microseconds of several, each by its own kernel; None: nobody has fitted it."""
    if spec.n == 0:
        return None
    each = [expected(WEIGHT_GRAD, conv, gpu) for conv in spec.convs]
    return None if None in each else sum(each)


def weight_grad_spec(
    x: Tensor,  # [N, H, W, CI or more]
    dy: Tensor,  # [N, P, Q, CO or more]
    weight: Tensor,  # [CO, CI, R, S], of which shape and dtype matter
    stride: int,
    padding: tuple[int, int],
    precision: str,  # of float32: "ieee" | "tf32"
) -> ConvSpec:
    """What is computed of such tensors."""
    n, h, w, k = x.shape
    co, ci, r, s = weight.shape
    _, p, q, c = dy.shape
    dtype, rounded = dtype_name(x.dtype, precision != "ieee"), weight.dtype != torch.float32
    pixels = {"p": p, "q": q, "stride": stride, "padding": tuple(padding)}
    whole = aligned(x) and aligned(dy)
    return ConvSpec(
        n, dtype, h, w, k, c, r, s, **pixels, filters=(co, ci), aligned=whole, rounded=rounded
    )


def plan(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,  # of which shape, dtype and device matter
    stride: int,
    padding: tuple[int, int],
    precision: str,
    tile: tuple | None = None,  # of one of the kernels; None: whatever is fastest
) -> tuple[SplitKernel, tuple]:
    """The kernel, and its configuration: a tile and the number of parts."""
    spec, gpu = weight_grad_spec(x, dy, weight, stride, padding, precision), describe(x.device)
    if tile is not None:
        kernel = kernel_of_tile(WEIGHT_GRAD.kernels, tile)
        return kernel, kernel.planned(spec, gpu, tile)

    def run(config: tuple) -> Tensor:
        out = torch.empty((weight.numel(),), dtype=weight.dtype, device=x.device)
        parts = partials(out, config.splits)
        kernel = WEIGHT_GRAD.kernel_of(config)
        operands = WgradOperands(x, dy, weight, parts, stride, padding, precision)
        kernel.launch(config, operands)
        sum_partials(parts, out, follows=True)
        return out

    choice = select(WEIGHT_GRAD, spec, gpu, run)
    return choice.kernel, choice.config
