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
from ..registry.spec import ConvSpec, WeightGradsSpec, dtype_name, precision_of
from ..runtime.device import Device, describe
from ..runtime.layout import is_aligned
from .configs import WgradOperands, kernel_of_tile
from .hopper.weight_grads import fp16_split_wgrad, mma_wgrad, row_wgrad
from .plain import gather_wgrad, im2col_wgrad, pointwise_wgrad
from .plain.by_tma import tma_stride, tma_wgrad
from .plain.pointers import pointer_wgrad

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
    whole = is_aligned(x) and is_aligned(dy)
    return ConvSpec(
        n, dtype, h, w, k, c, r, s, **pixels, filters=(co, ci), aligned=whole, rounded=rounded
    )


def plan(
    operands: WgradOperands,
    tile: tuple | None = None,  # of one of the kernels; None: whatever is fastest
) -> tuple:
    """The configuration of a kernel: a tile and the number of parts."""
    x, _, weight, *_ = operands
    spec, gpu = weight_grad_spec(*operands[:6]), describe(x.device)
    if tile is not None:
        return kernel_of_tile(WEIGHT_GRAD.kernels, tile).planned(spec, gpu, tile)

    def run(config: tuple) -> Tensor:
        out = x.new_empty((weight.numel(),), dtype=weight.dtype)
        launch_into(out, config, operands)
        return out

    return select(WEIGHT_GRAD, spec, gpu, run).config


def launch_into(out: Tensor, config: tuple, operands: WgradOperands) -> None:
    """out = the gradient, with a configuration that `plan` gives; contiguous, one dimension."""
    parts = partials(out, config.splits)
    WEIGHT_GRAD.kernel_of(config).launch(config, operands._replace(parts=parts))
    sum_partials(parts, out, follows=True)


def conv_weight_grad(
    x: Tensor,  # [N, H, W, CI or more]
    dy: Tensor,  # [N, H, W, CO or more]
    out: Tensor,  # float32 [CO, CI, R, S] to be written; a channel of y is a row [R, S, CI]
    *,
    accumulate: bool = False,  # add to `out`
    stride: int = 1,
    # None: R // 2 and S // 2; below the image is padded as far as dy needs it
    padding: int | tuple[int, int] | None = None,
    allow_tf32: bool = True,
    config: tuple | None = None,  # a tile of a kernel of `WEIGHT_GRAD`
    splits: int | None = None,  # parts that the sum over pixels is split into
) -> None:
    """out = or += the gradient of the filters. The rows of `out` may be any distance apart, as in
    the columns of a 1x1 filter that belong to one half of a concatenation. Channels of x and dy
    behind those of the filters, which pad them, do not count."""
    co, ci, r, s = out.shape
    assert out.dtype == torch.float32 and out[0].permute(1, 2, 0).is_contiguous()
    assert x.is_contiguous() and dy.is_contiguous() and x.shape[3] >= ci and dy.shape[3] >= co
    if dy.shape[0] == 0:
        if not accumulate:
            out.zero_()
        return
    padding = (r // 2, s // 2) if padding is None else padding
    padding = padding if isinstance(padding, tuple) else (padding, padding)
    precision = precision_of(x.dtype, allow_tf32)
    operands = WgradOperands(x, dy, out, stride, padding, precision)
    planned = plan(operands, config)
    kernel = WEIGHT_GRAD.kernel_of(planned)
    splits = planned.splits if splits is None else splits
    planned = planned._replace(splits=splits)
    assert kernel.pads or (x.shape[3], dy.shape[3]) == (ci, co)
    if splits == 1 and kernel.in_place:
        into = {"parts": out, "stride_co": out.stride(0), "accumulate": accumulate}
        kernel.launch(planned, operands._replace(**into))
        return
    row = r * s * ci
    rows = out.permute(0, 2, 3, 1)
    if alone := splits == 1 and rows.is_contiguous() and not accumulate:
        parts = rows.view(1, co * row)
    else:
        parts = x.new_empty((splits, co * row), dtype=torch.float32)
    kernel.launch(planned, operands._replace(parts=parts))
    if not alone:
        sum_partials(parts, out, accumulate=accumulate)
