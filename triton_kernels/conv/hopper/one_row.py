"""3x3 convolutions of few images for Hopper, written in Gluon: a program has 64 channels of a row
of pixels, and its whole sum.

At batch 1 what counts is how long a program waits. Here it asks for its filters before the launch
in front has ended, and for its pixels all at once behind it, by TMA, so that no thread moves what
it multiplies. Since no sum is in parts, nobody has to add them. How, stands in `one_row_kernels`.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ...hopper.descriptors import SUPPORTED, TensorDescriptor, in_boxes
from ...registry.cost import Work
from ...registry.kernel import Kernel, configures
from ...registry.spec import FORWARD_TERMS, WHOLE_PIXELS, ConvSpec
from ...runtime.dependent_launch import overlapping
from ...runtime.device import Device, describe
from ...runtime.hardware import BESIDE_BUFFERS
from ..plain.parts import SplitOperands
from ..refusals import BITS_16, Only
from .operands import Operands, filters_in_boxes

if SUPPORTED:
    from .one_row_kernels import conv_one_row_kernel


@configures("one_row")
class RowParts(NamedTuple):
    """Of `PARTS`: a program has a part of the sum."""

    parts: int


_ONLY = Only(hopper=True, dtypes=BITS_16, filters=(3, 3), multiple=64, widths=(16, 32, 64))
_FILTERS = 3 * 64 * 128  # bytes of a unit


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Every program has to find a multiprocessor, and at least half of what a program multiplies
    room at once."""
    if reason := _ONLY(spec, gpu):
        return reason
    if not 0 < _programs(spec) <= gpu.num_sms:
        return f"{_programs(spec)} programs for {gpu.num_sms} multiprocessors"
    units = -(-3 * spec.k // 64 // count_parts(spec, gpu)) + sum(spec.extra) // 64
    held = _held(spec, gpu)
    return f"{units} units of a sum; it holds {held} at once" if units > 2 * held else None


def count_parts(spec: ConvSpec, gpu: Device) -> int:
    """Into how many parts the sum should be cut: two if a program holds half of its units at once
    but hardly more, and twice as many programs find room; of images that the norm behind it reads
    whole."""
    held, units = _held(spec, gpu), 3 * spec.k // 64
    small = spec.h * spec.w <= WHOLE_PIXELS
    room = 2 * _programs(spec) <= gpu.num_sms
    return 2 if small and room and held + 2 < units <= 2 * held else 1


def _held(spec: ConvSpec, gpu: Device) -> int:
    """Units of a sum of any length that a program holds at once."""
    return _room(spec.w, gpu.shared_memory)


def _programs(spec: ConvSpec) -> int:
    return spec.n * spec.h * (spec.c // 64)


def _refuse_parts(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := refuse(spec, gpu):
        return reason
    return None if count_parts(spec, gpu) > 1 else "a program holds its whole sum"


def _work(spec: ConvSpec, gpu: Device, config: tuple) -> Work:
    """What its programs do."""
    parts = config.parts if isinstance(config, RowParts) else 1
    pixels = spec.w
    terms = 9 * spec.k // parts + sum(spec.extra)
    return Work(
        tiles=_programs(spec) * parts,
        resident=1,
        products=64 * pixels * terms,
        fetched=(64 + pixels) * terms * spec.itemsize,
        steps=terms // 192,
        written=64 * pixels,
        memory=spec.bytes,
        parts=4 * parts * spec.n * spec.h * spec.w * spec.c if parts > 1 else 0,
        splits=parts,
    )


def _launch_whole(_: tuple, operands: Operands) -> None:
    """The whole convolution. No kernel may write filters and biases while earlier ones of the
    stream are under way: they are read ahead."""
    w = operands.x.shape[2]
    read, written = (partial(_in_rows, pixels=pixels) for pixels in (2 * w, w))
    x_desc, filters, residual_desc, _, *rest = operands.tensors(read, written)
    numbers = operands.emb_stride, operands.factor
    terms = (x_desc, filters, residual_desc, *rest, None, *numbers)
    _launch(operands.x, operands.weight, terms, operands.extra_channels, 1)


def _launch_parts(config: RowParts, operands: SplitOperands) -> Tensor:
    """The parts of the convolution."""
    x, weight, out = operands.x, operands.weight, operands.parts(config.parts)
    wide = _in_rows(x, 2 * x.shape[2])
    terms = (wide, filters_in_boxes(weight), *[None] * 10, out, 0, None)
    _launch(x, weight, terms, [0, 0], config.parts)
    return out


def _launch(
    x: Tensor, weight: Tensor, terms: Sequence[object], extra: Sequence[int], count: int
) -> None:
    n, h, w, ci = x.shape
    co = weight.shape[0]
    blocks = [c // 64 for c in (ci, *extra)]
    conv_one_row_kernel[(n * h * (co // 64), count)](
        *terms, n, co,
        H=h, W=w, BLOCKS=blocks[0], BLOCKS1=blocks[1], BLOCKS2=blocks[2], PARTS=count,
        SLOTS=slots(blocks, w, count, describe(x.device).shared_memory),
        num_warps=4, **overlapping(x.device, n * h * w),
    )  # fmt: skip


def slots(blocks: Sequence[int], pixels: int, count: int, shared_memory: int) -> int:
    """Units that find room beside the result, of a convolution of so many blocks in so many
    parts."""
    return min(_room(pixels, shared_memory), -(-3 * blocks[0] // count) + sum(blocks[1:]))


def _room(pixels: int, shared_memory: int) -> int:
    """The same, of a sum of any length."""
    return (shared_memory - BESIDE_BUFFERS - pixels * 128) // (_FILTERS + 2 * pixels * 128)


def _in_rows(x: Tensor, pixels: int) -> TensorDescriptor:
    return in_boxes(x, list(x.shape), [1, 1, pixels, 64])


WHOLE = Kernel("one_row", refuse=refuse, launch=_launch_whole, work=_work, adds=FORWARD_TERMS)
PARTS = Kernel(
    "one_row",
    RowParts,
    _refuse_parts,
    lambda spec, gpu: [RowParts(count_parts(spec, gpu))],
    launch=_launch_parts,
    work=_work,
)
