"""1x1 filters of `conv2d` for Hopper, in Gluon.

They stay in shared memory while the pixels pass by or, where there are few tiles, are fetched with
the pixels and all at once; so they are in the input gradient in TF32.
"""

from functools import partial
from typing import NamedTuple

import triton
from torch import Tensor

from ....hopper.descriptors import SUPPORTED, in_boxes
from ....registry.kernel import Kernel, configures
from ....registry.spec import ConvSpec
from ....runtime.device import Device, describe
from ...configs import ConvOperands
from ...plain.by_tma.tma import transposes_first
from ...plain.by_tma.tma_boxes import as_one_row
from ...refusals import Only
from .. import linear_mma

if SUPPORTED:
    from .unfused_pointwise import conv_unfused_pointwise_kernel
    from .unfused_single_tile import conv_unfused_single_tile_kernel
    from .unfused_single_tile_tf32 import conv_unfused_single_tile_tf32_kernel


@configures("unfused_pointwise")
class UnfusedPointwise(NamedTuple):
    """1x1 filters that stay in shared memory."""

    block_c: int
    block_m: int


@configures("unfused_single_tile")
class UnfusedSingleTile(NamedTuple):
    """A tile of 1x1 filters a program, for which it asks all at once."""

    block_c: int
    block_m: int
    num_warps: int
    programs: int  # that may share a multiprocessor


@configures("unfused_single_tile_tf32")
class UnfusedSingleTileTf32(UnfusedSingleTile):
    """The same of an input gradient in TF32."""

    __slots__ = ()


# (channels, pixels) of a program that does 1x1 filters; the last one spills a little
_POINTWISE = [(64, 128), (64, 256), (128, 128), (192, 128)]
# (channels, pixels, warps) of one that does a single tile of them
_SINGLE = [
    (64, 64, 4),
    (64, 128, 4),
    (128, 64, 4),
    (128, 128, 4),
    (192, 64, 4),
    (192, 128, 8),
    (192, 256, 8),  # spills a little
]
_SINGLE_TF32 = [(64, 64, 4), (64, 128, 4)]  # the same of an input gradient in TF32
_ONLY_TF32 = Only(hopper=True, tma=True, dtypes=("tf32",), filters=(1, 1))
_TILES_A_PROCESSOR = 64  # with more, a program for each of them is not tried
_MOST_K = 1024  # channels of x, whose loop is unrolled


def _refuse_pointwise(spec: ConvSpec, gpu: Device) -> str | None:
    return linear_mma.ONLY(spec, gpu) or _refuse_long(spec)


def _refuse_long(spec: ConvSpec) -> str | None:
    long = spec.k > _MOST_K
    return f"{spec.k} channels of x; its loop is unrolled for {_MOST_K}" if long else None


def _pointwise(spec: ConvSpec, gpu: Device) -> list[UnfusedPointwise]:
    return [
        UnfusedPointwise(channels, pixels)
        for channels, pixels in _POINTWISE
        if channels < spec.c + 64 and _blocks(spec.k, gpu, channels, pixels)[0] > 1
    ]


def _single_tile(
    spec: ConvSpec, gpu: Device, kind: type[UnfusedSingleTile], sizes: list[tuple[int, int, int]]
) -> list[UnfusedSingleTile]:
    (*_, m), most = spec.pixels, _TILES_A_PROCESSOR * gpu.num_sms
    return [
        kind(channels, pixels, warps, programs)
        for channels, pixels, warps in sizes
        if channels < spec.c + 64 and triton.cdiv(m, pixels) * triton.cdiv(spec.c, channels) <= most
        for programs in _programs(spec, gpu, channels, pixels)
    ]


