"""The weight gradients of two convolutions over images of one size, in one launch where that pays.

A weight gradient is a sum over pixels, and it is cut into as many parts as fill the GPU, each of
which holds the gradient of 64 x 64 channels: at small batches a good deal of the time goes into
writing the parts and adding them up. Two gradients fill the GPU with half as many parts of each.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry.choose import choose
from ..registry.kernel import configures
from ..registry.spec import dtype_name
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.device import describe
from .fused import conv_weight_grad
from .hopper import row_mma as gluon_rows

_MANY_SPLITS = 4

_empty = torch.empty  # tests put a function here that returns NaNs


@configures("row_wgrad_pair")
class _Together(NamedTuple):
    """Both in one launch."""

    splits: int  # parts of either sum


@configures("one_by_one")
class _OneByOne(NamedTuple):
    """Each by `conv_weight_grad`."""

    splits: int = 0


_Plan = _Together | _OneByOne


@triton.jit
def _sum_two_kernel(
    partial_ptr,  # [splits, numel1 + numel2]
    out1_ptr,
    out2_ptr,
    splits,
    numel1,  # a multiple of BLOCK, as is numel2
    numel2,
    ACCUMULATE: tl.constexpr,  # add to what is there
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_inputs()
    start = tl.program_id(0) * BLOCK
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK_S, BLOCK], dtype=tl.float32)
    for split in range(0, splits, BLOCK_S):
        offs_s = split + tl.arange(0, BLOCK_S)
        rows = partial_ptr + offs_s.to(tl.int64)[:, None] * (numel1 + numel2) + start
        acc += tl.load(rows + offs[None, :], mask=(offs_s < splits)[:, None], other=0.0)
    total = tl.sum(acc, axis=0)
    out_ptr = out1_ptr + start
    if start >= numel1:
        out_ptr = out2_ptr + (start - numel1)
    if ACCUMULATE:
        total += tl.load(out_ptr + offs)
    tl.store(out_ptr + offs, total)


def conv_two_weight_grads(
    x1: Tensor,  # [N, H, W, CI1]
    dy1: Tensor,  # [N, H, W, CO1]
    out1: Tensor,  # float32 [CO1, CI1, R, S] to be written; a channel of y is a row [R, S, CI1]
    x2: Tensor,  # of another convolution
    dy2: Tensor,
    out2: Tensor,
    *,
    accumulate: bool = False,  # add to `out1` and `out2`
    share: float = 1.0,  # of the multiprocessors, about, if one launch does both
) -> None:
    """`conv_weight_grad` of both."""

    def run(plan: _Plan) -> Tensor:
        flat = _empty((out1.numel() + out2.numel(),), dtype=torch.float32, device=x1.device)
        places = []
        for out, part in zip((out1, out2), flat.split((out1.numel(), out2.numel())), strict=True):
            co, ci, r, s = out.shape
            places.append(part.view(co, r, s, ci).permute(0, 3, 1, 2))
        _run(x1, dy1, places[0], x2, dy2, places[1], False, plan)
        return flat

    n, h, w, ci1 = x1.shape
    shape = {
        "h": h,
        "w": w,
        "ci1": ci1,
        "co1": dy1.shape[3],
        "h2": x2.shape[1],
        "w2": x2.shape[2],
        "ci2": x2.shape[3],
        "co2": dy2.shape[3],
        "r": out1.shape[2],
        "s": out1.shape[3],
        "r2": out2.shape[2],
        "s2": out2.shape[3],
        "dtype": dtype_name(x1.dtype),
    }
    together = _together(x1, dy1, out1, x2, dy2, out2)
    plan = choose(
        "conv_two_weight_grads",
        n,
        shape,
        lambda: [_OneByOne(), *together],
        _OneByOne,
        run,
        describe(x1.device),
        similar=True,
        match=lambda row, plans: plans[0],  # how many parts depends on the shape
    )
    if plan not in together:  # decided for filters that lie in memory in another way
        plan = _OneByOne()
    _run(x1, dy1, out1, x2, dy2, out2, accumulate, plan, share)


def _run(
    x1: Tensor,
    dy1: Tensor,
    out1: Tensor,
    x2: Tensor,
    dy2: Tensor,
    out2: Tensor,
    accumulate: bool,
    plan: _Plan,
    share: float = 1.0,
) -> None:
    if isinstance(plan, _OneByOne):
        conv_weight_grad(x1, dy1, out1, accumulate=accumulate)
        conv_weight_grad(x2, dy2, out2, accumulate=accumulate)
        return
    numel1, numel2 = out1.numel(), out2.numel()
    splits = plan.splits
    if splits >= _MANY_SPLITS:  # with fewer, blocks of channels make most of the programs
        splits = max(gluon_rows.fewest_wgrad_splits(x1), round(share * splits))
    parts = _empty((splits, numel1 + numel2), dtype=torch.float32, device=x1.device)
    gluon_rows.weight_grad(x1, dy1, parts, x2, dy2)
    _sum_two(parts, out1, out2, accumulate)


def _sum_two(parts: Tensor, out1: Tensor, out2: Tensor, accumulate: bool) -> None:
    splits, numel1, numel2 = parts.shape[0], out1.numel(), out2.numel()
    block_s = min(triton.next_power_of_2(splits), 16)  # as in `column_sum`
    block = 2048 // block_s
    assert numel1 % block == numel2 % block == 0
    _sum_two_kernel[((numel1 + numel2) // block,)](
        parts, out1, out2, splits, numel1, numel2, accumulate, BLOCK_S=block_s, BLOCK=block,
        **overlapping(parts.device),
    )  # fmt: skip


def _together(
    x1: Tensor, dy1: Tensor, out1: Tensor, x2: Tensor, dy2: Tensor, out2: Tensor
) -> list[_Together]:
    """The plan that does both in one launch, if there is one."""
    padding = (out1.shape[2] // 2, out1.shape[3] // 2)
    applies = x1.shape[:3] == x2.shape[:3] and x1.shape[0] > 0
    for x, dy, out in ((x1, dy1, out1), (x2, dy2, out2)):
        applies = applies and gluon_rows.wgrad_applies(x, dy, out, padding)
        applies = applies and out.permute(0, 2, 3, 1).is_contiguous()
    splits = gluon_rows.wgrad_splits(x1, out1, out2) if applies else 0
    return [_Together(splits)] if splits > 0 else []
