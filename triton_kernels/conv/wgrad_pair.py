"""The weight gradients of two convolutions over images of one size, in one launch where that pays.

A weight gradient is a sum over pixels, and it is cut into as many parts as fill the GPU, each of
which holds the gradient of 64 x 64 channels: at small batches a good deal of the time goes into
writing the parts and adding them up. Two gradients fill the GPU with half as many parts of each.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry.choose import select
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import WeightGradsSpec, precision_of
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.device import Device, describe
from .fused import conv_weight_grad
from .hopper import row_mma
from .weight_grad import one_after_one, weight_grad_spec

_MANY_SPLITS = 4

_empty = torch.empty  # tests put a function here that returns NaNs


@configures("row_wgrad_pair")
class _Together(NamedTuple):
    """Both in one launch."""

    splits: int  # parts of either sum


@configures("one_by_one")
class _OneByOne(NamedTuple):
    """Each by `conv_weight_grad`."""


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
    allow_tf32: bool = True,  # of float32
) -> None:
    """`conv_weight_grad` of both."""

    def run(plan: _Plan) -> Tensor:
        flat = _empty((out1.numel() + out2.numel(),), dtype=torch.float32, device=x1.device)
        places = []
        for out, part in zip((out1, out2), flat.split((out1.numel(), out2.numel())), strict=True):
            co, ci, r, s = out.shape
            places.append(part.view(co, r, s, ci).permute(0, 3, 1, 2))
        _run(x1, dy1, places[0], x2, dy2, places[1], False, plan, allow_tf32)
        return flat

    spec, gpu = _spec(x1, dy1, out1, x2, dy2, out2, allow_tf32), describe(x1.device)
    plan = select(TWO_WEIGHT_GRADS, spec, gpu, run).config
    _run(x1, dy1, out1, x2, dy2, out2, accumulate, plan, allow_tf32, share)


def _spec(
    x1: Tensor,
    dy1: Tensor,
    out1: Tensor,
    x2: Tensor,
    dy2: Tensor,
    out2: Tensor,
    allow_tf32: bool,
) -> WeightGradsSpec:
    convs, precision = [], precision_of(x1.dtype, allow_tf32)
    for x, dy, out in ((x1, dy1, out1), (x2, dy2, out2)):
        padding = (out.shape[2] // 2, out.shape[3] // 2)
        convs.append(weight_grad_spec(x, dy, out, 1, padding, precision))
    contiguous = all(out.permute(0, 2, 3, 1).is_contiguous() for out in (out1, out2))
    return WeightGradsSpec(convs[0].n, convs[0].dtype, tuple(convs), contiguous)


def _key(spec: WeightGradsSpec) -> dict[str, Any]:
    one, two = spec.convs
    return {
        "h": one.h,
        "w": one.w,
        "ci1": one.k,
        "co1": one.c,
        "h2": two.h,
        "w2": two.w,
        "ci2": two.k,
        "co2": two.c,
        "r": one.r,
        "s": one.s,
        "r2": two.r,
        "s2": two.s,
        "dtype": spec.dtype,
    }


def _refuse(spec: WeightGradsSpec, gpu: Device) -> str | None:
    one, two = spec.convs
    if (one.n, one.h, one.w) != (two.n, two.h, two.w):
        return "images are not of one size"
    if not spec.contiguous:
        return "rows of a result are apart"
    for conv in spec.convs:
        if conv.of_filters != (conv.c, conv.k):
            return "x or dy have more channels than the filters"
        if reason := row_mma.refuse_wgrad(conv, gpu) or row_mma.refuse_wgrad_rows(conv, gpu):
            return reason
    return None if row_mma.wgrad_splits(one, gpu, two) else "there are too few tiles to share"


def _together(spec: WeightGradsSpec, gpu: Device) -> list[_Together]:
    return [_Together(row_mma.wgrad_splits(spec.convs[0], gpu, spec.convs[1]))]


TWO_WEIGHT_GRADS = Op(
    "conv_two_weight_grads",
    key=_key,
    kernels=(
        Kernel(
            "one_by_one",
            _OneByOne,
            lambda spec, gpu: None,
            lambda spec, gpu: [_OneByOne()],
            alike=lambda spec, gpu, _: one_after_one(spec, gpu),
            delegates=True,
        ),
        Kernel("row_wgrad_pair", _Together, _refuse, _together),
    ),
)


def _run(
    x1: Tensor,
    dy1: Tensor,
    out1: Tensor,
    x2: Tensor,
    dy2: Tensor,
    out2: Tensor,
    accumulate: bool,
    plan: _Plan,
    allow_tf32: bool,
    share: float = 1.0,
) -> None:
    if isinstance(plan, _OneByOne):
        options = {"accumulate": accumulate, "allow_tf32": allow_tf32}
        conv_weight_grad(x1, dy1, out1, **options)
        conv_weight_grad(x2, dy2, out2, **options)
        return
    numel1, numel2 = out1.numel(), out2.numel()
    splits = plan.splits
    if splits >= _MANY_SPLITS:  # with fewer, blocks of channels make most of the programs
        splits = max(
            row_mma.fewest_wgrad_splits(_spec(x1, dy1, out1, x2, dy2, out2, allow_tf32).convs[0]),
            round(share * splits),
        )
    parts = _empty((splits, numel1 + numel2), dtype=torch.float32, device=x1.device)
    row_mma.weight_grad(x1, dy1, parts, x2, dy2)
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
