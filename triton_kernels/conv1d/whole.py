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
from typing import NamedTuple

import triton
from torch import Tensor

from ..hopper.descriptors import SUPPORTED, in_boxes, missing
from ..registry.cost import fitted_to
from ..registry.kernel import Kernel, configures
from ..runtime.device import Device
from ..runtime.hardware import BESIDE_BUFFERS
from .stage_spec import StageSpec

if SUPPORTED:
    from .whole_kernel import conv1d_whole_kernel

_ROWS = 64  # channels out of a program: the height of `wgmma`
_MOST_POSITIONS = 256  # its width


class _Rates(NamedTuple):
    """What `_microseconds` knows of a chip, in nanoseconds: of an H200 it was fitted to 143 cuts of
    layers of 8 and of 64 samples."""

    bytes: float  # a nanosecond, that a multiprocessor fetches
    all_bytes: float  # that all do
    sums: float  # written or read
    products: float  # in 16 bits; half as many of 32 bits, in blocks of half as many
    split_columns: float  # of a product that take as long as to split its weights
    wave: float  # until the first bytes are there, and behind the last
    latency: float  # of a block that is fetched once a slot is free


@configures("whole")
class Cut(NamedTuple):
    """What a program does."""

    samples: int  # a multiple of 8
    times: int
    blocks: int  # of channels in
    slots: int  # blocks in shared memory at once


def refuse(spec: StageSpec, gpu: Device) -> str | None:
    """Why it cannot do a convolution."""
    if reason := missing(gpu):
        return reason
    if not spec.batched or not spec.by_tap:
        return "it reads an activation of an earlier launch, and weights tap by tap"
    if spec.stride not in (1, 2) or spec.itemsize > 4:
        return f"its stride is {spec.stride}, and numbers have {8 * spec.itemsize} bits"
    rows = 2 * _ROWS if spec.transposed else _ROWS
    if spec.rows % rows or spec.channels % 64:
        return f"{spec.rows} rows are no multiple of {rows}, or {spec.channels} channels of 64"
    return None


def _configs(spec: StageSpec, gpu: Device) -> list[Cut]:
    # half of them beside a 1x1 skip, whose sums are in registers too
    most = _MOST_POSITIONS // 2 if spec.side else _MOST_POSITIONS
    return [
        Cut(samples, times, blocks, slots)
        for samples, times, blocks, slots in itertools.product(
            [8 << i for i in range(4) if i == 0 or 8 << (i - 1) < spec.n],
            [1 << i for i in range(7) if i == 0 or 1 << (i - 1) < spec.positions],
            [1, 2, 4, 8, 16],
            [1, 2, 3, 4, 8],
        )
        if 16 <= samples * times <= most
        and (slots == blocks or 2 <= slots < blocks)
        and spec.channels % (blocks * spec.width) == 0
        and _shared(spec, samples, times, slots) <= gpu.shared_memory - BESIDE_BUFFERS
    ]


def splits(shape: StageSpec, c: Cut) -> int:
    """Into how many sums the channels in are cut."""
    return shape.channels // (c.blocks * shape.width)


def _shared(shape: StageSpec, samples: int, times: int, slots: int) -> int:
    rows = shape.tiles * _ROWS + shape.parts * shape.fetched(times) * samples
    return 128 * slots * rows


def _microseconds(shape: StageSpec, device: Device, c: Cut) -> float:
    """What it takes, about: to fetch and to multiply, half of which is beside the other, and to
    write and read the sums. The first weights are there before the wait. What is fetched into a
    slot that was used is waited for, unless the other slots hold enough to multiply."""
    parts = triton.cdiv(shape.n, c.samples) * triton.cdiv(shape.positions, c.times)
    programs = shape.rows // _ROWS * parts * splits(shape, c)
    shared = _shared(shape, c.samples, c.times, c.slots) + BESIDE_BUFFERS
    at_once = (device.shared_memory + BESIDE_BUFFERS) // shared
    waves = triton.cdiv(programs, at_once * device.num_sms)
    each = min(at_once, triton.cdiv(programs, device.num_sms))

    rates = fitted_to("whole", _Rates)
    rate = min(rates.bytes, rates.all_bytes / min(programs, device.num_sms)) / each
    weights = 128 * shape.tiles * _ROWS / rate
    samples = 128 * shape.parts * min(shape.t, shape.fetched(c.times)) * c.samples / rate
    columns = max(64, c.samples * c.times)
    if shape.split:
        columns = 3 * (columns + rates.split_columns)
    products = shape.tiles * _ROWS * 64 * columns * each / rates.products
    block = max(products, samples) + min(products, samples) / 2
    refilled = max(block, (rates.latency + weights + samples + block) / c.slots)
    blocks = c.slots * block + (c.blocks - c.slots) * refilled
    sums = 2 * splits(shape, c) * shape.n * shape.positions * shape.rows * (1 + shape.side)
    return 1e-3 * (waves * (rates.wave + blocks) + sums / rates.sums)


KERNEL = Kernel("whole", Cut, refuse, _configs, _microseconds)


def launch(
    a: Tensor,  # [N, T, C]; split: [N, T, 2C], what is left of each number behind all of them
    weight: Tensor,  # [taps and skip, R, C]
    partial: Tensor,  # float32 [splits, N, TO, CO], to be written
    side: Tensor | None,  # float32 [splits, N, T, CO], to be written
    shape: StageSpec,
    c: Cut,
    *,
    overlap: bool,
) -> None:
    """The partial sums of a convolution."""
    n, t, channels = a.shape
    fetched = shape.fetched(c.times)
    together = min(8, fetched & -fetched) if shape.stride == 1 else 1
    parts = triton.cdiv(n, c.samples) * triton.cdiv(shape.positions, c.times)
    row = 128 // a.itemsize  # channels of a box
    conv1d_whole_kernel[(shape.rows // _ROWS, parts, splits(shape, c))](
        in_boxes(
            a, [t, n, channels], [together, c.samples, row], [channels, t * channels, 1]
        ),
        in_boxes(weight, list(weight.shape), [1, _ROWS, row]), partial, side, n,
        C=shape.channels, T=t, CO=partial.shape[3], TAPS=shape.taps, STRIDE=shape.stride,
        TRANSPOSED=shape.transposed, SPLIT=shape.split, SAMPLES=c.samples, TT=c.times,
        BLOCKS=c.blocks, SLOTS=c.slots, TOGETHER=together, PDL=overlap, num_warps=4,
        **{"launch_pdl": True} if overlap else {},
    )  # fmt: skip
