"""Sums over rows in a fixed order, in one or two launches: no atomics, so equal bits at every run.

    out[c] = sum_m x[m, c]

Adds up the partial results of split sums, and is the bias gradient of a convolution.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.dependent_launch import await_inputs, following, overlapping
from ..runtime.device import describe

_BLOCK = 8192  # numbers a step, of eight warps: with four, 2.5 to 4 times the time (H200)
_WARPS = 8
_BLOCK_C = 64  # columns, at most


@triton.jit(do_not_specialize=["M", "rows_per_split"])
def _column_sum_kernel(
    x_ptr,  # [M, C]
    out_ptr,  # [splits, C]; if there is one split, rows of `cols` elements, `stride_out` apart
    M,
    C,
    rows_per_split,
    cols,  # None: there are no such rows
    stride_out,
    ACCUMULATE: tl.constexpr,  # add to what is there
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    split = tl.program_id(1).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    acc = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    start = split * rows_per_split
    end = tl.minimum(start + rows_per_split, M)
    for m in range(0, rows_per_split, BLOCK_M):
        offs_m = start + m + tl.arange(0, BLOCK_M)
        mask = (offs_m < end)[:, None] & mask_c[None, :]
        x = tl.load(x_ptr + offs_m[:, None] * C + offs_c[None, :], mask=mask, other=0.0)
        acc += x.to(tl.float32)
    total = tl.sum(acc, axis=0)
    if cols is None:
        out_ptrs = out_ptr + split * C + offs_c
    else:
        out_ptrs = out_ptr + (offs_c // cols).to(tl.int64) * stride_out + offs_c % cols
    if ACCUMULATE:
        total += tl.load(out_ptrs, mask=mask_c, other=0.0).to(tl.float32)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask_c)


@lru_cache
def num_splits(programs: int, steps: int, slots: int, fewest: int = 1) -> int:
    """Into how many parts to split a sum of `steps` steps so that `programs` such sums keep `slots`
    places busy: the least number of rounds times their length, where a part costs 8 steps more.
    At least `fewest`, see `long_sums`."""

    def time(splits: int) -> int:
        # not by triton.cdiv, which takes microseconds on the host
        return -(-programs * splits // slots) * (-(-steps // splits) + 8)

    fewest = max(1, min(steps, fewest))
    most = max(2 * slots, fewest + triton.cdiv(slots, programs))
    return min(range(fewest, max(1, min(steps, most)) + 1), key=time)


def partials(out: Tensor, splits: int) -> Tensor:
    """Where the parts of a split sum go: `out` if there is one part, else float32 [splits, ...]."""
    if splits == 1:
        return out
    return out.new_empty((splits, *out.shape), dtype=torch.float32)


def column_sum(
    x: Tensor,  # contiguous [..., C], seen as [M, C]
    out: Tensor,  # contiguous, C elements, any dtype
) -> None:
    """out = the sum of the rows of x, accumulated in float32."""
    m, splits, block_m = _cut(x, out.numel())
    partial = partials(out, splits)
    _launch(x, partial, m, out.numel(), splits, block_m)
    sum_partials(partial, out, follows=True)


def column_rows(
    x: Tensor,  # contiguous [..., C], seen as [M, C]
    place: Callable[[int, int], Tensor],  # (rows, C) -> where they go, float32
) -> Tensor:  # float32 [rows, C]
    """The first launch alone: rows whose sum is that of the rows of x."""
    c = x.shape[-1]
    m, splits, block_m = _cut(x, c)
    rows = place(splits, c)
    _launch(x, rows, m, c, splits, block_m)
    return rows


def sum_partials(
    partial: Tensor,  # float32 [splits, ...], as made by `partials`
    out: Tensor,  # as many elements as a part; its first dimension may have any stride
    *,
    accumulate: bool = False,  # add to `out`
    follows: bool = False,  # right after the first launch: see `dependent_launch.following`
) -> None:
    """The second launch: out = or += the sum of the parts, unless `partial` is `out`."""
    if partial is out:
        return
    splits, numel = partial.shape[0], out.numel()
    cols, stride = (None, 0) if out.ndim == 1 else (numel // out.shape[0], out.stride(0))
    # sixteen elements a thread, in loads of 16 bytes: next to each other if there are enough
    block_s = min(triton.next_power_of_2(splits), 16 if numel >= 2**14 else 64)
    block = 2048 // block_s
    _column_sum_kernel[(triton.cdiv(numel, block),)](
        partial, out, splits, numel, splits, cols, stride, accumulate,
        BLOCK_M=block_s, BLOCK_C=block, **(following if follows else overlapping)(out.device),
    )  # fmt: skip


def _cut(x: Tensor, c: int) -> tuple[int, int, int]:
    """M, the parts that the sum is split into, and the rows of a step."""
    m, block_c = x.numel() // c, _columns(c)
    block_m = max(16, min(_BLOCK // block_c, triton.next_power_of_2(m)))
    slots = describe(x.device).loops
    return m, num_splits(triton.cdiv(c, block_c), triton.cdiv(m, block_m), slots), block_m


def _columns(c: int) -> int:
    """Of one program."""
    return min(_BLOCK_C, max(16, triton.next_power_of_2(c)))


def _launch(x: Tensor, out: Tensor, m: int, c: int, splits: int, block_m: int) -> None:
    block_c = _columns(c)
    _column_sum_kernel[(triton.cdiv(c, block_c), splits)](
        x, out, m, c, triton.cdiv(m, splits), None, 0, False, BLOCK_M=block_m, BLOCK_C=block_c,
        num_warps=_WARPS, **overlapping(x.device),
    )  # fmt: skip
