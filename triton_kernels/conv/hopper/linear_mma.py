"""1x1 filters and linear layers for Hopper, in Gluon: a matrix product [pixels, K] times [K, C] in
16 bits with its epilogue, for `conv.fused` and for `conv.forward`.

The product treats all pixels alike, so a tile has successive pixels of any images. If the epilogue
writes sums per image, or adds a vector per image, tiles divide an image or have several whole
images.
"""

from dataclasses import replace
from typing import NamedTuple

import triton
from torch import Tensor

from ...hopper.descriptors import LOADER_REGISTERS, SUPPORTED, TensorDescriptor, in_boxes
from ...registry.cost import Work, beside_rows, outside_rows
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import overlapping
from ...runtime.device import Device, describe
from ...runtime.hardware import BESIDE_BUFFERS
from ..configs import ConvOperands
from ..refusals import BITS_16, Only
from .operands import Operands

if SUPPORTED:
    from .linear_mma_kernel import conv_linear_mma_kernel


@configures("linear_mma")
class LinearMma(NamedTuple):
    """The tile of a program."""

    block_c: int  # channels of a tile
    block_m: int  # pixels
    together: bool  # both warpgroups compute a tile, half of its channels each; else in turn
    rows = 1  # tiles one below the other


TILES = (
    LinearMma(128, 128, False),
    LinearMma(192, 128, False),
    LinearMma(64, 256, False),
    LinearMma(128, 128, True),
    LinearMma(64, 128, False),
    LinearMma(128, 64, True),
)
ONLY = Only(hopper=True, tma=True, dtypes=BITS_16, filters=(1, 1))
_MOST_IMAGES = 4  # of a tile, each with sums of its own; with more, registers spill
_LEAST_SLOTS, _MOST_SLOTS = 3, 8  # of the ring
_PIECE = 64  # pixels, and channels, of the results that are stored at a time
_SUMS = 128  # accumulators of a thread: from so many on it needs the most registers


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why no tile can compute this, or None."""
    if reason := ONLY(spec, gpu):
        return reason
    if sorted(spec.of_filters) != sorted((spec.k, spec.c)):
        return f"tensors of {spec.k} and {spec.c} channels, filters of {spec.of_filters}"
    if spec.border:
        return "x is two tensors; its epilogue reads one"
    if not configs(spec, gpu):
        return f"images of {spec.h}x{spec.w} are not cut into tiles of equally many pixels"
    return None


def configs(spec: ConvSpec, gpu: Device) -> list[LinearMma]:
    """The tiles that can compute this."""
    by_image = spec.stats or spec.emb or spec.activation is not None
    beside = spec.residual or spec.activation is not None
    return [
        c
        for c in TILES
        if box_of(c, spec.h * spec.w, by_image) is not None
        and slots(c, gpu.shared_memory, beside) >= _LEAST_SLOTS
    ]


def box_of(config: LinearMma, pixels: int, by_image: bool) -> tuple[int, int] | None:
    """Pixels of each image of a tile, and its images; or None. `pixels`: of an image."""
    if not by_image or pixels % config.block_m == 0:
        return config.block_m, 1
    images = config.block_m // pixels
    return (
        (pixels, images) if images * pixels == config.block_m and images <= _MOST_IMAGES else None
    )


def _launch_plain(config: LinearMma, operands: ConvOperands) -> None:
    """The convolution with a bias only, or its input gradient without terms."""
    x, weight, bias, y, _, _, _, dgrad, *_ = operands
    _launch(config, Operands(x, weight, y, bias, None), dgrad)


def _launch(config: LinearMma, operands: Operands, plain_grad: bool = False) -> None:
    """The convolution and its terms, or its input gradient, with one of `configs`."""
    x, weight, y, partials = operands.x, operands.weight, operands.y, operands.partials
    activation = operands.activation_name
    by_image = not (activation is partials is operands.emb is None)
    beside = operands.beside[0] if operands.beside else None
    n, h, w, k = x.shape
    c = y.shape[3]
    n, pixels = (n, h * w) if by_image else (1, n * h * w)
    rows, images = box_of(config, pixels, by_image)
    device = describe(x.device)
    tiles = -(-pixels // rows) * -(-n // images) * -(-c // config.block_c)
    assert partials is None or partials.shape[1] == pixels // rows

    def in_rows(t: Tensor, rows: int) -> TensorDescriptor:
        channels, box = t.shape[3], [rows, images, 64]
        return in_boxes(t, [pixels, n, channels], box, [channels, pixels * channels, 1])

    most, at_first = registers(config, images)
    count = blocks_of_a_group(config)
    overlap = overlapping(x.device, 0)
    co, ci = weight.shape[:2]
    conv_linear_mma_kernel[(min(tiles, device.num_sms),)](
        in_rows(x, rows), in_boxes(weight, [co, ci], [64, 64]),
        in_rows(y, _PIECE // images), None if beside is None else in_rows(beside, _PIECE // images),
        operands.vectors, operands.extra_bias, operands.emb, partials, operands.emb_stride,
        operands.factor, n, pixels, k, c,
        ROWS=rows, IMAGES=images, COUNT=count, TOGETHER=config.together,
        TRANSPOSED=plain_grad or activation is not None, GRAD=activation is not None,
        ACT=activation,
        SLOTS=slots(config, device.shared_memory, beside is not None),
        HELD=held(config, beside is not None), REGISTERS=most, RAGGED=c % (64 * count) > 0,
        OVERLAP=bool(overlap), num_warps=4, maxnreg=at_first, **overlap,
    )  # fmt: skip


def blocks_of_a_group(config: LinearMma) -> int:
    """Blocks of 64 channels of a warpgroup."""
    return config.block_c // (128 if config.together else 64)


def registers(config: LinearMma, images: int) -> tuple[int, int]:
    """Registers per thread of the warpgroups that multiply; and of every thread at the launch,
    which is the mean with those of the warpgroup that loads. Multiples of 24, as in `tile_mma`."""
    sums = blocks_of_a_group(config) * config.block_m // 2
    most = 240 if sums >= _SUMS or images > 2 else 168
    return most, (2 * most + LOADER_REGISTERS) // 3


def held(config: LinearMma, beside: bool) -> int:
    """Pieces of results of a warpgroup in shared memory: two, one of which is stored while the next
    is written; or all, if the epilogue reads a tensor, which is loaded there."""
    pieces = blocks_of_a_group(config) * config.block_m // _PIECE
    return pieces if beside else min(2, pieces)


def slots(config: LinearMma, shared_memory: int, beside: bool) -> int:
    """Slots for blocks of pixels and filters that fit shared memory with the results."""
    results = 2 * held(config, beside) * _PIECE * 128
    block = (config.block_m + config.block_c) * 128
    return min(_MOST_SLOTS, (shared_memory - BESIDE_BUFFERS - results) // block)


def work(spec: ConvSpec, gpu: Device, c: LinearMma) -> Work:
    """The work of its programs."""
    by_image = spec.stats or spec.emb or spec.activation is not None
    n, pixels = (spec.n, spec.h * spec.w) if by_image else (1, spec.n * spec.h * spec.w)
    rows, images = box_of(c, pixels, by_image)
    blocks, columns = triton.cdiv(spec.k, 64), triton.cdiv(spec.c, c.block_c)
    beyond = 1 - spec.c / (c.block_c * columns)
    sides = c.block_m, c.block_c
    return Work(
        tiles=triton.cdiv(pixels, rows) * triton.cdiv(n, images) * columns,
        resident=1 if c.together else 2,
        products=c.block_c * c.block_m * 64 * blocks,
        fetched=128 * sum(sides) * blocks,
        steps=blocks,
        written=c.block_c * c.block_m,
        memory=spec.bytes,
        grad=spec.activation is not None,
        beside=sum(sides) * beside_rows(spec.k, 64, spec.itemsize),
        outside=outside_rows(spec.k, 64, *sides, beyond),
    )


FUSED = Kernel(
    "linear_mma",
    LinearMma,
    refuse,
    configs,
    launch=_launch,
    adds=("emb", "residual", "factor", "stats", "activation"),
    work=work,
    fitted_by=("block_c", "block_m", "together"),
)
PLAIN = replace(FUSED, launch=_launch_plain, adds=())
