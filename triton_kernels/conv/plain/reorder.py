"""Filters in the order in which kernels read them, and gradients in that of their parameters.

PyTorch keeps filters as [CO, CI, R S], kernels read [CO, R S, CI]: for each output channel a small
matrix is transposed, either way. A program reads a tile of one, whose rows are short, as it lies in
memory and writes it as it lies there, and changes the dtype on the way. PyTorch's copy walks
through one of the two with a step of R S numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...runtime.dependent_launch import await_inputs, overlapping

_TILE = 2048  # numbers of a program: 16 a thread of four warps
_SHORT = 32  # numbers of a row at most
_DTYPES = torch.float32, torch.bfloat16, torch.float16


@triton.jit
def _reorder_kernel(
    x_ptr,  # [A, B, T]
    y_ptr,  # [A, T, B]
    B,
    T,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    await_inputs()
    start = tl.program_id(0).to(tl.int64) * B * T
    b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B))[:, None]
    t = (tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T))[None, :]
    mask = (b < B) & (t < T)
    x = tl.load(x_ptr + start + b * T + t, mask=mask, other=0.0)
    tl.store(y_ptr + start + t * B + b, x.to(y_ptr.dtype.element_ty), mask=mask)


def reorder(
    x: Tensor,  # [CO, CI, R, S], or [CO, CI, K] of Conv1d
    out: Tensor,  # of the same shape
) -> None:
    """out = x, of which one lies in memory as [CO, CI, R S] and the other as [CO, R S, CI]. Other
    orders and other dtypes than of 16 and 32 bits are PyTorch's."""
    sizes = _transposed(x, out)
    if sizes is None or x.dtype not in _DTYPES or out.dtype not in _DTYPES:
        out.copy_(x)
        return
    a, b, t = sizes
    short = min(triton.next_power_of_2(min(b, t)), _SHORT)
    block_b, block_t = (_TILE // short, short) if t < b else (short, _TILE // short)
    _reorder_kernel[(a, triton.cdiv(b, block_b), triton.cdiv(t, block_t))](
        x, out, b, t, BLOCK_B=block_b, BLOCK_T=block_t, **overlapping(x.device)
    )  # fmt: skip


def _transposed(x: Tensor, out: Tensor) -> tuple[int, int, int] | None:
    """A, B and T if x lies in memory as [A, B, T] and `out` as [A, T, B]."""
    if x.ndim == 3:
        x, out = x.unsqueeze(2), out.unsqueeze(2)
    if x.ndim != 4 or x.numel() == 0:
        return None
    co, ci, r, s = x.shape
    last = {"memory_format": torch.channels_last}
    if x.is_contiguous() and out.is_contiguous(**last):
        return co, ci, r * s
    return (co, r * s, ci) if x.is_contiguous(**last) and out.is_contiguous() else None
