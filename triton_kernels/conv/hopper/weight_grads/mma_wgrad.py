"""Weight gradient of `conv2d` in float32 or TF32, of dy and x as they lie in memory.

    dweight[co, r, s, ci] = sum_{n, h, w} dy[n, h, w, co] x[n, h + r - pad, w + s - pad, ci]

wgmma takes its float32 operands from shared memory only with the pixels innermost. Here both go
through registers to the older mma.sync, which takes them in any order. Its rate is half of wgmma's,
but there are no copies to be made.

TMA fetches boxes of pixels, of 64 channels each: of x those of a tap, which begin elsewhere, with
zeros outside of the image. A program has one such block of dy and one to three of x, four warps
that multiply and one that fetches.

In float32 every number is the sum of two TF32 numbers, and three products are added up for 16
pixels before they get to the sum (`triton_kernels.tf32`).
"""

import math
from typing import NamedTuple

from ....hopper.descriptors import SUPPORTED, in_boxes, missing
from ....reductions.column_sum import num_splits
from ....registry.cost import Work
from ....registry.kernel import configures
from ....registry.spec import ConvSpec
from ....runtime.dependent_launch import overlapping
from ....runtime.device import Device
from ....runtime.hardware import thread_registers
from ...configs import WgradOperands, fewest_of, split_kernel, wgrad_work
from ...plain.by_tma.tma_boxes import as_one_row, count_boxes, is_pointwise, pixel_box
from ...refusals import refuse_wide_float32

if SUPPORTED:
    from .mma_wgrad_kernel import conv_mma_wgrad_kernel

BLOCK = 64  # channels
_THREADS = 256  # of a program: those that multiply, and a warp that loads beside as many idle ones


@configures("mma_wgrad")
class MmaWgrad(NamedTuple):
    """What one program of the weight gradient computes: 64 output channels."""

    block_x: int  # of taps and input channels
    block_m: int  # pixels a step
    programs: int  # that share a multiprocessor
    num_stages: int
    read_ahead: bool  # pixels are read from shared memory a step ahead


TILES = [
    MmaWgrad(64, 32, 2, 6, False),
    MmaWgrad(64, 64, 2, 3, False),
    MmaWgrad(64, 32, 2, 6, True),
    MmaWgrad(128, 32, 2, 4, True),
    MmaWgrad(64, 32, 3, 4, False),
    MmaWgrad(64, 32, 4, 3, False),
    MmaWgrad(128, 64, 2, 2, False),
    MmaWgrad(192, 32, 2, 3, False),
]


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    return missing(gpu) or refuse_wide_float32(spec, gpu)


def tiles(spec: ConvSpec, gpu: Device) -> list[MmaWgrad]:
    """Those whose pipelines fit into shared memory, and whose sums find registers: those of three
    products beside numbers in two parts."""
    return [t for t in TILES if _fits(t, spec.precision, gpu)]


def _fits(tile: MmaWgrad, precision: str, gpu: Device) -> bool:
    fetched = tile.num_stages * (BLOCK + tile.block_x) * tile.block_m * 4
    sums = BLOCK * tile.block_x // 128
    if precision == "tf32":
        in_registers = True  # there is one product, of no small number
    elif tile.programs > 2 or tile.block_m > 32:
        in_registers = sums <= 32 and tile.programs <= 3
    else:
        in_registers = sums <= 96
    return in_registers and tile.programs * (fetched + 2048) <= gpu.shared_memory


def splits_of(spec: ConvSpec, gpu: Device, tile: MmaWgrad) -> int:
    """Parts that the sum over pixels is best split into."""
    co, ci = spec.of_filters
    blocks = _blocks(co, ci, spec.taps, tile)
    steps = count_boxes(pixel_box(tile.block_m, *spec.pixels), *spec.pixels)
    return num_splits(blocks, steps, gpu.num_sms * tile.programs, fewest_of(spec))


def _work(spec: ConvSpec, gpu: Device, c: tuple) -> Work:
    co, ci = spec.of_filters
    box = pixel_box(c.block_m, *spec.pixels)
    steps = math.ceil(count_boxes(box, *spec.pixels) / c.splits)
    products, fetched = BLOCK * c.block_x * c.block_m, (BLOCK + c.block_x) * c.block_m * 4
    blocks = _blocks(co, ci, spec.taps, c)
    return wgrad_work(spec, c, blocks, steps, products, fetched, c.programs)


def launch_mma(tile: MmaWgrad, splits: int, operands: WgradOperands) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up."""
    x, dy, weight, _, padding, precision, partial, *_ = operands
    co, ci, r, s = weight.shape
    if is_pointwise(weight, padding):
        x, dy = as_one_row(x), as_one_row(dy)
    n, p, q, _ = dy.shape
    box = pixel_box(tile.block_m, n, p, q)
    conv_mma_wgrad_kernel[(_blocks(co, ci, r * s, tile), splits)](
        *(in_boxes(t, list(t.shape), [*box, BLOCK]) for t in (x, dy)), partial, ci, p, q, co,
        count_boxes(box, n, p, q),
        PRODUCTS=1 if precision == "tf32" else 3, TAPS=r * s, S=s, PAD_H=padding[0],
        PAD_W=padding[1], X_BLOCKS=tile.block_x // BLOCK, STAGES=tile.num_stages,
        AHEAD=tile.read_ahead, num_warps=4,
        maxnreg=thread_registers(tile.programs * _THREADS), **overlapping(x.device),
    )  # fmt: skip


def _blocks(co: int, ci: int, taps: int, tile: MmaWgrad) -> int:
    """Programs that a part takes."""
    columns = taps * math.ceil(ci / BLOCK)  # of blocks
    return math.ceil(co / BLOCK) * math.ceil(columns * BLOCK / tile.block_x)


WEIGHT_GRAD = split_kernel(MmaWgrad, _refuse, tiles, splits_of, launch_mma, work=_work)
