"""The weight gradients of several convolutions over images of one size, in one launch where that
pays.

A weight gradient is a sum over pixels, cut into as many parts as fill the GPU, which a second
launch adds up: at small batches a good deal of the time goes into the beginning and the end of
launches, into writing the parts and adding them up. Several gradients share all of that.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry.choose import select
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import WeightGradsSpec, precision_of
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.device import describe
from .fused import conv_weight_grad
from .hopper import group_wgrad, rounds_wgrad
from .hopper.group_wgrad import MOST, Gradient, Tile
from .hopper.rounds_wgrad import Rounds
from .weight_grad import one_after_one, weight_grad_spec
from .wgrad_pair import conv_two_weight_grads

_empty = torch.empty  # tests put a function here that returns NaNs


@configures("in_turn")
class _InTurn(NamedTuple):
    """Two after two, or one after the other."""


_Plan = Tile | Rounds | _InTurn


@triton.jit
def _gradient_of(
    block,  # in the list of the blocks of all gradients
    out1_ptr, out2_ptr, out3_ptr, out4_ptr,
    CI1, CI2, CI3, CI4,
    CO1, CO2, CO3, CO4,
    stride1, stride2, stride3, stride4,
    TILE_CO: tl.constexpr,
    TILE_CI: tl.constexpr,
):  # fmt: skip
    """Where its gradient is, the distance of its rows, and its channels; and which of its blocks it
    is."""
    blocks1 = tl.cdiv(CO1, TILE_CO) * tl.cdiv(CI1, TILE_CI)
    blocks2 = tl.cdiv(CO2, TILE_CO) * tl.cdiv(CI2, TILE_CI)
    blocks3 = tl.cdiv(CO3, TILE_CO) * tl.cdiv(CI3, TILE_CI)
    CI = CI1
    CO = CO1
    stride = stride1
    out_ptr = out1_ptr
    if block >= blocks1:
        block -= blocks1
        CI = CI2
        CO = CO2
        stride = stride2
        out_ptr = out2_ptr
        if block >= blocks2:
            block -= blocks2
            CI = CI3
            CO = CO3
            stride = stride3
            out_ptr = out3_ptr
            if block >= blocks3:
                block -= blocks3
                CI = CI4
                CO = CO4
                stride = stride4
                out_ptr = out4_ptr
    return out_ptr, stride, CI, CO, block


@triton.jit
def _sum_cut_kernel(
    part_ptr,  # [blocks that are cut, splits, 64, 9, 64]
    out1_ptr,  # [CO1, 9, CI1], with rows any distance apart
    out2_ptr,
    out3_ptr,
    out4_ptr,
    CI1,
    CI2,
    CI3,
    CI4,
    CO1,
    CO2,
    CO3,
    CO4,
    stride1,
    stride2,
    stride3,
    stride4,
    whole,  # blocks in front that are not cut
    splits,
    ACCUMULATE: tl.constexpr,  # add to what is there
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_inputs()
    NUMBERS: tl.constexpr = 64 * 9 * 64
    cut = tl.program_id(0) // (NUMBERS // BLOCK)
    offs = tl.program_id(0) % (NUMBERS // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK_S, BLOCK], dtype=tl.float32)
    for split in range(0, splits, BLOCK_S):
        offs_s = split + tl.arange(0, BLOCK_S)
        rows = part_ptr + (cut * splits + offs_s).to(tl.int64)[:, None] * NUMBERS
        acc += tl.load(rows + offs[None, :], mask=(offs_s < splits)[:, None], other=0.0)
    result = tl.sum(acc, axis=0)
    out_ptr, stride, CI, CO, block = _gradient_of(
        cut + whole, out1_ptr, out2_ptr, out3_ptr, out4_ptr, CI1, CI2, CI3, CI4, CO1, CO2, CO3,
        CO4, stride1, stride2, stride3, stride4, 64, 64,
    )  # fmt: skip
    ci_blocks = tl.cdiv(CI, 64)
    co = block // ci_blocks * 64 + offs // (9 * 64)
    ci = block % ci_blocks * 64 + offs % 64
    mask = (co < CO) & (ci < CI)
    out_ptrs = out_ptr + co.to(tl.int64) * stride + offs // 64 % 9 * CI + ci
    if ACCUMULATE:
        result += tl.load(out_ptrs, mask=mask, other=0.0)
    tl.store(out_ptrs, result, mask=mask)


@triton.jit(do_not_specialize=["programs", "tiles"])
def _sum_group_kernel(
    part_ptr,  # [programs, 2, TILE_CO, TAPS, TILE_CI]
    out1_ptr,  # [CO1, TAPS, CI1], with rows any distance apart
    out2_ptr,
    out3_ptr,
    out4_ptr,
    CI1,
    CI2,
    CI3,
    CI4,
    CO1,
    CO2,
    CO3,
    CO4,
    stride1,
    stride2,
    stride3,
    stride4,
    programs,
    tiles,  # of the sum of a block of channels
    TILE_CO: tl.constexpr,
    TILE_CI: tl.constexpr,
    TAPS: tl.constexpr,
    ACCUMULATE: tl.constexpr,  # add to what is there
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_inputs()
    NUMBERS: tl.constexpr = TILE_CO * TAPS * TILE_CI
    block = tl.program_id(0) // (NUMBERS // BLOCK)
    offs = tl.program_id(0) % (NUMBERS // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    blocks1 = tl.cdiv(CO1, TILE_CO) * tl.cdiv(CI1, TILE_CI)
    blocks2 = tl.cdiv(CO2, TILE_CO) * tl.cdiv(CI2, TILE_CI)
    blocks3 = tl.cdiv(CO3, TILE_CO) * tl.cdiv(CI3, TILE_CI)
    blocks = blocks1 + blocks2 + blocks3 + tl.cdiv(CO4, TILE_CO) * tl.cdiv(CI4, TILE_CI)

    # the programs that have the block's first tile and its last, of pieces [p, p + 1) total / P
    total = (blocks * tiles).to(tl.int64)
    first = ((block.to(tl.int64) * tiles + 1) * programs - 1) // total
    last = ((block + 1).to(tl.int64) * tiles * programs - 1) // total
    acc = tl.zeros([BLOCK_S, BLOCK], dtype=tl.float32)
    for program in range(first, last + 1, BLOCK_S):
        offs_p = program + tl.arange(0, BLOCK_S)
        part = offs_p * 2 + block - offs_p * total // programs // tiles
        rows = part_ptr + part[:, None] * NUMBERS
        acc += tl.load(rows + offs[None, :], mask=(offs_p <= last)[:, None], other=0.0)
    result = tl.sum(acc, axis=0)

    out_ptr, stride, CI, CO, block = _gradient_of(
        block, out1_ptr, out2_ptr, out3_ptr, out4_ptr, CI1, CI2, CI3, CI4, CO1, CO2, CO3,
        CO4, stride1, stride2, stride3, stride4, TILE_CO, TILE_CI,
    )  # fmt: skip
    ci_blocks = tl.cdiv(CI, TILE_CI)
    co = block // ci_blocks * TILE_CO + offs // (TAPS * TILE_CI)
    ci = block % ci_blocks * TILE_CI + offs % TILE_CI
    mask = (co < CO) & (ci < CI)
    out_ptrs = out_ptr + co.to(tl.int64) * stride + offs // TILE_CI % TAPS * CI + ci
    if ACCUMULATE:
        result += tl.load(out_ptrs, mask=mask, other=0.0)
    tl.store(out_ptrs, result, mask=mask)


def conv_weight_grads(
    *gradients: tuple[Tensor, Tensor, Tensor],  # x [N, H, W, CI], dy [N, H, W, CO], `out`, as ...
    accumulate: bool = False,  # add to each `out`
    share: float = 1.0,  # of the multiprocessors, about: the fewer, the fewer parts to add up
    allow_tf32: bool = True,  # of float32
) -> None:
    """... `conv_weight_grad` of each has them, up to 4. All `out` have filters of one size, all
    images are of one size, and all have padding R // 2."""
    group = [Gradient(*g) for g in gradients]

    def run(plan: _Plan) -> Tensor:
        sizes = [g.out.numel() for g in group]
        flat = _empty((sum(sizes),), dtype=torch.float32, device=group[0].x.device)
        copies = []
        for g, place in zip(group, flat.split(sizes), strict=True):
            co, ci, r, s = g.out.shape
            copies.append(g._replace(out=place.view(co, r, s, ci).permute(0, 3, 1, 2)))
        _run(copies, False, plan, allow_tf32)
        return flat

    if len(group) == 1:
        _run_in_turn(group, accumulate, share, allow_tf32)
        return
    spec, gpu = grads_spec(group, allow_tf32), describe(group[0].x.device)
    _run(group, accumulate, select(WEIGHT_GRADS, spec, gpu, run).config, allow_tf32, share)


