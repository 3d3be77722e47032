"""float32 numbers as tensor cores multiply them: TF32, which has 10 bits of mantissa.

A float32 number is the sum of two TF32 numbers but for its last bit, and three products of such
halves, big * small + small * big + big * big, are a float32 product up to 2^-22 of it.
"""

import triton
import triton.language as tl

_TRUNCATED = tl.constexpr(-0x2000)  # the mask of the bits that TF32 has
_LARGE = tl.constexpr(3.4e38)  # from about here on rounding up would give infinity


@triton.jit
def round_to_tf32(v):
    """v to the nearest float32 of 10 bits of mantissa: tensor cores ignore the 13 bits behind
    them, which makes every product too small, and errors that all have one sign add up."""
    bits = (v.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(v == v, bits.to(tl.float32, bitcast=True), v)  # a NaN's bits may carry over


@triton.jit
def split_to_tf32(v):
    """Two TF32 numbers whose sum is v up to 2^-23 of it. Of an infinity or a NaN the second one is
    zero: inf - inf would be NaN."""
    cut = (v.to(tl.int32, bitcast=True) & _TRUNCATED).to(tl.float32, bitcast=True)
    big = tl.where((tl.abs(v) > _LARGE) & (v == v), cut, round_to_tf32(v))
    small = tl.where(tl.abs(v) < float("inf"), v - big, 0.0)
    return big, round_to_tf32(small)
