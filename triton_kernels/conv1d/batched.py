"""Convolutions over short sequences for Hopper, in Gluon: a program fetches every weight and every
activation once, as many at a time as shared memory holds.

In `conv1d_multiply_kernel` a tap fetches the activations again, and what a multiprocessor can
fetch from L2 is the bound. Here taps are views of what is there. A program has 64 channels out, as
many positions as make a product and some of the channels in (`Cut`); their sums are added by the
next launch.

float32 is three products of TF32, as in `tf32`: the activations come as two halves, the weights are
split on their way to the tensor cores.

Used for channels that divide by 64, with versions of Triton that it was tried with.
"""

import itertools
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..hopper.descriptors import SUPPORTED
from ..runtime.device import Device, describe, on_gpu

if SUPPORTED:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .batched_kernels import conv1d_whole_kernel

_ROWS = 64  # channels out of a program: the height of `wgmma`
_MOST_POSITIONS = 256  # its width
_RESERVED = 1024  # bytes of shared memory that a program has besides what it asks for
_SIDE_POSITIONS = 128  # beside a 1x1 skip, whose sums are in registers too
# What `_nanoseconds` thinks of an H200, fitted to 143 cuts of layers of 8 and of 64 samples
_BYTES_PER_NS = 88.0  # that a multiprocessor fetches
_ALL_BYTES_PER_NS = 6300.0  # that all do
_SUMS_PER_NS = 490.0  # written or read
_PRODUCTS_PER_NS = 2200.0  # in 16 bits; half as many of 32 bits, in blocks of half as many
_SPLIT_COLUMNS = 64  # of a product that take as long as to split its weights
_WAVE_NS = 1300.0  # until the first bytes are there, and behind the last
_LATENCY_NS = 150.0  # of a block that is fetched once a slot is free


class Shape(NamedTuple):
    """Of a convolution; a transposed one, of stride 2, is two that keep the length."""

    rows: int  # channels out; transposed: twice
    channels: int  # in
    taps: int
    side: bool
    stride: int
    transposed: bool
    itemsize: int
    split: bool  # float32 as three products

    @property
    def parts(self) -> int:
        """Into which an activation is split."""
        return 2 if self.split else 1

    @property
    def width(self) -> int:
        """Channels of a block, whose rows are 128 bytes."""
        return 128 // self.itemsize

    @property
    def tiles(self) -> int:
        return self.taps + self.side

    def positions(self, t: int) -> int:
        """Of a result of t times; transposed: of either of the two."""
        return (t - 1) // self.stride + 1

    def fetched(self, times: int) -> int:
        """Times that so many of the result are made of."""
        return times + 2 if self.transposed else (times - 1) * self.stride + self.taps


class Cut(NamedTuple):
    """What a program does."""

    samples: int  # a multiple of 8
    times: int
    blocks: int  # of channels in
    slots: int  # blocks in shared memory at once


def takes(
    weight: Tensor,  # [taps and skip, R, C]
    stride: int,
    transposed: bool,
) -> bool:
    """Whether `launch` can do a convolution."""
    _, rows, channels = weight.shape
    return (
        SUPPORTED
        and on_gpu(weight.device)
        and describe(weight.device).hopper
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and stride in (1, 2)
        and rows % (2 * _ROWS if transposed else _ROWS) == 0
        and channels % 64 == 0
    )


@lru_cache
def cut(shape: Shape, n: int, t: int, device: Device) -> Cut | None:
    """The cut that should be quickest for n samples of length t; None if none fits."""
    most = _SIDE_POSITIONS if shape.side else _MOST_POSITIONS
    cuts = [
        Cut(samples, times, blocks, slots)
        for samples, times, blocks, slots in itertools.product(
            [8 << i for i in range(4) if i == 0 or 8 << (i - 1) < n],
            [1 << i for i in range(7) if i == 0 or 1 << (i - 1) < shape.positions(t)],
            [1, 2, 4, 8, 16],
            [1, 2, 3, 4, 8],
        )
        if 16 <= samples * times <= most
        and (slots == blocks or 2 <= slots < blocks)
        and shape.channels % (blocks * shape.width) == 0
        and _shared(shape, samples, times, slots) <= device.shared_memory - _RESERVED
    ]
    return min(cuts, key=lambda c: _nanoseconds(shape, c, n, t, device), default=None)


