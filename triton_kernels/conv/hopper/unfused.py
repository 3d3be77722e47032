"""The path of `conv2d` for Hopper, in Gluon: forward and input gradient in 16 bits, a bias at most.

3x3 filters over rows of 8 to 64 pixels fetch pixels three times, not nine, in TF32 too. 1x1 filters
stay in shared memory while the pixels pass by or, where there are few tiles, are fetched with the
pixels and all at once; so they are in the input gradient in TF32. All are configurations for
`select` like any other of `conv.plain.tma`, taken only where they were measured to be faster.
"""

from dataclasses import replace
from typing import NamedTuple

import triton
from torch import Tensor

from ...hopper.descriptors import SUPPORTED, in_boxes, missing
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import following, overlapping
from ...runtime.device import Device, describe
from ..configs import ConvOperands
from ..plain.tma import transposes_first
from ..plain.tma_boxes import as_one_row, unaddressable
from .operands import filters_in_boxes
from .refusals import refuse_filters
from .tile_mma import TILES as TILE_MMA
from .tile_mma import WIDTHS, cut, in_rows

if SUPPORTED:
    from .unfused_pointwise import conv_unfused_pointwise_kernel
    from .unfused_single_tile import conv_unfused_single_tile_kernel
    from .unfused_single_tile_tf32 import conv_unfused_single_tile_tf32_kernel
    from .unfused_tiles import conv_unfused_tiles_kernel


@configures("unfused_tiles")
class UnfusedTiles(NamedTuple):
    """3x3 filters: pixels of a tile."""

    block_m: int


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
class UnfusedSingleTileTf32(NamedTuple):
    """The same of an input gradient in TF32."""

    block_c: int
    block_m: int
    num_warps: int
    programs: int


# (channels, pixels) of a program that does 1x1 filters; the last one spills a little
_POINTS = [(64, 128), (64, 256), (128, 128), (192, 128)]
# (channels, pixels, warps) of one that does a single tile of them
_ONCE = [
    (64, 64, 4),
    (64, 128, 4),
    (128, 64, 4),
    (128, 128, 4),
    (192, 64, 4),
    (192, 128, 8),
    (192, 256, 8),  # spills a little
]
_ONCE_TF32 = [(64, 64, 4), (64, 128, 4)]  # the same of an input gradient in TF32
_TILES_A_PROCESSOR = 64  # with more, a program for each of them is not tried
# pixels of a tile of 3x3 filters whose products are of whole tiles
_TILES = tuple(dict.fromkeys(tile.block_m for tile in TILE_MMA))
_MOST_K = 1024  # channels of x, whose loop is unrolled


def _refuse_tiles(spec: ConvSpec, gpu: Device) -> str | None:
    """Of a forward pass."""
    return _refuse_3x3(spec, gpu, tf32=spec.dtype == "tf32")


def _refuse_tiles_grad(spec: ConvSpec, gpu: Device) -> str | None:
    return _refuse_3x3(spec, gpu, tf32=False)


def _refuse_3x3(spec: ConvSpec, gpu: Device, tf32: bool) -> str | None:
    if reason := missing(gpu, 2 if tf32 else spec.itemsize) or refuse_filters(spec):
        return reason
    if not spec.aligned:
        return "tensors do not begin at multiples of 16 bytes"
    block = 32 if tf32 else 64
    if spec.k % block or spec.c % 64:
        return f"{spec.k} and {spec.c} channels are no multiples of {block} and 64"
    if spec.w not in WIDTHS:
        return f"rows of {spec.w} pixels; it takes {', '.join(map(str, WIDTHS))}"
    return None if _cuts(spec) else f"images of {spec.h}x{spec.w} are not cut into tiles"


def _cuts(spec: ConvSpec) -> list[int]:
    return [pixels for pixels in _TILES if cut(pixels, spec.h, spec.w) is not None]


