"""3x3 filters of `conv2d` for Hopper, in Gluon, over rows of 8 to 64 pixels: forward and input
gradient in 16 bits, forward in TF32 too, a bias at most. Pixels are fetched three times, not nine.

As those of `unfused_1x1` they are taken only where they were measured to be faster than
`conv.plain.tma`.
"""

from functools import partial
from typing import NamedTuple

import triton
from torch import Tensor

from ...hopper.descriptors import SUPPORTED, missing
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import following, overlapping
from ...runtime.device import Device, describe
from ..configs import ConvOperands
from .operands import filters_in_boxes
from .refusals import refuse_filters
from .tile_mma import TILES as TILE_MMA
from .tile_mma import WIDTHS, cut, in_rows

if SUPPORTED:
    from .unfused_tiles import conv_unfused_tiles_kernel


@configures("unfused_tiles")
class UnfusedTiles(NamedTuple):
    """Tiles of whole rows."""

    block_m: int  # pixels


# pixels of a tile
_TILES = tuple(dict.fromkeys(tile.block_m for tile in TILE_MMA))


def _refuse(spec: ConvSpec, gpu: Device, grad: bool) -> str | None:
    tf32 = spec.dtype == "tf32" and not grad
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


def _launch(config: UnfusedTiles, operands: ConvOperands) -> None:
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


FORWARD, INPUT_GRAD = (
    Kernel(
        "unfused_tiles",
        UnfusedTiles,
        partial(_refuse, grad=grad),
        lambda spec, gpu: [UnfusedTiles(pixels) for pixels in _cuts(spec)],
        launch=_launch,
    )
    for grad in (False, True)
)
