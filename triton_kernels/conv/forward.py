"""The forward pass and the input gradient of one convolution, with a bias or a sum at most: their
kernels, and which of them runs.

    y[n, p, q, co] = b[co] + sum_{r, s, ci} x[n, p d + r - pad, q d + s - pad, ci] w[co, ci, r, s]

with stride d, and dx of dy, to which another tensor may be added. What has an epilogue of its own
is in `conv.fused`.
"""

import torch
from torch import Tensor

from ..registry.choose import select
from ..registry.kernel import Kernel, Op
from ..registry.spec import ConvSpec, dtype_name
from ..runtime.device import Device, describe
from ..runtime.layout import is_aligned
from .configs import ConvOperands
from .hopper import linear_mma
from .hopper.tiles import tile_mma
from .hopper.unfused import unfused_1x1
from .plain import gather, im2col_fwd, linear_tf32x3, split_tiles, tf32x3
from .plain.by_tma import tma, tma_stride
from .plain.pointers import pointer
from .plain.transpose_weights import transpose_weights
from .refusals import unaddressable

_KEY = ("h", "w", "k", "p", "q", "c", "r", "s", "stride", "dtype")

FORWARD = Op(
    "conv2d",
    key=_KEY,
    kernels=(
        tma.FORWARD,
        split_tiles.row(tma.FORWARD.refuse, tma.launch),
        tile_mma.PLAIN_FORWARD,
        *unfused_1x1.FORWARD,
        linear_mma.PLAIN,
        tma_stride.FORWARD,
        pointer.PLAIN_FORWARD,
        tf32x3.FORWARD,
        linear_tf32x3.LINEAR,
        im2col_fwd.FORWARD,
        gather.FORWARD,
    ),
)


def _refuse_transposing(spec: ConvSpec, gpu: Device) -> str | None:
    if spec.stride != 1 or not tma.transposes_first(spec):
        return "filters of 32 bits, for many pixels, are worth it"
    return unaddressable(spec, gpu)


def _transpose_first(_: tuple, operands: ConvOperands) -> None:
    """Filters are transposed, and then it is a forward pass."""
    r, s = operands.weight.shape[2:]
    padding = (r - 1 - operands.padding[0], s - 1 - operands.padding[1])
    filters = transpose_weights(operands.weight, 1)[0]
    launch(operands._replace(weight=filters, padding=padding, dgrad=False, follows=True))


INPUT_GRAD = Op(
    "conv2d_dgrad",
    key=_KEY,
    kernels=(
        tma.INPUT_GRAD,
        split_tiles.row(tma.INPUT_GRAD.refuse, tma.launch),
        tile_mma.PLAIN_INPUT_GRAD,
        *unfused_1x1.INPUT_GRAD,
        linear_mma.PLAIN,
        Kernel(
            "transpose_first",
            refuse=_refuse_transposing,
            cost=lambda spec, gpu, config: tma.best_cost(spec, gpu),
            launch=_transpose_first,
        ),
        tma_stride.INPUT_GRAD,
        pointer.PLAIN_INPUT_GRAD,
        tf32x3.INPUT_GRAD,
        linear_tf32x3.LINEAR,
        gather.INPUT_GRAD,
    ),
)


def launch(operands: ConvOperands, config: tuple | None = None) -> None:
    """Compute `y` of the operands, with a configuration of a kernel of `FORWARD` or `INPUT_GRAD`,
    or with the fastest."""
    op = INPUT_GRAD if operands.dgrad else FORWARD
    x, weight, _, y, *_, add, _ = operands
    assert x.is_contiguous() and x.dtype == weight.dtype
    assert add is None or (add.shape == y.shape and add.is_contiguous())
    if y.numel() == 0:
        return
    if config is None:

        def run(c: tuple) -> Tensor:
            out = torch.empty_like(y)
            op.kernel_of(c).launch(c, operands._replace(y=out))
            return out

        config = select(op, spec_of(operands), describe(x.device), run).config
    op.kernel_of(config).launch(config, operands)


def spec_of(operands: ConvOperands) -> ConvSpec:
    """What is computed. A matrix product over pixels is of one row of them; of an input gradient in
    TF32, whose filters have to be transposed, each pixel is an image, so that rows of other numbers
    of pixels count first. In float32 images stay what they are."""
    x, weight, _, y, stride, padding, precision, *_ = operands
    (n, h, w, k), (_, p, q, c) = x.shape, y.shape
    co, ci, r, s = weight.shape
    # kernels count the filters by these: of more channels they would read behind the last
    assert (k, c) == ((co, ci) if operands.dgrad else (ci, co)), (x.shape, weight.shape, y.shape)
    dtype = dtype_name(x.dtype, precision != "ieee")
    if (r, s, stride, *padding) == (1, 1, 1, 0, 0) and dtype != "fp32":
        m = n * h * w
        n, h, w = (m, 1, 1) if operands.dgrad and tma.worth_transposing(y) else (1, 1, m)
        p, q = h, w
    pixels = {"p": p, "q": q, "stride": stride, "padding": tuple(padding)}
    whole = is_aligned(x) and is_aligned(y) and is_aligned(weight)
    return ConvSpec(n, dtype, h, w, k, c, r, s, **pixels, filters=(co, ci), aligned=whole)
