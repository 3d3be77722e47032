"""Weight gradient of a 1x1 filter in float32, by products whose operands pass through registers.

    dweight[co, ci] = sum_m dy[m, co] x[m, ci]

wgmma wants its float32 operands with the pixels innermost, and a layer of few pixels has no time
to copy them. The older mma.sync takes its operands from
registers, in whatever order they come. Triton uses it where a program has no four warps or its tile
fewer than 64 rows, so the tiles here are small, and several programs share a multiprocessor.

In TF32 that is one product, in float32 three (`triton_kernels.tf32`), added up for each step before
they get to the sum, since tensor cores round every addition towards zero.
"""

import math

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...reductions.column_sum import num_splits
from ...registry.cost import Work, of_products, programs_at_a_time
from ...registry.kernel import configures
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import await_inputs, overlapping
from ...runtime.device import Device
from ...tf32 import dot_of_split, round_to_tf32
from ..configs import WgradOperands, WgradTile, fewest_of, split_kernel, wgrad_work
from ..refusals import Only, refuse_wide_float32

_FEW = 64  # pixels
_MANY = 256  # with more others are faster, `mma_wgrad` in TF32


@configures("pointwise_wgrad")
class PointwiseWgrad(WgradTile):
    """What one program computes."""

    __slots__ = ()


TILES = [  # for few, some and many pixels
    PointwiseWgrad(32, 32, 32, 4, 3),
    PointwiseWgrad(32, 32, 128, 4, 2),
    PointwiseWgrad(32, 128, 64, 4, 3),
]


@triton.jit(do_not_specialize=["M", "pixels_per_split"])
def _pointwise_wgrad_kernel(
    a_desc,  # float32 [M, A] in boxes [BLOCK_M, BLOCK_A]: dy, or x
    b_desc,  # float32 [M, B] in boxes [BLOCK_M, BLOCK_B]: x, or dy
    out_ptr,  # [splits, CO, CI]
    M,
    A,
    B,
    stride_a,  # in the result: CI, or 1
    stride_b,
    pixels_per_split,  # a multiple of BLOCK_M
    PRODUCTS: tl.constexpr,  # of TF32: 1, or 3
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    await_inputs()
    b_blocks = tl.cdiv(B, BLOCK_B)
    a0 = tl.program_id(0) // b_blocks * BLOCK_A
    b0 = tl.program_id(0) % b_blocks * BLOCK_B
    split = tl.program_id(1)
    offs_a = a0 + tl.arange(0, BLOCK_A)
    offs_b = b0 + tl.arange(0, BLOCK_B)
    mask_a = offs_a < A
    mask_b = offs_b < B

    acc = tl.zeros([BLOCK_A, BLOCK_B], dtype=tl.float32)
    start = split * pixels_per_split
    for m in range(start, tl.minimum(start + pixels_per_split, M), BLOCK_M):
        a = tl.trans(a_desc.load([m, a0]))
        b = b_desc.load([m, b0])
        if PRODUCTS == 1:
            acc = tl.dot(round_to_tf32(a), round_to_tf32(b), acc, input_precision="tf32")
        else:
            acc += dot_of_split(a, b)

    out_ptr += split.to(tl.int64) * A * B
    offs = offs_a.to(tl.int64)[:, None] * stride_a + offs_b.to(tl.int64)[None, :] * stride_b
    mask = mask_a[:, None] & mask_b[None, :]
    tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _splits(spec: ConvSpec, gpu: Device, tile: PointwiseWgrad) -> int:
    *_, pixels = spec.pixels
    steps = triton.cdiv(pixels, tile.block_m)
    if steps <= 8:  # what a second launch takes
        return 1
    co, ci = spec.of_filters
    blocks = min(_blocks(co, ci, tile), _blocks(ci, co, tile))
    return num_splits(blocks, steps, gpu.num_sms, fewest_of(spec))


def _blocks(a: int, b: int, tile: PointwiseWgrad) -> int:
    """Tiles of the result, of which one operand has `a` channels, the other `b`."""
    return triton.cdiv(a, tile.block_co) * triton.cdiv(b, tile.block_ci)


def launch_points(tile: PointwiseWgrad, splits: int, operands: WgradOperands) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up; of tiles of dy and
    x, or of x and dy if that is fewer tiles."""
    x, dy, weight, _, _, precision, partial, *_ = operands
    co, ci, _, _ = weight.shape
    m = x.numel() // ci
    steps = triton.cdiv(triton.cdiv(m, tile.block_m), splits)
    operands, strides = [(dy, co), (x, ci)], (ci, 1)
    if _blocks(ci, co, tile) < _blocks(co, ci, tile):
        operands.reverse()
        strides = (1, ci)
    (a, num_a), (b, num_b) = operands
    _pointwise_wgrad_kernel[(_blocks(num_a, num_b, tile), splits)](
        TensorDescriptor(a, [m, num_a], [num_a, 1], [tile.block_m, tile.block_co]),
        TensorDescriptor(b, [m, num_b], [num_b, 1], [tile.block_m, tile.block_ci]), partial, m,
        num_a, num_b, *strides, steps * tile.block_m,
        PRODUCTS=3 if precision == "ieee" else 1, BLOCK_A=tile.block_co, BLOCK_B=tile.block_ci,
        BLOCK_M=tile.block_m, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **overlapping(x.device),
    )  # fmt: skip


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    return Only(filters=(1, 1))(spec, gpu) or refuse_wide_float32(spec, gpu)


def _cost(spec: ConvSpec, gpu: Device, tile: PointwiseWgrad) -> float:
    """Rules of thumb: of many pixels `conv.hopper.mma_wgrad` is faster in TF32, and in float32 its
    or `conv.plain.gather_wgrad`."""
    *_, pixels = spec.pixels
    few, some, many = TILES
    if pixels <= _MANY:
        best = few if pixels <= _FEW or spec.precision == "ieee" else some
        rule = "pointwise_wgrad few"
    elif spec.precision == "ieee":
        return math.inf
    else:
        best, rule = many, "pointwise_wgrad"
    return of_products(rule, spec.flops, gpu) if tile == best else math.inf


def _work(spec: ConvSpec, gpu: Device, c: tuple) -> Work:
    co, ci = spec.of_filters
    *_, pixels = spec.pixels
    steps = triton.cdiv(triton.cdiv(pixels, c.block_m), c.splits)
    fetched = c.block_m * (c.block_co + c.block_ci) * 4  # of a step
    programs = min(_blocks(co, ci, c), _blocks(ci, co, c))
    resident = max(1, programs_at_a_time(c.num_stages * fetched, c.num_warps, gpu))
    products = c.block_co * c.block_ci * c.block_m
    return wgrad_work(spec, c, programs, steps, products, fetched, resident)


WEIGHT_GRAD = split_kernel(
    PointwiseWgrad, _refuse, lambda spec, gpu: TILES, _splits, launch_points, _cost, work=_work
)
