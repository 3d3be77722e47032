"""float32 operands of a product as float16 numbers: one of each, or two whose sum it is.

A float16 number has the 11 bits of a TF32 number, and two have the 22 of two, but not their range.
So an operand is first multiplied by a power of two that brings its largest finite number to 2^14.
Of numbers less than 2^-28 of that one part loses bits, and two of less than 2^-17.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import await_inputs, following, overlapping

_PROGRAMS = 528  # that look for the largest number, of each operand
_BLOCK = 4096

_empty = torch.empty  # tests put a function here that returns NaNs


@triton.jit
def _largest_kernel(
    x_ptr,
    dy_ptr,
    out_ptr,  # float32 [2, programs]: the largest finite numbers that each has seen, of x and of dy
    num_x,
    num_dy,
    BLOCK: tl.constexpr,
):
    await_inputs()
    second = tl.program_id(1) == 1
    ptr = dy_ptr if second else x_ptr
    num = tl.where(second, num_dy, num_x)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, num, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK).to(tl.int64)
        v = tl.abs(tl.load(ptr + offs, mask=offs < num, other=0.0))
        largest = tl.maximum(largest, tl.where(v < float("inf"), v, 0.0))
    out_ptr += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out_ptr, tl.max(largest, axis=0))


@triton.jit
def _exponent(largest_ptr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Of the power of two that an operand is multiplied by, from -113 to 126."""
    offs = tl.arange(0, BLOCK)
    v = tl.max(tl.load(largest_ptr + offs, mask=offs < PROGRAMS, other=0.0), axis=0)
    exponent = (v.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(v > 0, tl.minimum(14 - exponent, 126), 0)


@triton.jit
def _power_of_two(exponent):
    """Of exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _halves_kernel(
    x_ptr,
    dy_ptr,
    x_out_ptr,  # float16 [PARTS, num_x]
    dy_out_ptr,
    largest_ptr,  # float32 [2, PROGRAMS]
    factors_ptr,  # float32 [2]
    num_x,
    num_dy,
    blocks_x,  # of programs
    PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_inputs()
    second = tl.program_id(0) >= blocks_x
    block = tl.program_id(0) - tl.where(second, blocks_x, 0)
    num = tl.where(second, num_dy, num_x)
    ptr = dy_ptr if second else x_ptr
    out_ptr = dy_out_ptr if second else x_out_ptr
    offs = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num
    v = tl.load(ptr + offs, mask=mask, other=0.0)
    exponent = _exponent(largest_ptr + tl.where(second, PROGRAMS, 0), PROGRAMS, BLOCK_P)
    if tl.program_id(0) == 0:
        both = -exponent - _exponent(largest_ptr + PROGRAMS, PROGRAMS, BLOCK_P)
        tl.store(factors_ptr, _power_of_two(both // 2))
        tl.store(factors_ptr + 1, _power_of_two(both - both // 2))
    v *= _power_of_two(exponent)
    big = v.to(tl.float16)
    tl.store(out_ptr + offs, big, mask=mask)
    if PARTS == 2:
        tl.store(out_ptr + num + offs, (v - big.to(tl.float32)).to(tl.float16), mask=mask)


def in_halves(
    x: Tensor,  # contiguous float32 [..., CI]
    dy: Tensor,  # contiguous float32 [..., CO]
    parts: int,  # 1 or 2
) -> tuple[Tensor, Tensor, Tensor]:
    """float16 [parts, ..., CI] and [parts, ..., CO], and float32 [2]: two factors by which a
    product of the two has to be multiplied, one after the other, since their product may be no
    float32. Where x is infinite or NaN its second part is NaN."""
    largest = _empty((2, _PROGRAMS), dtype=torch.float32, device=x.device)
    factors = _empty((2,), dtype=torch.float32, device=x.device)
    halves = [_empty((parts, *t.shape), dtype=torch.float16, device=x.device) for t in (x, dy)]
    _largest_kernel[(_PROGRAMS, 2)](
        x, dy, largest, x.numel(), dy.numel(), BLOCK=_BLOCK, **overlapping(x.device)
    )
    blocks_x, blocks_dy = (triton.cdiv(t.numel(), _BLOCK) for t in (x, dy))
    _halves_kernel[(blocks_x + blocks_dy,)](
        x, dy, *halves, largest, factors, x.numel(), dy.numel(), blocks_x, PARTS=parts,
        PROGRAMS=_PROGRAMS, BLOCK_P=triton.next_power_of_2(_PROGRAMS), BLOCK=_BLOCK,
        **following(x.device),
    )  # fmt: skip
    return *halves, factors