def _refuse_single_tile_tf32(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := _ONLY_TF32(spec, gpu) or _refuse_long(spec):
        return reason
    return None if transposes_first(spec) else "it does input gradients over many pixels"


def _of_rows(operands: ConvOperands) -> ConvOperands:
    """To a pointwise convolution all pixels are alike."""
    return operands._replace(x=as_one_row(operands.x), y=as_one_row(operands.y))


def _matrices(x: Tensor, weight: Tensor, y: Tensor, pixels: int) -> list:
    """x, the filters and y of a 1x1 convolution, in boxes of 64 channels."""
    (co, ci), (m, k), c = weight.shape[:2], x.shape[2:], y.shape[3]
    return [
        in_boxes(x, [m, k], [pixels, 64]),
        in_boxes(weight, [co, ci], [64, 64]),
        in_boxes(y, [m, c], [pixels, 64]),
    ]


def _launch_pointwise(config: UnfusedPointwise, operands: ConvOperands) -> None:
    x, weight, bias, y, _, _, _, dgrad, *_ = _of_rows(operands)
    _, _, m, k = x.shape
    c = y.shape[3]
    channels, pixels = config
    blocks, out = _blocks(k, describe(x.device), channels, pixels)
    groups = triton.cdiv(c, channels)
    rounds = min(triton.cdiv(m, pixels), max(1, describe(x.device).num_sms // groups))
    conv_unfused_pointwise_kernel[(groups * rounds,)](
        *_matrices(x, weight, y, pixels), bias, m, c,
        PIXELS=pixels, K_BLOCKS=triton.cdiv(k, 64), C_BLOCKS=channels // 64, DGRAD=dgrad,
        BLOCKS=blocks, OUT=out, num_warps=4, maxnreg=168,
    )  # fmt: skip


def _blocks(k: int, gpu: Device, channels: int, pixels: int) -> tuple[int, int]:
    """Blocks of pixels that fit into shared memory beside the filters, and results of each of two
    warpgroups: two if that leaves room for four blocks."""
    row = 64 * 2
    filters = triton.cdiv(k, 64) * channels * row
    room = gpu.shared_memory - 2048 - filters
    for out in (2, 1):
        blocks = min(8, room // (pixels * row) - 2 * out)
        if blocks >= 4 or out == 1:
            break
    return blocks, out


def _launch_single_tile(config: UnfusedSingleTile, operands: ConvOperands) -> None:
    x, weight, bias, y, _, _, _, dgrad, *_ = _of_rows(operands)
    _, _, m, k = x.shape
    c = y.shape[3]
    channels, pixels, warps, programs = config
    tiles = triton.cdiv(m, pixels) * triton.cdiv(c, channels)
    conv_unfused_single_tile_kernel[(tiles,)](
        *_matrices(x, weight, y, pixels), bias, c,
        PIXELS=pixels, K_BLOCKS=triton.cdiv(k, 64), C_BLOCKS=channels // 64, DGRAD=dgrad,
        BLOCKS=_blocks_at_once(2 * k, describe(x.device), channels, pixels, programs),
        num_warps=warps,
    )  # fmt: skip


def _blocks_at_once(row: int, gpu: Device, channels: int, pixels: int, programs: int) -> int:
    """Of pixels, whose rows have so many bytes, and filters, as many as fit where so many programs
    share a multiprocessor. A row of a block has 128 bytes."""
    room = gpu.shared_memory // programs - 2048
    return min(triton.cdiv(row, 128), room // ((channels + pixels) * 128))


def _programs(spec: ConvSpec, gpu: Device, channels: int, pixels: int) -> list[int]:
    """How many may share a multiprocessor: two, or one if that gives it more blocks."""
    row = spec.k * spec.itemsize
    alone, beside = (_blocks_at_once(row, gpu, channels, pixels, count) for count in (1, 2))
    few = min(2, triton.cdiv(row, 128))
    return [1] * (alone > beside and alone >= few) + [2] * (beside >= few)


def _launch_single_tile_tf32(config: UnfusedSingleTileTf32, operands: ConvOperands) -> None:
    """The input gradient of 1x1 filters in TF32, which the kernel transposes by itself."""
    dy, weight, _, dx, *_ = operands
    k, c, _, _ = weight.shape
    m = dy.numel() // k
    channels, pixels, warps, programs = config
    conv_unfused_single_tile_tf32_kernel[(triton.cdiv(m, pixels) * triton.cdiv(c, channels),)](
        in_boxes(dy, [m, k], [pixels, 32]), in_boxes(weight, [k, c], [32, channels]),
        in_boxes(dx, [m, c], [pixels, channels]), c,
        PIXELS=pixels, K_BLOCKS=triton.cdiv(k, 32), num_warps=warps,
        BLOCKS=_blocks_at_once(4 * k, describe(dy.device), channels, pixels, programs),
    )  # fmt: skip


FORWARD = (
    Kernel(
        "unfused_pointwise",
        UnfusedPointwise,
        _refuse_pointwise,
        _pointwise,
        launch=_launch_pointwise,
    ),
    Kernel(
        "unfused_single_tile",
        UnfusedSingleTile,
        _refuse_pointwise,
        partial(_single_tile, kind=UnfusedSingleTile, sizes=_SINGLE),
        launch=_launch_single_tile,
    ),
)
INPUT_GRAD = (
    *FORWARD,
    Kernel(
        "unfused_single_tile_tf32",
        UnfusedSingleTileTf32,
        _refuse_single_tile_tf32,
        partial(_single_tile, kind=UnfusedSingleTileTf32, sizes=_SINGLE_TF32),
        launch=_launch_single_tile_tf32,
    ),
)
