"""The parts of several weight gradients that one launch has made (`conv.hopper.group_wgrad`), and
their sums."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.dependent_launch import await_inputs, overlapping

MOST = 4  # gradients in one launch
LISTED = 4  # numbers of parts of a tile, those with the fewest steps one after the other


def filled(values: Sequence[Any], count: int, other: Any = 0) -> list:
    """So many arguments, those of gradients that are absent too."""
    return [*values, *[other] * (count - len(values))]


def channels_of(ci: Sequence[int], co: Sequence[int]) -> list[int]:
    """Of x, and of dy."""
    return filled(ci, MOST) + filled(co, MOST)


@triton.jit
def count_blocks(CI, CO, TILE_CI: tl.constexpr, TILE_CO: tl.constexpr):
    """Of channels, of a gradient."""
    return tl.cdiv(CI, TILE_CI) * tl.cdiv(CO, TILE_CO)


@triton.jit
def gradient_of(
    block,  # in the list of the blocks of all gradients
    gradients,  # of each: CI, CO, the distance of its rows, and a pointer
    COUNT: tl.constexpr,
    TILE_CI: tl.constexpr,
    TILE_CO: tl.constexpr,
):
    """Of the gradient that the block is of: CI, CO, distance and pointer; and the first channels
    of the block."""
    CI, CO, stride, out_ptr = gradients[0]
    start = 0  # of its blocks
    next_start = count_blocks(CI, CO, TILE_CI, TILE_CO)
    for i in tl.static_range(1, COUNT):
        its_CI, its_CO, its_stride, its_ptr = gradients[i]
        if block >= next_start:
            CI = its_CI
            CO = its_CO
            stride = its_stride
            out_ptr = its_ptr
            start = next_start
        next_start += count_blocks(its_CI, its_CO, TILE_CI, TILE_CO)
    ci_blocks = tl.cdiv(CI, TILE_CI)
    ci0 = (block - start) % ci_blocks * TILE_CI
    co0 = (block - start) // ci_blocks * TILE_CO
    return CI, CO, stride, out_ptr, ci0, co0


@triton.jit(do_not_specialize=["programs", "tiles", "whole"])
def _sum_group_kernel(
    part_ptr,  # [programs, PARTS, TILE_CO, TAPS, TILE_CI]
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
    whole,  # blocks in front that have no parts
    TILE_CO: tl.constexpr,
    TILE_CI: tl.constexpr,
    TAPS: tl.constexpr,
    PARTS: tl.constexpr,  # of a program, at most
    EVEN: tl.constexpr,  # as many programs for each block: a program has parts of one block
    ACCUMULATE: tl.constexpr,  # add to what is there
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_inputs()
    NUMBERS: tl.constexpr = TILE_CO * TAPS * TILE_CI
    block = tl.program_id(0) // (NUMBERS // BLOCK)
    offs = tl.program_id(0) % (NUMBERS // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    gradients = (
        (CI1, CO1, stride1, out1_ptr),
        (CI2, CO2, stride2, out2_ptr),
        (CI3, CO3, stride3, out3_ptr),
        (CI4, CO4, stride4, out4_ptr),
    )
    blocks = -whole
    for i in tl.static_range(4):
        blocks += count_blocks(gradients[i][0], gradients[i][1], TILE_CI, TILE_CO)

    # the programs that have the block's first tile and its last
    if EVEN:
        first = block * (programs // blocks)
        last = first + programs // blocks - 1
        second = 0
    else:  # of pieces [p, p + 1) total / P; few divisions, since those of 64 bits are slow
        total = (blocks * tiles).to(tl.int64)
        first = ((block.to(tl.int64) * tiles + 1) * programs - 1) // total
        last = ((block + 1).to(tl.int64) * tiles * programs - 1) // total
        # the first one's second part, if its piece begins in the block before
        second = (first * total // programs < block.to(tl.int64) * tiles).to(tl.int32)
    acc = tl.zeros([BLOCK_S, BLOCK], dtype=tl.float32)
    for program in range(first, last + 1, BLOCK_S):
        offs_p = program + tl.arange(0, BLOCK_S)
        part = offs_p.to(tl.int64) * PARTS + tl.where(offs_p == first, second, 0)
        rows = part_ptr + part[:, None] * NUMBERS
        acc += tl.load(rows + offs[None, :], mask=(offs_p <= last)[:, None], other=0.0)
    result = tl.sum(acc, axis=0)

    block += whole
    CI, CO, stride, out_ptr, ci0, co0 = gradient_of(block, gradients, 4, TILE_CI, TILE_CO)
    co = co0 + offs // (TAPS * TILE_CI)
    ci = ci0 + offs % TILE_CI
    mask = (co < CO) & (ci < CI)
    out_ptrs = out_ptr + co.to(tl.int64) * stride + offs // TILE_CI % TAPS * CI + ci
    if ACCUMULATE:
        result += tl.load(out_ptrs, mask=mask, other=0.0)
    tl.store(out_ptrs, result, mask=mask)


def sum_group(
    parts: Tensor,  # float32 [programs, parts, TILE_CO, R * S, TILE_CI], as `group_wgrad` has them
    outs: Sequence[Tensor],  # float32 [CO, CI, R, S], a channel of y is a row [R, S, CI]
    tiles: int,  # of the sum of a block of channels
    accumulate: bool,
    whole: int = 0,  # blocks in front that have no parts
) -> None:
    programs, most_parts, tile_co, taps, tile_ci = parts.shape
    assert len(outs) <= MOST
    blocks = sum(-(-o.shape[0] // tile_co) * -(-o.shape[1] // tile_ci) for o in outs) - whole
    assert blocks <= programs <= blocks * tiles  # else there are more than two parts a program
    even = programs % blocks == 0
    assert even or most_parts == 2
    most = -(-programs // blocks) + most_parts - 1  # parts of a sum: of two blocks, one more
    block_s = min(triton.next_power_of_2(most), 16)  # as in `column_sum`
    numbers = tile_co * taps * tile_ci
    block = min(2048 // block_s, numbers & -numbers)  # that divides them
    _sum_group_kernel[(blocks * (numbers // block),)](
        parts,
        *filled(outs, MOST, outs[0]),
        *channels_of([o.shape[1] for o in outs], [o.shape[0] for o in outs]),
        *filled([o.stride(0) for o in outs], MOST),
        programs,
        tiles,
        whole,
        TILE_CO=tile_co,
        TILE_CI=tile_ci,
        TAPS=taps,
        PARTS=most_parts,
        EVEN=even,
        ACCUMULATE=accumulate,
        BLOCK_S=block_s,
        BLOCK=block,
        **overlapping(parts.device),
    )
