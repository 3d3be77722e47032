"""Operands of float32 convolutions in the order and in the parts that tensor cores want.

In four bytes wgmma takes its operands from shared memory only with the index of the sum innermost.
That of an input gradient is CO, which in the filters is outermost. A copy with the two indices
changed, made once, costs one pass over memory; turning the tiles inside the product costs more,
nine times.

A copy of one part is rounded to TF32. One of two parts is for float32 products: `split_to_tf32`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.dependent_launch import await_inputs, overlapping
from ...tf32 import round_to_tf32, split_to_tf32


@triton.jit
def _store_parts(ptrs, v, mask, part_stride, PARTS: tl.constexpr):
    if PARTS == 2:
        big, small = split_to_tf32(v)
        tl.store(ptrs, big, mask=mask)
        tl.store(ptrs + part_stride, small, mask=mask)
    else:
        tl.store(ptrs, round_to_tf32(v), mask=mask)


@triton.jit
def _transpose_weights_kernel(
    w_ptr,  # [CO, TAPS, CI]
    out_ptr,  # [PARTS, CI, TAPS, CO], the taps counted backwards
    CO,
    CI,
    TAPS,
    part_stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_inputs()
    tap = tl.program_id(2)
    co = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ci = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (co < CO)[:, None] & (ci < CI)[None, :]
    w = tl.load(w_ptr + (co[:, None] * TAPS + tap) * CI + ci[None, :], mask=mask, other=0.0)
    mask = (ci < CI)[:, None] & (co < CO)[None, :]
    ptrs = out_ptr + (ci[:, None] * TAPS + TAPS - 1 - tap) * CO + co[None, :]
    _store_parts(ptrs, tl.trans(w), mask, part_stride, PARTS)


@triton.jit
def _split_kernel(x_ptr, out_ptr, num, BLOCK: tl.constexpr):
    await_inputs()
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num
    _store_parts(out_ptr + offs, tl.load(x_ptr + offs, mask=mask, other=0.0), mask, num, 2)


def transpose_weights(
    weight: Tensor,  # float32 [CO, CI, R, S] in channels_last memory
    parts: int,
) -> Tensor:  # float32 [parts, CI, CO, R, S], each part in channels_last memory
    """The filters with which a forward convolution is the input gradient, for which its padding
    has to be R - 1 less that of the forward."""
    co, ci, r, s = weight.shape
    out = weight.new_empty((parts, ci, r, s, co), dtype=torch.float32)
    block = 32
    _transpose_weights_kernel[(triton.cdiv(co, block), triton.cdiv(ci, block), r * s)](
        weight, out, co, ci, r * s, weight.numel(), PARTS=parts, BLOCK=block,
        **overlapping(weight.device),
    )  # fmt: skip
    return out.permute(0, 1, 4, 2, 3)


def split(x: Tensor) -> Tensor:  # float32, dense in memory -> float32 [2, ...]
    """The two parts of each number, in the order in which x lies in memory."""
    out = x.new_empty((2, x.numel()), dtype=torch.float32)
    block = 2048
    _split_kernel[(triton.cdiv(x.numel(), block),)](
        x, out, x.numel(), BLOCK=block, **overlapping(x.device)
    )
    return out.as_strided((2, *x.shape), (x.numel(), *x.stride()))
