"""Weight gradient of `conv2d` in float32 or TF32, of dy and x as they lie in memory.

    dweight[co, r, s, ci] = sum_{n, h, w} dy[n, h, w, co] x[n, h + r - pad, w + s - pad, ci]

wgmma takes its float32 operands from shared memory only with the pixels innermost, for which
`conv.plain.float32_wgrad` copies them. Here both go through registers to the older mma.sync,
which takes them in any order. Its rate is half of wgmma's, but there are no copies to be made.

TMA fetches boxes of pixels, of 64 channels each: of x those of a tap, which begin elsewhere, with
zeros outside of the image. A program has one such block of dy and one to three of x, four warps
that multiply and one that fetches.

In float32 every number is the sum of two TF32 numbers, and three products are added up for 16
pixels before they get to the sum (`triton_kernels.tf32`). The two products with a small number may
be in bfloat16, in half the time: their numbers are then 2^-9 off, and what they add up to is 2^-11
of the large product.
"""

import math
from typing import NamedTuple

from torch import Tensor

from ...hopper.descriptors import SUPPORTED, in_boxes
from ...reductions.column_sum import num_splits
from ...reductions.long_sums import fewest_parts
from ...runtime.dependent_launch import overlapping
from ...runtime.device import describe
from ..plain.tma_boxes import as_one_row, count_boxes, is_pointwise, pixel_box

if SUPPORTED:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .mma_wgrad_kernel import conv_mma_wgrad_kernel

_BLOCK = 64  # channels
_REGISTERS = {2: 128, 3: 80, 4: 64}  # of a thread at first, by the programs of a multiprocessor


class Tile(NamedTuple):
    """What one program of the weight gradient computes."""

    block_co: int  # 64
    block_x: int  # of taps and input channels
    block_m: int  # pixels a step
    programs: int  # that share a multiprocessor
    num_warps: int  # 5: four multiply, one loads; 6: so, and pixels are read a step ahead
    num_stages: int


TILES = [
    Tile(64, 64, 32, 2, 5, 6),
    Tile(64, 64, 64, 2, 5, 3),
    Tile(64, 64, 32, 2, 6, 6),
    Tile(64, 128, 32, 2, 6, 4),
    Tile(64, 64, 32, 3, 5, 4),
    Tile(64, 64, 32, 4, 5, 3),
    Tile(64, 128, 64, 2, 5, 2),
    Tile(64, 192, 32, 2, 5, 3),
]


def serves(x: Tensor) -> bool:
    """Whether there is a Hopper GPU, with a version of Triton that this was tried with."""
    return SUPPORTED and describe(x.device).hopper and x.itemsize == 4


def fits(tile: Tile, x: Tensor, precision: str) -> bool:
    """Whether the pipelines fit into shared memory, and the sums find registers: those of three
    products beside numbers in two parts."""
    fetched = tile.num_stages * (tile.block_co + tile.block_x) * tile.block_m * 4
    sums = tile.block_co * tile.block_x // 128
    if precision == "tf32":
        in_registers = True
    elif tile.programs > 2 or tile.block_m > 32:
        in_registers = sums <= 32 and tile.programs <= 3
    else:
        in_registers = sums <= 96
    return in_registers and tile.programs * (fetched + 2048) <= describe(x.device).shared_memory


def mma_splits(
    x: Tensor, dy: Tensor, weight: Tensor, padding: tuple[int, int], precision: str, tile: Tile
) -> int:
    """Parts that the sum over pixels is best split into."""
    if is_pointwise(weight, padding):
        dy = as_one_row(dy)
    n, p, q, _ = dy.shape
    slots = describe(x.device).num_sms * tile.programs
    fewest = fewest_parts(n * p * q, x.dtype, precision)
    return num_splits(_blocks(weight, tile), _num_tiles(tile, n, p, q), slots, fewest)


def launch_mma(
    x: Tensor,  # float32 [N, H, W, CI]
    dy: Tensor,  # float32 [N, P, Q, CO]
    weight: Tensor,  # [CO, CI, R, S], of which only the shape matters
    partial: Tensor,  # [splits, CO * R * S * CI], or one part alone, to be written
    padding: tuple[int, int],
    products: int,  # TF32: 1; float32: 3, or 2 of which the small ones are in bfloat16
    tile: Tile,
    splits: int,
) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up."""
    co, ci, r, s = weight.shape
    if is_pointwise(weight, padding):
        x, dy = as_one_row(x), as_one_row(dy)
    n, p, q, _ = dy.shape
    box = pixel_box(tile.block_m, n, p, q)
    conv_mma_wgrad_kernel[(_blocks(weight, tile), splits)](
        _in_boxes(x, box),
        _in_boxes(dy, box),
        partial,
        ci,
        p,
        q,
        co,
        _num_tiles(tile, n, p, q),
        PRODUCTS=products,
        TAPS=r * s,
        S=s,
        PAD_H=padding[0],
        PAD_W=padding[1],
        X_BLOCKS=tile.block_x // _BLOCK,
        STAGES=tile.num_stages,
        AHEAD=tile.num_warps == 6,
        num_warps=4,
        maxnreg=_REGISTERS[tile.programs],
        **overlapping(x.device),
    )


def _in_boxes(x: Tensor, box: tuple[int, int, int]) -> "TensorDescriptor":
    n, h, w, c = x.shape
    return in_boxes(x, [n, h, w, c], [h * w * c, w * c, c, 1], [*box, _BLOCK])


def _num_tiles(tile: Tile, n: int, p: int, q: int) -> int:
    return count_boxes(pixel_box(tile.block_m, n, p, q), n, p, q)


def _blocks(weight: Tensor, tile: Tile) -> int:
    """Programs that a part takes."""
    co, ci, r, s = weight.shape
    columns = r * s * math.ceil(ci / _BLOCK)  # of blocks
    return math.ceil(co / tile.block_co) * math.ceil(columns * _BLOCK / tile.block_x)
