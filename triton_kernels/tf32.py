"""float32 numbers as tensor cores multiply them: TF32, which has 10 bits of mantissa.

A float32 number is the sum of two TF32 numbers but for its last bit, and three products of such
halves, big * small + small * big + big * big, are a float32 product up to 2^-22 of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TRUNCATED = tl.constexpr(-0x2000)  # the mask of the bits that TF32 has
_LARGE = tl.constexpr(3.4e38)  # from about here on rounding up would give infinity


def rounded_to_tf32(x: Tensor) -> Tensor:  # float32, of any shape
    """`round_to_tf32` of a tensor, by PyTorch: of parameters, or in a reference."""
    bits = x.view(torch.int32)
    return torch.where(x.isnan(), x, ((bits + 0x1000) & -0x2000).view(torch.float32))


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


@triton.jit
def dot_of_split(a, b):
    """a b of float32, by three products."""
    a, a_small = split_to_tf32(a)
    b, b_small = split_to_tf32(b)
    small = tl.dot(a_small, b, input_precision="tf32")
    small = tl.dot(a, b_small, small, input_precision="tf32")
    return tl.dot(a, b, small, input_precision="tf32")


@triton.jit
def as_operand(v, dtype: tl.constexpr, TF32: tl.constexpr):
    """v in `dtype`, and if that is float32 rounded to TF32 where products are in that: then tensor
    cores ignore nothing. It is for results that products read, and for what a product reads that
    nobody has rounded."""
    if TF32 and dtype == tl.float32:
        return round_to_tf32(v.to(tl.float32))
    else:
        return v.to(dtype)
