"""The fused convolutions that TMA fetches, forward and input gradient: tiles and launches."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...activations import rounded_grad
from ...noise.dropout import mask_arguments
from ...registry.kernel import Kernel
from ...registry.spec import FORWARD_TERMS, GRAD_TERMS, ConvSpec
from ...runtime.dependent_launch import overlapping
from ...runtime.device import Device
from ..hopper.operands import Operands
from . import fused_tiles
from .by_tma.tma import Config, worth_transposing
from .by_tma.tma_boxes import in_boxes, is_ragged, tile_sizes, weight_in_boxes
from .fused_kernels import conv_forward_kernel, conv_input_grad_kernel
from .fused_tiles import box_of, piece_of, programs
from .shared_sums import shared
from .split_tiles import row
from .tf32x3 import is_split_before
from .transpose_weights import split, transpose_weights

FWD_CONFIGS = [
    Config(64, 64, 64, 4, 4),
    Config(64, 128, 64, 4, 3),
    Config(64, 256, 64, 4, 4),
    Config(128, 128, 64, 4, 3),
    Config(128, 256, 64, 8, 3),
    Config(64, 64, 32, 4, 4),  # few input channels, and TF32: a row of a box is at most 128 bytes
    Config(128, 128, 32, 4, 4),
    Config(64, 64, 32, 4, 3, 4),  # few output channels in large images
    Config(64, 128, 32, 4, 2, 2),
    Config(64, 128, 64, 4, 4),
    Config(64, 256, 64, 8, 3),
    Config(128, 128, 64, 8, 3),
    Config(64, 128, 64, 4, 6),  # few tiles, which wait for their loads
]
DGRAD_CONFIGS = [
    Config(64, 64, 64, 4, 4),
    Config(64, 128, 64, 4, 3),
    Config(64, 256, 64, 4, 4),
    Config(128, 128, 64, 4, 3),
    Config(128, 128, 64, 8, 3),
    Config(128, 256, 64, 8, 3),
    Config(64, 64, 32, 4, 4),
    Config(64, 128, 32, 4, 4),
    Config(64, 128, 32, 4, 2, 2),  # few output channels in large images
    Config(64, 128, 64, 4, 4),
    Config(64, 128, 64, 8, 3),
    Config(64, 256, 64, 8, 3),
]
# Of float32 that is not rounded to TF32, as those of `conv.plain.tf32x3`: of numbers that have been
# split, and of 1x1 filters, where they are in registers
SPLIT_CONFIGS = [Config(64, 128, 32, 4, 2), Config(64, 64, 32, 4, 3), Config(64, 64, 32, 4, 2)]
SPLITTING_CONFIGS = [Config(64, 64, 32, 4, 4)]


def forward(config: Config, operands: Operands) -> None:
    """The convolution, its terms and its partials."""
    x, weight, y = operands.x, operands.weight, operands.y
    n, h, w, ci = x.shape
    co, _, r, s = weight.shape
    stats = operands.partials is not None
    box = box_of(config, n, h, w, even=stats)
    tile, read = [*box, config.block_c], [*box, config.block_k]
    exact = operands.precision == "ieee"
    extra_descs = []
    for other, w1x1 in operands.extra:
        assert w1x1.stride(1) == 1
        filters = columns_in_boxes(w1x1, [config.block_c, config.block_k], exact)
        extra_descs += [in_boxes(other, read), filters]
    parts, filters = (x, None), (weight, None)
    if exact and is_split_before(x, weight):
        parts, filters = split(x), split(weight)
    x_descs = _of_each(in_boxes, parts, read)
    w_descs = _of_each(weight_in_boxes, filters, config.block_c, config.block_k)
    residual = operands.beside[0] if operands.beside else None
    tiles, channels = programs(config, box, *y.shape), (ci, *operands.extra_channels)
    sums = shared(config, tiles, r * s, channels, x)
    conv_forward_kernel[sums.grid](
        x_descs[0], w_descs[0], operands.vectors, operands.emb,
        None if residual is None else in_boxes(residual, tile), in_boxes(y, tile),
        operands.partials, sums.parts, sums.counters, *extra_descs,
        *[None] * (4 - len(extra_descs)), x_descs[1], w_descs[1], operands.extra_bias,
        *operands.extra_channels, operands.emb_stride, sums.steps, operands.factor, n, ci, h, w, co,
        R=r, S=s, PAD_H=r // 2, PAD_W=s // 2, STRIDE=1, DGRAD=False, TURNED=False,
        PRECISION=operands.precision, ROWS=config.rows,
        RAGGED=stats and is_ragged(box, h, w), TF32=operands.tf32, **tile_sizes(box, config),
        **overlapping(x.device, n * h * w),
    )  # fmt: skip


def input_grad(config: Config, operands: Operands) -> None:
    """dz and its partials."""
    dy, weight, dz, inputs = operands.x, operands.weight, operands.y, operands.beside
    n, h, w, co = dy.shape
    _, ci, r, s = weight.shape
    c1 = inputs[0].shape[3]
    box = box_of(config, n, h, w, even=True)
    piece = piece_of(config, box)
    tile = [*piece, config.block_c]
    exact = operands.precision == "ieee"
    # of an even number of rows the input gradient has another padding
    turned = r % 2 == s % 2 == 1 and weight.shape[0] % 4 == 0
    turned = turned and (is_split_before(dy, weight) if exact else worth_transposing(dz))
    parts, filters = (dy, None), (weight, None)
    if turned and exact:
        parts, filters = split(dy), transpose_weights(weight, 2)
    elif turned:
        filters = transpose_weights(weight, 1)[0], None
    block = (config.block_c, config.block_k) if turned else (config.block_k, config.block_c)
    dy_descs = _of_each(in_boxes, parts, [*box, config.block_k])
    w_descs = _of_each(weight_in_boxes, filters, *block)
    sums = shared(config, programs(config, box, *dz.shape), r * s, (co,), dy)
    conv_input_grad_kernel[sums.grid](
        dy_descs[0], w_descs[0], in_boxes(inputs[0], tile),
        in_boxes(inputs[1], tile) if len(inputs) == 2 else None, operands.vectors,
        in_boxes(dz, tile), dy_descs[1], w_descs[1], operands.partials, sums.parts, sums.counters,
        sums.steps, n, co, h, w, ci, c1,
        *mask_arguments(operands.mask),
        R=r, S=s, ACT=rounded_grad(operands.activation, dy.dtype), TURNED=turned,
        PRECISION=operands.precision, ROWS=config.rows, PIECE_N=piece[0], PIECE_H=piece[1],
        PIECE_W=piece[2], RAGGED=is_ragged(box, h, w),
        STRADDLING=len(inputs) == 2 and c1 % config.block_c > 0, **tile_sizes(box, config),
        **overlapping(dy.device),
    )  # fmt: skip


def columns_in_boxes(filters: Tensor, block: list[int], exact: bool) -> TensorDescriptor:
    """Filters [CO, C] of 1x1 convolutions, whose rows may be any distance apart; or, for products
    of float32 as `products.multiply` has them, as [1, CO, C]."""
    shape, strides = list(filters.shape), list(filters.stride())
    if exact:
        shape, strides, block = [1, *shape], [shape[0] * strides[0], *strides], [1, *block]
    return TensorDescriptor(filters, shape, strides, block)


def _of_each(
    describe: Callable[..., TensorDescriptor], parts: Sequence[Tensor | None], *options: Any
) -> list[TensorDescriptor | None]:
    """The boxes of two parts, of which the second may be absent."""
    return [None if part is None else describe(part, *options) for part in parts]


def _tma(configs: list[Config], launch: Callable[..., None], adds: tuple[str, ...]) -> Kernel:
    """The kernel that TMA fetches for, of one pass."""

    def fitting(spec: ConvSpec, gpu: Device) -> list[Config]:
        exact = SPLIT_CONFIGS if spec.taps > 1 else SPLITTING_CONFIGS
        return fused_tiles.fitting(exact if spec.precision == "ieee" else configs, spec, gpu)

    return Kernel(
        "tma",
        Config,
        fused_tiles.refuse,
        fitting,
        fused_tiles.cost,
        launch,
        fused_tiles.work,
        ("num_warps", "rows", "pointwise"),
        adds=adds,
    )


FORWARD = _tma(FWD_CONFIGS, forward, FORWARD_TERMS)
INPUT_GRAD = _tma(DGRAD_CONFIGS, input_grad, GRAD_TERMS)
SPLIT_FORWARD = row(fused_tiles.refuse, forward, FORWARD_TERMS)
SPLIT_INPUT_GRAD = row(fused_tiles.refuse, input_grad, GRAD_TERMS)