def grads_spec(gradients: Sequence[Gradient], allow_tf32: bool) -> WeightGradsSpec:
    """What is computed of such tensors, each with padding R // 2."""
    convs = []
    for x, dy, out in gradients:
        padding = (out.shape[2] // 2, out.shape[3] // 2)
        precision = precision_of(x.dtype, allow_tf32)
        convs.append(weight_grad_spec(x, dy, out, 1, padding, precision))
    contiguous = all(g.out.permute(0, 2, 3, 1).is_contiguous() for g in gradients)
    return WeightGradsSpec(convs[0].n, convs[0].dtype, tuple(convs), contiguous)


def _key(spec: WeightGradsSpec) -> dict[str, Any]:
    first = spec.convs[0]
    sizes = {"h": first.h, "w": first.w, "r": first.r, "s": first.s}
    for i, conv in enumerate(spec.convs, 1):
        sizes |= {f"ci{i}": conv.k, f"co{i}": conv.c}
    return sizes | {"dtype": spec.dtype}


WEIGHT_GRADS = Op(
    "conv_weight_grads",
    key=_key,
    kernels=(
        Kernel(
            "in_turn",
            _InTurn,
            lambda spec, gpu: None,
            lambda spec, gpu: [_InTurn()],
            alike=lambda spec, gpu, _: one_after_one(spec, gpu),
            delegates=True,
        ),
        group_wgrad.KERNEL,
        rounds_wgrad.KERNEL,
    ),
)


def _run(
    group: Sequence[Gradient],
    accumulate: bool,
    plan: _Plan,
    allow_tf32: bool,
    share: float = 1.0,
) -> None:
    if isinstance(plan, _InTurn):
        _run_in_turn(group, accumulate, share, allow_tf32)
        return
    if isinstance(plan, Rounds):
        _run_rounds(group, accumulate, plan, allow_tf32)
        return
    tile = plan
    x, _, out = group[0]
    taps = out.shape[2] * out.shape[3]
    shape = (2, 64 * tile.co_blocks, taps, 64 * tile.ci_blocks)
    spec = grads_spec(group, allow_tf32)
    programs = group_wgrad.programs(spec, describe(x.device), tile, share)
    parts = _empty((programs, *shape), dtype=torch.float32, device=x.device)
    steps = group_wgrad.pixel_tiles(spec.convs[0], tile)
    group_wgrad.launch(group, tile, steps, parts)
    _sum_parts(parts, [g.out for g in group], steps, accumulate)


def _run_rounds(
    group: Sequence[Gradient], accumulate: bool, plan: Rounds, allow_tf32: bool
) -> None:
    spec, gpu = grads_spec(group, allow_tf32), describe(group[0].x.device)
    whole = rounds_wgrad.whole_blocks(spec, gpu, plan)
    cut = rounds_wgrad.cut_blocks(spec, gpu, plan)
    shape = (cut, plan.splits, 64, 9, 64)
    parts = _empty(shape, dtype=torch.float32, device=group[0].x.device)
    rounds_wgrad.launch(group, plan, whole, parts, accumulate)
    if cut:
        _sum_cut(parts, [g.out for g in group], whole, accumulate)


def _sum_cut(
    parts: Tensor,  # float32 [blocks that are cut, splits, 64, 9, 64]
    outs: Sequence[Tensor],  # float32 [CO, CI, 3, 3], a channel of y is a row [3, 3, CI]
    whole: int,  # blocks in front of these
    accumulate: bool,
) -> None:
    cut, splits = parts.shape[:2]
    absent = MOST - len(outs)
    channels = [[*(o.shape[i] for o in outs), *[0] * absent] for i in (1, 0)]
    block_s = min(triton.next_power_of_2(splits), 16)  # as in `column_sum`
    block = 2048 // block_s
    _sum_cut_kernel[(cut * (rounds_wgrad.NUMBERS // block),)](
        parts,
        *outs,
        *[outs[0]] * absent,
        *channels[0],
        *channels[1],
        *(o.stride(0) for o in outs),
        *[0] * absent,
        whole,
        splits,
        ACCUMULATE=accumulate,
        BLOCK_S=block_s,
        BLOCK=block,
        **overlapping(parts.device),
    )


def _run_in_turn(
    group: Sequence[Gradient], accumulate: bool, share: float, allow_tf32: bool
) -> None:
    """Two after two, or one after one."""
    options = {"accumulate": accumulate, "allow_tf32": allow_tf32}
    three = group[0].out.shape[2] == 3
    pairs = [group[i : i + 2] if three else [group[i]] for i in range(0, len(group), 1 + three)]
    for pair in pairs:
        if len(pair) == 2:
            conv_two_weight_grads(*pair[0], *pair[1], share=share, **options)
        else:
            conv_weight_grad(*pair[0], **options)


def _sum_parts(
    parts: Tensor,  # float32 [programs, 2, TILE_CO, R * S, TILE_CI], as `group_wgrad.launch` has it
    outs: Sequence[Tensor],  # float32 [CO, CI, R, S], a channel of y is a row [R, S, CI]
    tiles: int,  # of the sum of a block of channels
    accumulate: bool,
) -> None:
    programs, _, tile_co, taps, tile_ci = parts.shape
    assert len(outs) <= MOST
    blocks = sum(-(-o.shape[0] // tile_co) * -(-o.shape[1] // tile_ci) for o in outs)
    assert blocks <= programs <= blocks * tiles  # else there are more than two parts a program
    absent = MOST - len(outs)
    most = -(-programs // blocks) + 1  # parts of a sum
    block_s = min(triton.next_power_of_2(most), 16)  # as in `column_sum`
    numbers = tile_co * taps * tile_ci
    block = min(2048 // block_s, numbers & -numbers)  # that divides them
    _sum_group_kernel[(blocks * (numbers // block),)](
        parts,
        *outs,
        *(outs[0] for _ in range(absent)),
        *(o.shape[1] for o in outs),
        *(0 for _ in range(absent)),
        *(o.shape[0] for o in outs),
        *(0 for _ in range(absent)),
        *(o.stride(0) for o in outs),
        *(0 for _ in range(absent)),
        programs,
        tiles,
        TILE_CO=tile_co,
        TILE_CI=tile_ci,
        TAPS=taps,
        ACCUMULATE=accumulate,
        BLOCK_S=block_s,
        BLOCK=block,
        **overlapping(parts.device),
    )
