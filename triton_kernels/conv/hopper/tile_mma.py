"""A second path of `conv.fused` for Hopper, written in Gluon: 3x3 convolutions in 16 bits whose
products are of 64 channels with a whole tile of pixels, both from shared memory.

A tile is 256 pixels (or 128, or 64): whole rows of an image, or a rectangle of one whose rows are
not 4, 8, 16, 32 or 64 pixels. Its sides are powers of two that divide those of the image. Its box
has a row more above and below, and it is fetched three times, moved by a column each time: outside
the image TMA writes zeros, which are the padding. The three taps of a column of the filter are that
box from another row on. So pixels are fetched 3.75 times where a box a tap fetches them 9 times
(rows of 32, 256 pixels).

Where tiles are small, to wait for each of the filters is what takes the time: there three of them
lie with the block that they are for, under one barrier.

Channels are cut into blocks of 64. Where the last block has fewer, TMA reads zeros for the others,
and does not write them.

Where an image, or the largest such rectangle, has fewer pixels than that, a tile takes the same of
several images, side by side: to TMA the rows are the outermost dimension, so that row 0 of all of
them comes before row 1, and a tap is still one address. Such an address is a multiple of 8 pixels,
and so is a row of all images of a tile: there is no tile of one image with rows of 4 pixels.

Programs stay on their multiprocessor; one warp loads, and two warpgroups multiply, a tile each, so
that the epilogue of one is beside the products of the other. `row_mma` does the same with pixels
that are fetched once, for which its products are of one row: better where rows are long.
"""

from functools import partial
from typing import NamedTuple

from torch import Tensor

from ...hopper.descriptors import LOADER_REGISTERS, SUPPORTED, in_boxes
from ...noise.dropout import WORD
from ...registry.cost import Work, beside_rows, outside_rows
from ...registry.kernel import Kernel, configures
from ...registry.spec import FORWARD_TERMS, ConvSpec
from ...runtime.dependent_launch import overlapping
from ...runtime.device import Device, describe
from ...runtime.hardware import BESIDE_BUFFERS
from .operands import NormOfResult, Operands
from .refusals import refuse_3x3

if SUPPORTED:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .tile_mma_kernels import conv_tile_mma_kernel


@configures("tile_mma")
class TileMma(NamedTuple):
    """What a program of this kernel takes at a time."""

    block_m: int  # pixels of a tile
    filters_with_pixels: bool  # three of them, under the barrier of their block of pixels
    rows = 1  # tiles one below the other


TILES = (
    TileMma(256, False),
    TileMma(128, False),
    TileMma(128, True),
    TileMma(64, False),
    TileMma(64, True),
)

CHANNELS = 64  # of a tile
_CHUNK = 8  # pixels of shared memory, at multiples of which a product begins
WIDTHS = (8, 16, 32, 64)  # pixels of a row
_WHOLE = (4, *WIDTHS)  # of those that are whole, with an epilogue
_COLUMNS = (32, 16, 8, 4, 64)  # of a tile in other images: the first that divides them
_LEAST_PIXELS = 16  # of an image, in a tile: each has sums of its own
# Of a thread that multiplies, by the pixels of a tile: multiples of 24. The warps of three
# warpgroups count, and with 240 they have all registers of a multiprocessor, so that no other
# kernel has a program beside this one's.
_REGISTERS = {256: 240, 128: 168, 64: 120}


def refuse(spec: ConvSpec, gpu: Device, ragged: bool = True) -> str | None:
    """Why no tile can do it, or None. `ragged`: channels need be no multiple of 64."""
    if reason := refuse_3x3(spec, gpu, ragged=ragged):
        return reason
    if any(box_of(tile, spec.h, spec.w) for tile in TILES):
        return None
    return f"images of {spec.h}x{spec.w} are not cut into rectangles of {_LEAST_PIXELS} pixels"


def configs(spec: ConvSpec, gpu: Device) -> list[TileMma]:
    """Those with which `launch` can do it."""
    return [tile for tile in TILES if box_of(tile, spec.h, spec.w) is not None]


