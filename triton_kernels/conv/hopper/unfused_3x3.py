"""3x3 filters of `conv2d` for Hopper, in Gluon: in 16 bits those of `tile_mma`, whose epilogue adds
a bias at most; in TF32 a kernel of the forward pass, over rows of 8 to 64 pixels. Pixels are
fetched three times, not nine.

As those of `unfused_1x1` they are taken only where they were measured to be faster than
`conv.plain.tma`.
"""

from typing import NamedTuple

import triton

from ...hopper.descriptors import SUPPORTED, missing
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import following, overlapping
from ...runtime.device import Device, describe
from ..configs import ConvOperands
from . import tile_mma
from .operands import Operands, filters_in_boxes
from .refusals import refuse_filters
from .tile_mma import WIDTHS, TileMma, cut, in_rows

if SUPPORTED:
    from .unfused_tiles import conv_unfused_tiles_kernel


# --- 16 bits --------------------------------------------------------------------------------------


def _refuse_tiles(spec: ConvSpec, gpu: Device) -> str | None:
    return _refuse_unaligned(spec) or tile_mma.refuse(spec, gpu)


def _refuse_unaligned(spec: ConvSpec) -> str | None:
    return None if spec.aligned else "tensors do not begin at multiples of 16 bytes"


def _launch_tiles(config: TileMma, operands: ConvOperands) -> None:
    x, weight, bias, y, _, _, _, dgrad, *_ = operands
    activation = "identity" if dgrad else None
    tile_mma.launch(config, Operands(x, weight, y, bias, None, activation=activation))


TILES = Kernel("tile_mma", TileMma, _refuse_tiles, tile_mma.configs, launch=_launch_tiles)


# --- TF32 -----------------------------------------------------------------------------------------


@configures("unfused_tiles")
class UnfusedTiles(NamedTuple):
    """Tiles of whole rows."""

    block_m: int  # pixels


# pixels of a tile
_TILES = tuple(dict.fromkeys(tile.block_m for tile in tile_mma.TILES))


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    if spec.dtype != "tf32":
        return f"it multiplies in TF32, not in {spec.dtype}"
    if reason := missing(gpu) or refuse_filters(spec) or _refuse_unaligned(spec):
        return reason
    if spec.k % 32 or spec.c % 64:
        return f"{spec.k} and {spec.c} channels are no multiples of 32 and 64"
    if spec.w not in WIDTHS:
        return f"rows of {spec.w} pixels; it takes {', '.join(map(str, WIDTHS))}"
    return None if _cuts(spec) else f"images of {spec.h}x{spec.w} are not cut into tiles"


def _cuts(spec: ConvSpec) -> list[int]:
    return [pixels for pixels in _TILES if cut(pixels, spec.h, spec.w) is not None]


def _launch(config: UnfusedTiles, operands: ConvOperands) -> None:
    x, weight, bias, y, *_ = operands
    n, h, w, k = x.shape
    c = y.shape[3]
    gpu, (rows, images) = describe(x.device), cut(config.block_m, h, w)
    tiles = triton.cdiv(n, images) * (h // rows) * (c // 64)
    conv_unfused_tiles_kernel[(min(tiles, gpu.num_sms),)](
        in_rows(x, 2, images, 32), filters_in_boxes(weight, 64, 32), y, bias, n, h, k, c,
        ROWS=rows, IMAGES=images, W=w, BLOCKS=_ring(gpu, config.block_m, images * w), num_warps=4,
        maxnreg=168, **(following(x.device) if operands.follows else overlapping(x.device)),
    )  # fmt: skip


def _ring(gpu: Device, pixels: int, row: int) -> int:
    """Blocks of pixels, each with three filters, that shared memory has room for."""
    return min(6, (gpu.shared_memory - 2048) // ((pixels + 2 * row + 3 * 64) * 128))


TF32_TILES = Kernel(
    "unfused_tiles",
    UnfusedTiles,
    _refuse,
    lambda spec, gpu: [UnfusedTiles(pixels) for pixels in _cuts(spec)],
    launch=_launch,
)
