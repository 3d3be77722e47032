"""Zeros behind the channels, and another dtype, in one pass. The TMA unit wants the channels of a
tensor in multiples of 16 bytes, and images have three."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.dependent_launch import await_inputs, overlapping
from ...tf32 import as_operand

_BLOCK = 1024


@triton.jit
def _pad_channels_kernel(
    x_ptr, out_ptr, size, C, WIDTH: tl.constexpr, TF32: tl.constexpr, BLOCK: tl.constexpr
):
    await_inputs()
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # of out [M, WIDTH]
    row, c = offs // WIDTH, offs % WIDTH
    mask = offs < size
    x = tl.load(x_ptr + row * C + c, mask=mask & (c < C), other=0.0)
    tl.store(out_ptr + offs, as_operand(x, out_ptr.dtype.element_ty, TF32), mask=mask)


def pad_channels(
    x: Tensor,  # [..., C], contiguous
    width: int,
    dtype: torch.dtype,
    *,
    tf32: bool = False,
) -> Tensor:  # [..., width]
    """x in `dtype`, with zeros behind its channels; float32 of `tf32` is rounded to TF32."""
    assert x.is_contiguous() and x.shape[-1] <= width
    out = x.new_empty((*x.shape[:-1], width), dtype=dtype)
    _pad_channels_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        x, out, out.numel(), x.shape[-1],
        WIDTH=width, TF32=tf32, BLOCK=_BLOCK, **overlapping(x.device),
    )  # fmt: skip
    return out
