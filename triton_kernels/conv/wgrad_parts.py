"""What kernels of several weight gradients in one launch (`conv.wgrad_group`) share: operands, and
the second launch, which adds the parts of up to four gradients."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry.spec import WeightGradsSpec
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.device import Device, describe

MOST = 4  # gradients in one launch
LISTED = 4  # numbers of parts that are listed for a tile: those with the fewest successive steps


class Gradient(NamedTuple):
    """One to be computed."""

    x: Tensor  # [N, H, W, CI]
    dy: Tensor  # [N, H, W, CO]
    out: Tensor  # float32 [CO, CI, R, S] to be written; a channel of y is a row [R, S, CI]


class GroupOperands(NamedTuple):
    """Those of `conv_weight_grads`."""

    gradients: Sequence[Gradient]
    spec: WeightGradsSpec
    accumulate: bool = False  # add to what is there
    share: float = 1.0  # of the multiprocessors

    @property
    def gpu(self) -> Device:
        return describe(self.gradients[0].x.device)

    @property
    def outs(self) -> list[Tensor]:
        return [g.out for g in self.gradients]

    def parts(self, pieces: int, splits: int, *block: int) -> Tensor:
        """Room for the sums of so many pieces, each of one part of a block [CO, R * S, CI] or,
        without splits, of parts of two."""
        shape = pieces, 1 if splits else 2, *block
        return self.gradients[0].x.new_empty(shape, dtype=torch.float32)


def filled(values: Sequence[Any], count: int, other: Any = 0) -> list:
    """The values, padded to `count` arguments for gradients that are absent."""
    return [*values, *[other] * (count - len(values))]


def channels_of(ci: Sequence[int], co: Sequence[int]) -> list[int]:
    """Arguments CI1 to CI4 and CO1 to CO4."""
    return filled(ci, MOST) + filled(co, MOST)


@triton.jit
def count_blocks(CI, CO, TILE_CI: tl.constexpr, TILE_CO: tl.constexpr):
    """Number of blocks of channels of a gradient."""
    return tl.cdiv(CI, TILE_CI) * tl.cdiv(CO, TILE_CO)


@triton.jit
def gradient_of(
    block,  # in the list of the blocks of all gradients
    gradients,  # for each: CI, CO, the stride of its rows, and a pointer
    COUNT: tl.constexpr,
    TILE_CI: tl.constexpr,
    TILE_CO: tl.constexpr,
):
    """CI, CO, stride and pointer of the gradient that the block belongs to; and the first channels
    of the block."""
    CI, CO, stride, out_ptr = gradients[0]
    start = 0  # first block of the gradient
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
    tiles,  # tiles of pixels per block
    whole,  # first blocks of the list, which have no parts
    TILE_CO: tl.constexpr,
    TILE_CI: tl.constexpr,
    TAPS: tl.constexpr,
    PARTS: tl.constexpr,  # most parts of a program
    EVEN: tl.constexpr,  # every block has equally many programs, so a program has one block's parts
    ACCUMULATE: tl.constexpr,  # add to what memory holds
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

    # the programs with the block's first tile and with its last
    if EVEN:
        first = block * (programs // blocks)
        last = first + programs // blocks - 1
        second = 0
    else:  # program p has tiles [p, p + 1) total / P; few divisions, since 64-bit ones are slow
        total = (blocks * tiles).to(tl.int64)
        first = ((block.to(tl.int64) * tiles + 1) * programs - 1) // total
        last = ((block + 1).to(tl.int64) * tiles * programs - 1) // total
        # the second part of the first program, if its piece begins in the block before
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
    parts: Tensor,  # float32 [programs, parts, TILE_CO, R * S, TILE_CI], of `GroupOperands.parts`
    outs: Sequence[Tensor],  # float32 [CO, CI, R, S], a channel of y is a row [R, S, CI]
    tiles: int,  # tiles of pixels per block
    accumulate: bool,
    whole: int = 0,  # first blocks of the list, which have no parts
) -> None:
    programs, most_parts, tile_co, taps, tile_ci = parts.shape
    assert len(outs) <= MOST
    blocks = sum(-(-o.shape[0] // tile_co) * -(-o.shape[1] // tile_ci) for o in outs) - whole
    assert blocks <= programs <= blocks * tiles  # else there are more than two parts a program
    even = programs % blocks == 0
    assert even or most_parts == 2
    most = -(-programs // blocks) + most_parts - 1  # parts of a block, at most
    block_s = min(triton.next_power_of_2(most), 16)  # as in `column_sum`
    numbers = tile_co * taps * tile_ci
    block = min(2048 // block_s, numbers & -numbers)  # divides them
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
