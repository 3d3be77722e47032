"""The parts of several weight gradients that one launch has made, and their sums."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.dependent_launch import await_inputs, overlapping

MOST = 4  # gradients in one launch


def filled(values: Sequence[Any], other: Any = 0) -> list:
    """Arguments, those of gradients that are absent too."""
    return [*values, *[other] * (MOST - len(values))]


def _sizes(outs: Sequence[Tensor]) -> list[int]:
    """Of each gradient [CO, CI, R, S] the channels of x and of dy, and the distance of its rows."""
    co, ci = [o.shape[0] for o in outs], [o.shape[1] for o in outs]
    return filled(ci) + filled(co) + filled([o.stride(0) for o in outs])


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
def _store_block(
    result,  # [offs]: numbers of a block [TILE_CO, TAPS, TILE_CI]
    offs,  # where in the block they are
    out_ptr, stride, CI, CO, block,  # as `_gradient_of` returns them
    TILE_CO: tl.constexpr,
    TILE_CI: tl.constexpr,
    TAPS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Store them in its gradient, or add them to what is there."""
    ci_blocks = tl.cdiv(CI, TILE_CI)
    co = block // ci_blocks * TILE_CO + offs // (TAPS * TILE_CI)
    ci = block % ci_blocks * TILE_CI + offs % TILE_CI
    mask = (co < CO) & (ci < CI)
    out_ptrs = out_ptr + co.to(tl.int64) * stride + offs // TILE_CI % TAPS * CI + ci
    if ACCUMULATE:
        result += tl.load(out_ptrs, mask=mask, other=0.0)
    tl.store(out_ptrs, result, mask=mask)


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
    _store_block(result, offs, out_ptr, stride, CI, CO, block, 64, 64, 9, ACCUMULATE)


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
    _store_block(result, offs, out_ptr, stride, CI, CO, block, TILE_CO, TILE_CI, TAPS, ACCUMULATE)


def _tile(parts: int) -> tuple[int, int]:
    """How many parts of a sum a program adds at a time, and for how many numbers: 2,048 in all."""
    block_s = min(triton.next_power_of_2(parts), 16)
    return block_s, 2048 // block_s


def sum_two(parts: Tensor, out1: Tensor, out2: Tensor, accumulate: bool) -> None:
    splits, numel1, numel2 = parts.shape[0], out1.numel(), out2.numel()
    block_s, block = _tile(splits)
    assert numel1 % block == numel2 % block == 0
    _sum_two_kernel[((numel1 + numel2) // block,)](
        parts, out1, out2, splits, numel1, numel2, accumulate, BLOCK_S=block_s, BLOCK=block,
        **overlapping(parts.device),
    )  # fmt: skip


def sum_cut(
    parts: Tensor,  # float32 [blocks that are cut, splits, 64, 9, 64]
    outs: Sequence[Tensor],  # float32 [CO, CI, 3, 3], a channel of y is a row [3, 3, CI]
    whole: int,  # blocks in front of these
    accumulate: bool,
) -> None:
    cut, splits = parts.shape[:2]
    block_s, block = _tile(splits)
    _sum_cut_kernel[(cut * (parts[0, 0].numel() // block),)](
        parts,
        *filled(outs, outs[0]),
        *_sizes(outs),
        whole,
        splits,
        ACCUMULATE=accumulate,
        BLOCK_S=block_s,
        BLOCK=block,
        **overlapping(parts.device),
    )


def sum_parts(
    parts: Tensor,  # float32 [programs, 2, TILE_CO, R * S, TILE_CI], as `group_wgrad.launch` has it
    outs: Sequence[Tensor],  # float32 [CO, CI, R, S], a channel of y is a row [R, S, CI]
    tiles: int,  # of the sum of a block of channels
    accumulate: bool,
) -> None:
    programs, _, tile_co, taps, tile_ci = parts.shape
    assert len(outs) <= MOST
    blocks = sum(-(-o.shape[0] // tile_co) * -(-o.shape[1] // tile_ci) for o in outs)
    assert blocks <= programs <= blocks * tiles  # else there are more than two parts a program
    most = -(-programs // blocks) + 1  # parts of a sum
    block_s, block = _tile(most)
    numbers = tile_co * taps * tile_ci
    block = min(block, numbers & -numbers)  # that divides them
    _sum_group_kernel[(blocks * (numbers // block),)](
        parts,
        *filled(outs, outs[0]),
        *_sizes(outs),
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
