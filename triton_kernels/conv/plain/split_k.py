"""`conv_split` by TMA: the kernel of `conv.plain.fused_kernels`, each program a part of the sum.

With stride 2, x is read by parity (`conv.plain.products`), and there are no 1x1 convolutions of
other tensors. In float32 each product is three of TF32; the kernel splits the numbers in registers,
since copies would need two more launches.
"""

import math
from dataclasses import replace

import triton
from torch import Tensor

from ...registry.cost import HOPPER, Work, microseconds, name, parameters
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import overlapping
from ...runtime.device import Device
from .by_tma.tma_boxes import (
    by_parity,
    count_boxes,
    pixel_box,
    pixels_in_boxes,
    tile_sizes,
    weight_in_boxes,
)
from .fused_kernels import conv_forward_kernel
from .fused_launch import columns_in_boxes
from .parts import PartsTile, SplitOperands, count_steps, cut, part_bytes, refuse_boxes


@configures("split_k")
class SplitConfig(PartsTile):
    """Of `conv_forward_kernel`."""

    __slots__ = ()


# Tiles with both operands of wgmma in shared memory, and few pixels, since the images are small.
# The third number is the bytes of a box's row, not channels.
_TILES = [
    (64, 64, 128, 4, 4),
    (128, 64, 128, 4, 4),
    (64, 64, 256, 4, 3),
    (64, 128, 128, 4, 4),
    (64, 32, 128, 4, 5),
    (128, 16, 128, 4, 5),
    (64, 16, 128, 4, 6),
    (64, 64, 64, 4, 4),  # few input channels
]
_SUMS = 4096  # accumulators of a tile in "ieee", of each of which a thread has three
_TIMES = {"tf32": 2, "fp32": 6}  # time of a product relative to one of 16 bits
_FITTED_BY = ("block_c", "block_m", "block_k")


def _launch(config: SplitConfig, operands: SplitOperands) -> Tensor:
    """The parts."""
    x, weight, extra, spec = operands
    n, (p, q) = spec.n, spec.size
    co, ci, r, s = weight.shape
    parts = operands.parts(config.parts)
    box, precision = pixel_box(config.block_m, n, p, q), spec.precision
    pairs = []
    for other, w1x1 in extra:
        filters = columns_in_boxes(w1x1, [config.block_c, config.block_k], precision == "ieee")
        pairs += [pixels_in_boxes(other, box, config.block_k), filters]
    steps = triton.cdiv(count_steps(config.block_k, spec), config.parts)
    conv_forward_kernel[(programs(spec, config.block_c, config.block_m), config.parts)](
        pixels_in_boxes(by_parity(x) if spec.stride == 2 else x, box, config.block_k),
        weight_in_boxes(weight, config.block_c, config.block_k), *[None] * 5, parts,
        None, *pairs, *[None] * (4 - len(pairs)), None, None, None,
        *spec.extra, *[0] * (2 - len(extra)), 0, steps, None, n, ci, p, q, co,
        R=r, S=s, PAD_H=spec.pads[0], PAD_W=spec.pads[1], STRIDE=spec.stride, DGRAD=False,
        TURNED=False, PRECISION=precision, ROWS=1, RAGGED=False, TF32=False,
        **tile_sizes(box, config), **overlapping(x.device, n * p * q),
    )  # fmt: skip
    return parts


def tiles(spec: ConvSpec, gpu: Device) -> list[tuple[int, ...]]:
    """The tiles that fit. A tile of more than 64 pixels has pixels of one image only: with pixels
    of two images the largest tile takes four times as long."""
    rows = (128, 256) if spec.k * spec.itemsize > 64 else (64,)

    def fits(block_c: int, block_m: int, row: int, _: int, stages: int) -> bool:
        whole = block_m <= max(math.prod(spec.size), 64)
        if spec.stride == 2 and spec.k % (row // spec.itemsize):
            return False  # a block of channels would include channels of the other parity
        if spec.precision == "ieee" and (block_c * block_m > _SUMS or row > 128):
            return False
        fetched = stages * (block_c + block_m) * row
        return row in rows and whole and gpu.holds(fetched) > 0

    return [
        (block_c, block_m, row // spec.itemsize, *rest)
        for block_c, block_m, row, *rest in _TILES
        if fits(block_c, block_m, row, *rest)
    ]


def _configs(spec: ConvSpec, gpu: Device) -> list[SplitConfig]:
    found = cut(tiles(spec, gpu), spec, gpu, lambda tile: programs(spec, *tile[:2]))
    return list(dict.fromkeys(SplitConfig(*c) for c in found))


def programs(spec: ConvSpec, block_c: int, block_m: int) -> int:
    """Programs per part."""
    images = spec.n, *spec.size
    return count_boxes(pixel_box(block_m, *images), *images) * triton.cdiv(spec.c, block_c)


def _work(spec: ConvSpec, gpu: Device, c: SplitConfig) -> Work:
    """The work of its programs, and the reading of the parts by the launch that follows."""
    steps = triton.cdiv(count_steps(c.block_k, spec), c.parts)
    fetched = (c.block_c + c.block_m) * c.block_k * spec.itemsize  # in a step
    return Work(
        tiles=programs(spec, c.block_c, c.block_m) * c.parts,
        resident=max(min(gpu.holds(c.num_stages * fetched), 4), 1),
        products=c.block_c * c.block_m * c.block_k * steps,
        fetched=fetched * steps,
        steps=steps,
        written=c.block_c * c.block_m,
        memory=spec.bytes,
        parts=part_bytes(c.parts, spec),
        splits=c.parts,
    )


def _cost(spec: ConvSpec, gpu: Device, c: SplitConfig) -> float | None:
    """Microseconds for types without fitted parameters: by those of 16 bits, with boxes of as many
    bytes, and products that take longer."""
    like, scale = replace(spec, dtype="bf16"), spec.itemsize // 2
    tile = c._replace(block_k=scale * c.block_k)
    fitted = parameters(HOPPER).get(name("split_k", _FITTED_BY, like, tile))
    if fitted is None or spec.itemsize == 2:
        return None
    work = _work(spec, gpu, c)
    return microseconds(fitted, work._replace(products=_TIMES[spec.dtype] * work.products), gpu)


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := refuse_boxes(spec, gpu):
        return reason
    return None if tiles(spec, gpu) else "no tile fits into shared memory, or a parity"


KERNEL = Kernel(
    "split_k",
    SplitConfig,
    _refuse,
    _configs,
    _cost,
    _launch,
    _work,
    _FITTED_BY,
    borrows=HOPPER,
    adds=("extra",),
)
