"""3x3 convolutions in 16 bits and in TF32 for Hopper, in Gluon. One product multiplies 64 channels
by a whole tile of pixels, both from shared memory. A kernel of `conv.fused`, and of `conv2d`, where
it is taken only where it was measured to be faster than `conv.plain.tma`.

A tile has 256 pixels (or 128, or 64). If the rows of the image have 4, 8, 16, 32 or 64 pixels, a
tile is whole rows; else it is a rectangle whose sides are powers of two that divide those of the
image. The box in shared memory has one row more above and below. It is fetched three times, each
time moved by a column; outside the image TMA writes zeros, which are the padding. The three taps of
a column of the filter read that box from different rows on. So pixels are fetched 3.75 times, and
not 9 times as with one box per tap (rows of 32, 256 pixels).

With small tiles, most of the time goes into waiting for filters. There the three filters of a block
are stored with the block, under one barrier.

Channels are cut into blocks of 128 bytes: 64, or 32 in TF32. If the last block has fewer, TMA reads
zeros for the missing channels, and does not write them. Blocks of 64 bytes are for channels of
which the last block would be half empty or more: zeros are multiplied like other numbers, and TMA
takes longer to write a row with some of them than a whole one. Blocks of 32 bytes are for 16
channels, as of a padded image.

In TF32 a tile of the result, and what lies beside it, would need twice the shared memory. They go
between registers and memory instead: a warp has 8 channels of a pixel at a time, a sector. Operands
of four bytes are multiplied from shared memory only with the sum's index innermost, so an input
gradient multiplies filters that `conv.plain.transpose_weights` has transposed. What 1x1 terms read
is not rounded to TF32; the warpgroup that multiplies it rounds it in shared memory before.

If an image, or the largest such rectangle, is smaller than a tile, the tile takes the same part of
several images. To TMA rows are the outermost dimension, so row 0 of all images comes before row 1,
and a tap is still one address. An address has to be a multiple of 8 pixels, and so has a row of all
images of a tile: no tile of a single image has rows of 4 pixels.

Programs are persistent. One warp loads, and two warpgroups compute a tile each, so that the
epilogue of one overlaps the products of the other. `stationary_weights` fetches each pixel once,
but its products are of one row: it is faster where rows are long.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ....hopper.descriptors import LOADER_REGISTERS, SUPPORTED, TensorDescriptor, in_boxes
from ....noise.dropout import WORD, Mask
from ....registry.cost import Work, beside_rows, outside_rows
from ....registry.kernel import Kernel, configures
from ....registry.spec import FORWARD_TERMS, ConvSpec
from ....runtime.dependent_launch import following, overlapping
from ....runtime.device import Device, describe
from ....runtime.hardware import BESIDE_BUFFERS, VECTOR
from ...configs import ConvOperands
from ...plain.transpose_weights import transpose_weights
from ...refusals import ROUNDED, Only, channels_of, odd_channels, unaddressable
from ..operands import NormOfResult, Operands

if SUPPORTED:
    from .tile_mma_kernels import conv_tile_mma_kernel


@configures("tile_mma")
class TileMma(NamedTuple):
    """The tile of a program."""

    block_m: int  # pixels of a tile
    filters_with_pixels: bool  # three filters are stored with each block of pixels
    row_bytes: int = 128  # of a pixel's channels in a block
    rows = 1  # tiles one below the other


TILES = (
    TileMma(256, False),
    TileMma(128, False),
    TileMma(128, True),
    TileMma(64, False),
    TileMma(64, True),
)
# Of 16 bits, for channels of which half of a last block, or more, would be zeros. Others never won.
HALVES = (TileMma(256, False, 64), TileMma(128, True, 64), TileMma(64, True, 64))
QUARTERS = (TileMma(256, True, 32), TileMma(128, True, 32))  # for 16 channels, likewise

CHANNELS = 64  # of a tile
_CHUNK = 8  # pixels of shared memory, at multiples of which a product begins
_WHOLE = (4, 8, 16, 32, 64)  # row lengths of which a tile takes whole rows
_COLUMNS = (32, 16, 8, 4, 64)  # of a tile in other images: the first that divides the row
_MANY_ZEROS = 1 / 12  # of a sum: with fewer, twice as many steps take longer, see docs/costs.md
_LEAST_PIXELS = 16  # of each image of a tile, since each image has sums of its own
# Registers per thread of the warpgroups that multiply, by the pixels of a tile: multiples of 24.
# Three warpgroups count; with 240 they have all registers of a multiprocessor, so no program of
# another kernel shares it.
_REGISTERS = {256: 240, 128: 168, 64: 120}


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why no tile can do it, or None."""
    if reason := Only(hopper=True, dtypes=ROUNDED, filters=(3, 3))(spec, gpu):
        return reason
    # rows of what TMA fetches are multiples of 16 bytes
    if reason := odd_channels(VECTOR // spec.itemsize, (*channels_of(spec), spec.of_filters[1])):
        return reason
    if _lacking(spec):
        return f"tensors of {spec.k} and {spec.c} channels, filters of {spec.of_filters}"
    if any(box_of(tile, spec.h, spec.w) for tile in TILES):
        return None
    return f"images of {spec.h}x{spec.w} are not cut into rectangles of {_LEAST_PIXELS} pixels"


def _lacking(spec: ConvSpec) -> bool:
    """Whether filters lack channels that have to be zeros: where the result is written by its
    addresses, as in TF32, or summed."""
    (few, many), (narrow, wide) = sorted(spec.of_filters), sorted((spec.k, spec.c))
    summed = spec.c == narrow and (spec.stats or spec.activation is not None)
    return many != wide or (few < narrow and (spec.itemsize == 4 or summed))


def configs(spec: ConvSpec, gpu: Device) -> list[TileMma]:
    """The tiles that `launch` can use."""
    tiles = TILES
    if _takes_halves(spec):
        tiles = (*TILES, *(QUARTERS if spec.k <= 16 else HALVES))
    return [tile for tile in tiles if box_of(tile, spec.h, spec.w) is not None]


def _takes_halves(spec: ConvSpec) -> bool:
    """Whether half of the last block, or more, would be zeros, and they are many beside the sum.
    (What straddles two tensors fills a slot of whole blocks.)"""
    zeros = -spec.k % CHANNELS
    many = zeros >= CHANNELS // 2 and zeros >= _MANY_ZEROS * spec.k
    return many and spec.itemsize == 2 and spec.border % CHANNELS == 0


def launch(
    config: TileMma,
    operands: Operands,
    normed: NormOfResult | None = None,
    filters_follow: bool = False,  # the kernel before this one writes the filters
) -> None:
    """Launch the convolution, or its input gradient, with one of `configs`. With the activation
    "identity" and no table, it is the plain input gradient, without terms. With `normed`, which
    needs tiles of whole images, the launch also computes the norm of the result."""
    n, h, w, k = operands.x.shape
    c = operands.y.shape[3] if operands.activation else len(operands.weight)  # may be fewer
    tf32 = operands.x.itemsize == 4
    if tf32 and operands.activation is not None:
        operands = operands._replace(weight=transpose_weights(operands.weight, 1)[0])
        filters_follow = True
    where = operands.x.device
    device = describe(where)
    images, rows, width = box_of(config, h, w)
    tiles = (h // rows) * (w // width)
    second = 0 if normed is None else normed.second
    count = -(-n // images) * (tiles * -(-c // 64) + second // 64)
    blocks, steps = rings(config, images * width, device.shared_memory, tf32)
    overlap = following(where) if filters_follow else overlapping(where, 0)
    channels = config.row_bytes // operands.x.itemsize
    box = (channels, CHANNELS) if operands.activation and not tf32 else (CHANNELS, channels)
    assert operands.partials is None or operands.partials.shape[1] == tiles
    read = partial(in_rows, rows=2, images=images, width=width, channels=channels)
    written = _pointer if tf32 else partial(in_rows, rows=rows, images=images, width=width)
    assert normed is None or (rows, width) == (h, w)
    norm, of_norm = _norm_of_result(normed, written)
    straddling = not tf32 and len(operands.beside) == 2 and operands.beside[0].shape[3] % 64 > 0
    assert not straddling or config.row_bytes == 128, "a slot has no room for a tile"
    ragged = c % CHANNELS > 0 or any(x % channels for x in (k, *operands.extra_channels))
    conv_tile_mma_kernel[(min(count, device.num_sms),)](
        *operands.tensors(read, written, box),
        *norm,
        *_kept(operands.mask, (n, h, w, -(-c // WORD))),
        operands.factor,
        *operands.extra_channels,
        *operands.numbers,
        n,
        h,
        k,
        c,
        second,
        ROWS=rows,
        IMAGES=images,
        W=width,
        COLUMNS=w // width,
        DGRAD=operands.activation is not None,
        ACT=operands.activation_name if normed is None else normed.activation,
        BLOCKS=blocks,
        STEPS=steps,
        **registers(config.block_m, images, tf32),
        RAGGED=ragged,
        STRADDLING=straddling,
        OVERLAP=bool(overlap),
        FILTERS=not filters_follow,
        TF32=operands.tf32,
        num_warps=4,
        **of_norm,
        **overlap,
    )


def _kept(mask: Mask | None, shape: tuple[int, ...]) -> tuple[Tensor | None, float]:
    """Which channels dropout has kept, in words of this shape, and the factor of those."""
    if mask is None:
        return None, 1.0
    assert mask.words.shape == shape
    return mask.words, 1 / (1 - mask.p)


def _norm_of_result(
    normed: NormOfResult | None, written: Callable[[Tensor], TensorDescriptor | Tensor]
) -> tuple[tuple, dict[str, Any]]:
    """What the kernel is told of the norm of the result: arguments, and constants."""
    if normed is None:
        return (None,) * 5, {"CG": 1, "KEEP": True}
    x2 = None if normed.x2 is None else written(normed.x2)
    given = written(normed.a), x2, normed.weight, normed.bias, normed.eps
    return given, {"CG": normed.channels, "KEEP": normed.keep}


def registers(pixels: int, images: int, tf32: bool = False) -> dict[str, int]:
    """Registers per thread, by the pixels and images of a tile. Two warpgroups that multiply have
    REGISTERS, and the one that loads has few; all three are launched with the mean. The epilogue of
    a tile of several images holds the norm's table of each of them; in TF32 it holds addresses."""
    most = _REGISTERS[pixels] if images <= 2 and not tf32 else max(_REGISTERS.values())
    return {"REGISTERS": most, "maxnreg": (2 * most + LOADER_REGISTERS) // 3}


def _pointer(x: Tensor) -> Tensor:
    return x


def rings(config: TileMma, width: int, shared_memory: int, tf32: bool) -> tuple[int, int]:
    """Slots of the ring of blocks of pixels, and of the ring of filters of one tap, that fit shared
    memory, in 16 bits with two tiles of the result. Three filters use one block, and neither ring
    should wait for the other. 0 filters: the filters are stored with the blocks."""
    pixels, times = config.block_m, 128 // config.row_bytes
    left = shared_memory - BESIDE_BUFFERS - (0 if tf32 else 2 * pixels * 128)
    block, tap = (pixels + 2 * width) * config.row_bytes, CHANNELS * config.row_bytes

    if config.filters_with_pixels:
        return min(6 * times, left // (block + 3 * tap)), 0

    def ahead(blocks: int) -> int:
        return min(3 * (blocks - 1), (left - blocks * block) // tap)

    counts = (b for b in range(2, 4 * times + 1) if left - b * block >= 2 * tap)
    blocks = max(counts, key=ahead)
    return blocks, min(8 * times, (left - blocks * block) // tap)


def cut(pixels: int, h: int, w: int) -> tuple[int, int] | None:
    """Rows and images of a tile: rows that divide an image, or several whole images; or None."""
    rows, images = (h, pixels // (h * w)) if h * w < pixels else (pixels // w, 1)
    divides = h % rows == 0 and images * rows * w == pixels
    return (rows, images) if divides and _fetchable(images, rows, w) else None


def box_of(config: TileMma, h: int, w: int) -> tuple[int, int, int] | None:
    """Images, rows and columns of a tile: the largest part of an image that divides it; or None."""
    pixels = min(config.block_m, (h & -h) * (w & -w))
    if pixels < min(_LEAST_PIXELS, h * w):
        return None
    for width in (w,) if w in _WHOLE else _COLUMNS:
        rows = pixels // width
        images = config.block_m // pixels
        if rows and w % width == h % rows == 0 and _fetchable(images, rows, width):
            return images, rows, width
    return None


def _fetchable(images: int, rows: int, width: int) -> bool:
    """Whether the number of rows is even, and each row begins at a multiple of _CHUNK pixels."""
    return rows % 2 == 0 and images * width % _CHUNK == 0


def in_rows(
    x: Tensor, rows: int, images: int, channels: int = 64, width: int | None = None
) -> TensorDescriptor:
    """[N, H, W, C] as [H, N, W, C], in boxes of whole rows, or of `width` pixels of them."""
    n, h, w, c = x.shape
    box = [rows, images, width or w, channels]
    return in_boxes(x, [h, n, w, c], box, [w * c, h * w * c, c, 1])


def work(spec: ConvSpec, gpu: Device, c: TileMma) -> Work:
    """The work of its programs; each of two warpgroups has a tile."""
    images, rows, width = box_of(c, spec.h, spec.w)
    blocks_c, size = -(-spec.c // CHANNELS), c.row_bytes // spec.itemsize
    # (channels, rows of pixels per block of channels, rows of filters per block of channels)
    read = [(spec.k, 3 * (c.block_m + 2 * images * width), 9 * CHANNELS)]
    read += [(k, c.block_m, CHANNELS) for k in spec.extra]
    blocks = -(-spec.k // size)
    extra = sum(-(-k // size) for k in spec.extra)
    straddling = spec.border % CHANNELS > 0  # tiles with channels of both tensors
    of_blocks = sum(-(-k // size) * (pixels + filters) for k, pixels, filters in read)
    beyond = 1 - spec.c / (CHANNELS * blocks_c)
    return Work(
        tiles=-(-spec.n // images) * (spec.h // rows) * (spec.w // width) * blocks_c,
        resident=2,
        # in TF32 a block that is rounded takes as long as two that are not
        products=CHANNELS * size * c.block_m * (9 * blocks + extra * spec.itemsize // 2),
        fetched=c.row_bytes * (of_blocks + straddling * c.block_m),
        steps=3 * blocks + extra + straddling,
        written=CHANNELS * c.block_m,
        memory=spec.bytes,
        grad=spec.activation is not None,
        beside=sum(
            (pixels + filters) * beside_rows(k, size, spec.itemsize) for k, pixels, filters in read
        ),
        outside=sum(outside_rows(k, size, *sizes, beyond) for k, *sizes in read),
    )


KERNEL = Kernel(
    "tile_mma",
    TileMma,
    refuse,
    configs,
    launch=launch,
    adds=(*FORWARD_TERMS, "activation", "mask"),
    work=work,
    fitted_by=("block_m", "filters_with_pixels", "row_bytes"),
)


# --- of `conv2d`: the epilogue adds a bias at most ------------------------------------------------


def _refuse_plain(spec: ConvSpec, gpu: Device) -> str | None:
    return unaddressable(spec, gpu) or refuse(spec, gpu)


def _refuse_plain_grad(spec: ConvSpec, gpu: Device) -> str | None:
    if spec.dtype == "tf32":
        return "it multiplies filters that are transposed first"
    return _refuse_plain(spec, gpu)


def _launch_plain(config: TileMma, operands: ConvOperands) -> None:
    x, weight, bias, y, _, _, _, dgrad, *_ = operands
    given = Operands(x, weight, y, bias, None, activation="identity" if dgrad else None)
    launch(config, given, filters_follow=operands.follows)


PLAIN_FORWARD = Kernel("tile_mma", TileMma, _refuse_plain, configs, launch=_launch_plain)
PLAIN_INPUT_GRAD = replace(PLAIN_FORWARD, refuse=_refuse_plain_grad)