def launch(config: TileMma, operands: Operands, normed: NormOfResult | None = None) -> None:
    """The convolution, or its input gradient, with one of `configs`: that of the convolution alone,
    without terms, if the activation is "identity" and there is no table; or the convolution and
    the norm of it, if a tile is whole images."""
    n, h, w, k = operands.x.shape
    c = operands.y.shape[3]
    device = describe(operands.x.device)
    images, rows, width = box_of(config, h, w)
    tiles = (h // rows) * (w // width)
    count = -(-n // images) * tiles * -(-c // 64)
    blocks, steps = rings(config, images * width, device.shared_memory)
    overlap = overlapping(operands.x.device, 0)
    assert operands.partials is None or operands.partials.shape[1] == tiles
    read, written = (partial(in_rows, rows=r, images=images, width=width) for r in (2, rows))
    vectors, then, second = (None,) * 5, (operands.activation_name, 1, True), 0
    kept, factor = None, 1.0
    if operands.mask is not None:
        kept, factor = operands.mask.words, 1 / (1 - operands.mask.p)
        assert kept.shape == (n, h, w, -(-c // WORD))
    if normed is not None:
        assert (rows, width) == (h, w)
        second = normed.second
        x2 = None if normed.x2 is None else written(normed.x2)
        vectors = written(normed.a), x2, normed.weight, normed.bias, normed.eps
        then = normed.activation, normed.channels, normed.keep
        count += -(-n // images) * (second // 64)
    act, group, keep = then
    ragged = any(x % 64 for x in (k, c, *operands.extra_channels))
    conv_tile_mma_kernel[(min(count, device.num_sms),)](
        *operands.tensors(read, written, 64),
        *vectors,
        kept,
        factor,
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
        ACT=act,
        BLOCKS=blocks,
        STEPS=steps,
        **registers(config.block_m, images),
        RAGGED=ragged,
        STRADDLING=len(operands.beside) == 2 and operands.beside[0].shape[3] % 64 > 0,
        OVERLAP=bool(overlap),
        CG=group,
        KEEP=keep,
        num_warps=4,
        **overlap,
    )


def registers(pixels: int, images: int) -> dict[str, int]:
    """What is launched with so many pixels and images a tile: two warpgroups have these registers a
    thread, and the one that loads few; all three begin with the mean. An epilogue of many images
    has the norm's table of each of them."""
    most = _REGISTERS[pixels] if images <= 2 else max(_REGISTERS.values())
    return {"REGISTERS": most, "maxnreg": (2 * most + LOADER_REGISTERS) // 3}


def rings(config: TileMma, width: int, shared_memory: int) -> tuple[int, int]:
    """Blocks of pixels, and filters of one tap, that shared memory holds beside two tiles of the
    result. A block is needed for three filters, and neither ring should wait for the other. 0
    filters: three with each block, in the same ring."""
    pixels = config.block_m
    left = shared_memory - BESIDE_BUFFERS - 2 * pixels * 128
    block, tap = (pixels + 2 * width) * 128, 64 * 128

    if config.filters_with_pixels:
        return min(6, left // (block + 3 * tap)), 0

    def ahead(blocks: int) -> int:
        return min(3 * (blocks - 1), (left - blocks * block) // tap)

    blocks = max((b for b in range(2, 5) if left - b * block >= 2 * tap), key=ahead)
    return blocks, min(8, (left - blocks * block) // tap)


def cut(pixels: int, h: int, w: int) -> tuple[int, int] | None:
    """Rows and images of a tile: rows that divide those of an image, or several whole images."""
    rows, images = (h, pixels // (h * w)) if h * w < pixels else (pixels // w, 1)
    divides = h % rows == 0 and images * rows * w == pixels
    return (rows, images) if divides and _fetchable(images, rows, w) else None


def box_of(config: TileMma, h: int, w: int) -> tuple[int, int, int] | None:
    """Images, rows and columns of a tile, or None. It is as much of an image as divides it."""
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
    """Whether rows are fetched in pairs, and each begins where a product can."""
    return rows % 2 == 0 and images * width % _CHUNK == 0


def in_rows(
    x: Tensor, rows: int, images: int, channels: int = 64, width: int | None = None
) -> "TensorDescriptor":
    """[N, H, W, C] as [H, N, W, C], in boxes of whole rows or of so many of their pixels."""
    n, h, w, c = x.shape
    box = [rows, images, width or w, channels]
    return in_boxes(x, [h, n, w, c], [w * c, h * w * c, c, 1], box)


def work(spec: ConvSpec, gpu: Device, c: TileMma) -> Work:
    """What its programs do; two warpgroups have a tile each."""
    images, rows, width = box_of(c, spec.h, spec.w)
    blocks_c = -(-spec.c // CHANNELS)
    # channels, and the rows of pixels and of filters that are fetched of each block of them
    read = [(spec.k, 3 * (c.block_m + 2 * images * width), 9 * CHANNELS)]
    read += [(k, c.block_m, CHANNELS) for k in spec.extra]
    blocks = -(-spec.k // CHANNELS)
    extra = sum(-(-k // CHANNELS) for k in spec.extra)
    straddling = spec.first is not None and spec.first < spec.c and spec.first % CHANNELS > 0
    of_blocks = sum(-(-k // CHANNELS) * (pixels + filters) for k, pixels, filters in read)
    beyond = 1 - spec.c / (CHANNELS * blocks_c)
    return Work(
        tiles=-(-spec.n // images) * (spec.h // rows) * (spec.w // width) * blocks_c,
        resident=2,
        products=CHANNELS**2 * c.block_m * (9 * blocks + extra),
        fetched=128 * (of_blocks + straddling * c.block_m),
        steps=3 * blocks + extra + straddling,
        written=CHANNELS * c.block_m,
        memory=spec.bytes,
        grad=spec.activation is not None,
        beside=sum(
            (pixels + filters) * beside_rows(k, CHANNELS, spec.itemsize)
            for k, pixels, filters in read
        ),
        outside=sum(outside_rows(k, CHANNELS, *sizes, beyond) for k, *sizes in read),
    )


KERNEL = Kernel(
    "tile_mma",
    TileMma,
    refuse,
    configs,
    launch=launch,
    adds=(*FORWARD_TERMS, "activation", "mask"),
    work=work,
    fitted_by=("block_m", "filters_with_pixels"),
)