def _refuse_pointwise(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := missing(gpu, spec.itemsize) or unaddressable(spec, gpu):
        return reason
    if not spec.pointwise:
        return f"it does 1x1 filters without padding, not {spec.r}x{spec.s}"
    if spec.k > _MOST_K:
        return f"{spec.k} channels of x; its loop is unrolled for {_MOST_K}"
    return None


def _pointwise(spec: ConvSpec, gpu: Device) -> list[UnfusedPointwise]:
    return [
        UnfusedPointwise(channels, pixels)
        for channels, pixels in _POINTS
        if channels < spec.c + 64 and _blocks(spec.k, gpu, channels, pixels)[0] > 1
    ]


def _single_tile(spec: ConvSpec, gpu: Device) -> list[UnfusedSingleTile]:
    return [
        UnfusedSingleTile(channels, pixels, warps, programs)
        for channels, pixels, warps in _ONCE
        if channels < spec.c + 64 and _tiles(spec, channels, pixels) <= _most_tiles(gpu)
        for programs in _programs(spec, gpu, channels, pixels)
    ]


def _refuse_single_tile_tf32(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := missing(gpu, 2) or unaddressable(spec, gpu):
        return reason
    if not transposes_first(spec) or not spec.pointwise:
        return "it does input gradients of 1x1 filters over many pixels in TF32"
    if spec.k > _MOST_K:
        return f"{spec.k} channels of dy; its loop is unrolled for {_MOST_K}"
    return None


def _single_tile_tf32(spec: ConvSpec, gpu: Device) -> list[UnfusedSingleTileTf32]:
    return [
        UnfusedSingleTileTf32(channels, pixels, warps, programs)
        for channels, pixels, warps in _ONCE_TF32
        if _tiles(spec, channels, pixels) <= _most_tiles(gpu)
        for programs in _programs(spec, gpu, channels, pixels)
    ]


def _tiles(spec: ConvSpec, channels: int, pixels: int) -> int:
    *_, m = spec.pixels
    return triton.cdiv(m, pixels) * triton.cdiv(spec.c, channels)


def _most_tiles(gpu: Device) -> int:
    return _TILES_A_PROCESSOR * gpu.num_sms


def _launch_once_tf32(config: UnfusedSingleTileTf32, operands: ConvOperands) -> None:
    """The input gradient of 1x1 filters in TF32, which the kernel transposes by itself."""
    dy, weight, _, dx, *_ = operands
    k, c, _, _ = weight.shape
    m = dy.numel() // k
    channels, pixels, warps, programs = config
    conv_unfused_single_tile_tf32_kernel[(triton.cdiv(m, pixels) * triton.cdiv(c, channels),)](
        in_boxes(dy, [m, k], [k, 1], [pixels, 32]),
        in_boxes(weight, [k, c], [c, 1], [32, channels]),
        in_boxes(dx, [m, c], [c, 1], [pixels, channels]),
        c,
        PIXELS=pixels,
        K_BLOCKS=triton.cdiv(k, 32),
        BLOCKS=_blocks_at_once(4 * k, describe(dy.device), channels, pixels, programs),
        num_warps=warps,
    )


def _launch_tiles(config: UnfusedTiles, operands: ConvOperands) -> None:
    x, weight, bias, y, _, _, _, dgrad, *_ = operands
    n, h, w, k = x.shape
    c = y.shape[3]
    rows, images = cut(config.block_m, h, w)
    tiles = triton.cdiv(n, images) * (h // rows) * (c // 64)
    block = 128 // x.itemsize
    if x.itemsize == 4:
        rings, result = (_ring_tf32(x, config.block_m, images), 0), y
        options = following(x.device) if operands.follows else overlapping(x.device)
    else:
        rings, result, options = _rings(x, config.block_m, images), in_rows(y, rows, images), {}
    conv_unfused_tiles_kernel[(min(tiles, describe(x.device).num_sms),)](
        in_rows(x, 2, images, block), filters_in_boxes(weight, 64, block), result, bias, n, h, k, c,
        ROWS=rows, IMAGES=images, W=w, DGRAD=dgrad, BLOCKS=rings[0], STEPS=rings[1], num_warps=4,
        maxnreg=168, **options,
    )  # fmt: skip


def _rings(x: Tensor, pixels: int, images: int) -> tuple[int, int]:
    """Blocks of pixels, and filters of one tap, that shared memory has room for beside two results.
    A block is needed for three filters: as many as make the shorter of the two rings longest."""
    room = describe(x.device).shared_memory - 2048 - 2 * pixels * 128
    block, tap = (pixels + 2 * images * x.shape[2]) * 128, 64 * 128

    def ahead(blocks: int) -> int:
        return min(3 * (blocks - 1), (room - blocks * block) // tap)

    blocks = max(range(2, 6), key=ahead)
    return blocks, min(9, (room - blocks * block) // tap)


def _ring_tf32(x: Tensor, pixels: int, images: int) -> int:
    """Blocks of pixels, each with three filters, that shared memory has room for."""
    room = describe(x.device).shared_memory - 2048
    return min(6, room // ((pixels + 2 * images * x.shape[2] + 3 * 64) * 128))


def _of_rows(operands: ConvOperands) -> ConvOperands:
    """To a pointwise convolution all pixels are alike."""
    return operands._replace(x=as_one_row(operands.x), y=as_one_row(operands.y))


def _matrices(x: Tensor, weight: Tensor, y: Tensor, pixels: int) -> list:
    """x, the filters and y of a 1x1 convolution, in boxes of 64 channels."""
    (co, ci), (m, k), c = weight.shape[:2], x.shape[2:], y.shape[3]
    return [
        in_boxes(x, [m, k], [k, 1], [pixels, 64]),
        in_boxes(weight, [co, ci], [ci, 1], [64, 64]),
        in_boxes(y, [m, c], [c, 1], [pixels, 64]),
    ]


def _launch_points(config: UnfusedPointwise, operands: ConvOperands) -> None:
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


def _launch_once(config: UnfusedSingleTile, operands: ConvOperands) -> None:
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


TILES = Kernel(
    "unfused_tiles",
    UnfusedTiles,
    _refuse_tiles,
    lambda spec, gpu: [UnfusedTiles(pixels) for pixels in _cuts(spec)],
    launch=_launch_tiles,
)
_POINTWISE = (
    Kernel("unfused_pointwise", UnfusedPointwise, _refuse_pointwise, _pointwise,
           launch=_launch_points),
    Kernel("unfused_single_tile", UnfusedSingleTile, _refuse_pointwise, _single_tile,
           launch=_launch_once),
)  # fmt: skip
FORWARD = TILES, *_POINTWISE
INPUT_GRAD = (
    replace(TILES, refuse=_refuse_tiles_grad),
    *_POINTWISE,
    Kernel(
        "unfused_single_tile_tf32",
        UnfusedSingleTileTf32,
        _refuse_single_tile_tf32,
        _single_tile_tf32,
        launch=_launch_once_tf32,
    ),
)
