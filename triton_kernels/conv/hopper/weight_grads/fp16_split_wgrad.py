"""Weight gradient of `conv2d` in float32 or TF32, by products of float16 numbers
(`conv.plain.fp16_split`).

    dweight[co, r, s, ci] = sum_{n, h, w} dy[n, h, w, co] x[n, h + r - 1, w + s - 1, ci]

In 16 bits wgmma takes its operands with either index innermost, so nothing has to be transposed,
and it has twice its rate in TF32, four times that of mma.sync. TF32 is one such product. float32 is
three: small x big + big x small + big x big.

3x3 filters over rows of 8, 16, 32 or 64 pixels, on Hopper.
"""

import math
from typing import NamedTuple

import triton

from ....hopper.descriptors import SUPPORTED
from ....reductions.column_sum import num_splits
from ....registry.cost import Work
from ....registry.kernel import configures
from ....registry.spec import ConvSpec
from ....runtime.dependent_launch import following
from ....runtime.device import Device
from ...configs import WgradOperands, fewest_of, split_kernel, wgrad_work
from ...plain.fp16_split import in_halves
from ...refusals import BITS_32, Only, odd_rows
from ..operands import in_rows
from .row_wgrad import WIDTHS, images_of_row

if SUPPORTED:
    from .fp16_split_wgrad_kernel import conv_fp16_split_wgrad_kernel

_ONLY = Only(hopper=True, tma=True, dtypes=BITS_32, filters=(3, 3), multiple=64, widths=WIDTHS)
_PIXELS = 128  # of a tile
_MOST_NUMBERS = 2**31 - 2**22  # offsets are of 32 bits, one step of `halves` further too


@configures("fp16_split_wgrad")
class Fp16SplitWgrad(NamedTuple):
    """There is one tile, of 64x64 channels and three taps."""

    block_m = _PIXELS  # a step


TILE = Fp16SplitWgrad()


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do a weight gradient, or None."""
    if reason := _ONLY(spec, gpu) or odd_rows(spec, _rows(spec.w)):
        return reason
    if spec.n * spec.h * spec.w * max(spec.k, spec.c) >= _MOST_NUMBERS:
        return "offsets would need more than 32 bits"
    return None


def _splits(spec: ConvSpec, gpu: Device, tile: Fp16SplitWgrad) -> int:
    co, ci = spec.of_filters
    steps = _num_tiles(spec.n, spec.h, spec.w)
    fewest = fewest_of(spec, steps * _PIXELS)
    return num_splits(co * ci // 64**2, steps, gpu.num_sms, fewest)


def _work(spec: ConvSpec, gpu: Device, c: tuple) -> Work:
    """What its programs do; before them two launches read the numbers twice, and write them as
    float16 numbers, of which there are two of each in float32."""
    co, ci = spec.of_filters
    steps = triton.cdiv(_num_tiles(spec.n, spec.h, spec.w), c.splits)
    halves = 2 if spec.precision == "ieee" else 1
    numbers = math.prod(spec.pixels) * (spec.k + spec.c)
    products, fetched = 64 * 64 * 9 * _PIXELS, 2 * halves * (64 * 4 * _PIXELS)
    work = wgrad_work(spec, c, co * ci // 64**2, steps, products, fetched, resident=1)
    return work._replace(memory=numbers * (8 + 2 * 2 * halves))


def launch_split(tile: Fp16SplitWgrad, splits: int, operands: WgradOperands) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up."""
    x, dy, weight, _, _, precision, partial, *_ = operands
    co, ci, _, _ = weight.shape
    n, h, w, _ = x.shape
    parts = 1 if precision == "tf32" else 2
    x_parts, dy_parts, factors = in_halves(x, dy, parts)
    images, rows = images_of_row(w), _rows(w)
    absent = [None] * (2 - parts)
    conv_fp16_split_wgrad_kernel[(co * ci // 64**2 * splits,)](
        *(in_rows(part, 1, images) for part in x_parts), *absent,
        *(in_rows(part, rows, images) for part in dy_parts), *absent, partial, factors, ci, co,
        _num_tiles(n, h, w), h // rows,
        W=w * images, IMAGES=images, STAGES=4 // parts, num_warps=4, maxnreg=128,
        **following(x.device),
    )  # fmt: skip


def _rows(w: int) -> int:
    """Of a tile."""
    return _PIXELS // (w * images_of_row(w))


def _num_tiles(n: int, h: int, w: int) -> int:
    return triton.cdiv(n, images_of_row(w)) * (h // _rows(w))


WEIGHT_GRAD = split_kernel(
    Fp16SplitWgrad, refuse, lambda spec, gpu: [TILE], _splits, launch_split, work=_work
)
