"""A tile whose sum several programs share: few tiles with long sums keep few multiprocessors busy.

    parts[tile, part]   float32 [BLOCK_C, BLOCK_M], in memory that the launch brings

Each program leaves its part; the one that arrives last adds all of them in their order, so that
equal bits come at every run, and does the epilogue (`reductions.last_program`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reductions.last_program import is_last, zero_counters


@triton.jit
def _part_of_tile(parts_ptr, part, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr):
    """Where that part of this program's tile is, [BLOCK_C, BLOCK_M]."""
    at = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + part) * (BLOCK_C * BLOCK_M)
    offs = tl.arange(0, BLOCK_C)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    return parts_ptr + at + offs


@triton.jit
def leave_part(acc, parts_ptr, counters_ptr):
    """Store this program's part. Whether it is the last of its tile: all parts are there."""
    tl.store(_part_of_tile(parts_ptr, tl.program_id(1), acc.shape[0], acc.shape[1]), acc)
    return is_last(counters_ptr + tl.program_id(0), tl.num_programs(1))


@triton.jit
def sum_of_parts(acc, parts_ptr):
    """The sum of a tile's parts, once they are there; of the shape of `acc`."""
    total = tl.zeros_like(acc)
    for part in tl.range(tl.num_programs(1), loop_unroll_factor=4):  # their loads wait together
        ptrs = _part_of_tile(parts_ptr, part, acc.shape[0], acc.shape[1])
        total += tl.load(ptrs, cache_modifier=".cg")  # which all multiprocessors share
    return total


class Shared(NamedTuple):
    """How the sums of tiles are shared, as kernels take it."""

    grid: tuple[int, ...]
    parts: Tensor | None = None  # float32 [tiles, splits, BLOCK_C, BLOCK_M]
    counters: Tensor | None = None  # int32 [tiles], zero before and after
    steps: int | None = None  # of a part; None: each program has a tile of its own


def shared(
    config: tuple,  # of the kernel; without `splits` no sum is shared
    tiles: int,
    taps: int,
    channels: Sequence[int],  # of the convolution, and of 1x1 convolutions that are added
    x: Tensor,  # from whose device memory is taken
) -> Shared:
    """For so many tiles."""
    splits = getattr(config, "splits", 1)
    if splits == 1:
        return Shared((tiles,))
    block_c, block_m, block_k, *_ = config
    parts = x.new_empty((tiles, splits, block_c, block_m), dtype=torch.float32)
    steps = triton.cdiv(steps_of(block_k, taps, channels), splits)
    return Shared((tiles, splits), parts, zero_counters(tiles, x.device), steps)


def steps_of(block_k: int, taps: int, channels: Sequence[int]) -> int:
    """Those of a whole sum, with so many channels each."""
    main, *more = (triton.cdiv(c, block_k) for c in channels)
    return taps * main + sum(more)