def splits(shape: Shape, c: Cut) -> int:
    """Into how many sums the channels in are cut."""
    return shape.channels // (c.blocks * shape.width)


def _shared(shape: Shape, samples: int, times: int, slots: int) -> int:
    rows = shape.tiles * _ROWS + shape.parts * shape.fetched(times) * samples
    return 128 * slots * rows


def _nanoseconds(shape: Shape, c: Cut, n: int, t: int, device: Device) -> float:
    """What it takes, about: to fetch and to multiply, half of which is beside the other, and to
    write and read the sums. The first weights are there before the wait. What is fetched into a
    slot that was used is waited for, unless the other slots hold enough to multiply."""
    parts = triton.cdiv(n, c.samples) * triton.cdiv(shape.positions(t), c.times)
    programs = shape.rows // _ROWS * parts * splits(shape, c)
    shared = _shared(shape, c.samples, c.times, c.slots) + _RESERVED
    at_once = (device.shared_memory + _RESERVED) // shared
    waves = triton.cdiv(programs, at_once * device.num_sms)
    each = min(at_once, triton.cdiv(programs, device.num_sms))

    rate = min(_BYTES_PER_NS, _ALL_BYTES_PER_NS / min(programs, device.num_sms)) / each
    weights = 128 * shape.tiles * _ROWS / rate
    samples = 128 * shape.parts * min(t, shape.fetched(c.times)) * c.samples / rate
    columns = max(64, c.samples * c.times)
    if shape.split:
        columns = 3 * (columns + _SPLIT_COLUMNS)
    products = shape.tiles * _ROWS * 64 * columns * each / _PRODUCTS_PER_NS
    block = max(products, samples) + min(products, samples) / 2
    refilled = max(block, (_LATENCY_NS + weights + samples + block) / c.slots)
    blocks = c.slots * block + (c.blocks - c.slots) * refilled
    sums = 2 * splits(shape, c) * n * shape.positions(t) * shape.rows * (1 + shape.side)
    return waves * (_WAVE_NS + blocks) + sums / _SUMS_PER_NS


def launch(
    a: Tensor,  # [N, T, C]; split: [N, T, 2C], what is left of each number behind all of them
    weight: Tensor,  # [taps and skip, R, C]
    partial: Tensor,  # float32 [splits, N, TO, CO], to be written
    side: Tensor | None,  # float32 [splits, N, T, CO], to be written
    shape: Shape,
    c: Cut,
    *,
    overlap: bool,
) -> None:
    """The partial sums of a convolution."""
    n, t, channels = a.shape
    fetched = shape.fetched(c.times)
    together = min(8, fetched & -fetched) if shape.stride == 1 else 1
    parts = triton.cdiv(n, c.samples) * triton.cdiv(shape.positions(t), c.times)
    weight_strides = [shape.rows * shape.channels, shape.channels, 1]  # of one tap PyTorch has any
    conv1d_whole_kernel[(shape.rows // _ROWS, parts, splits(shape, c))](
        _in_boxes(a, [t, n, channels], [channels, t * channels, 1], [together, c.samples]),
        _in_boxes(weight, list(weight.shape), weight_strides, [1, _ROWS]),
        partial,
        side,
        n,
        C=shape.channels,
        T=t,
        CO=partial.shape[3],
        TAPS=shape.taps,
        STRIDE=shape.stride,
        TRANSPOSED=shape.transposed,
        SPLIT=shape.split,
        SAMPLES=c.samples,
        TT=c.times,
        BLOCKS=c.blocks,
        SLOTS=c.slots,
        TOGETHER=together,
        PDL=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )


def _in_boxes(
    x: Tensor, shape: list[int], strides: list[int], box: list[int]
) -> "TensorDescriptor":
    """x seen in this shape, in boxes of 128 bytes of channels."""
    layout = gl.NVMMASharedLayout(128, 8 * x.itemsize, rank=3)
    return TensorDescriptor(x, shape, strides, [*box, 128 // x.itemsize], layout)
