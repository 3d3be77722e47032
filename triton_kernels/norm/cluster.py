"""GroupNorm of an image that the thread blocks of a cluster keep in shared memory between them; see
`group_norm` for the formulas. Forward, for Hopper and 16-bit tensors: x is read, the thread blocks
meet, y is written, two passes over memory.

A cluster of CTAS thread blocks has whole groups of one sample: PARTS blocks of BLOCK_C channels,
and each thread block every so many of their pixels. It puts its partial sums into memory, waits for
the others at the cluster's barrier, and adds up those of all, in the same order everywhere: the
same input gives the same bits. What the partials are and how they are merged is as in
`norm.stream`.

The hardware starts the thread blocks of a cluster together or not at all, so that the barrier is
safe whatever else the GPU has to do.

A cluster may go through several tasks, samples or their blocks of channels, and asks for the next
one's tiles as it is done with those of one.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..device import describe
from ..gluon.descriptors import SUPPORTED, takes
from ..tuning import choose
from .stream import Halves, Params, extent, row_strides

if SUPPORTED:
    from .cluster_kernels import group_norm_cluster_fwd_kernel

_empty = torch.empty  # tests put a function here that returns NaNs


class ClusterConfig(NamedTuple):
    """How a sample's channels are cut into clusters, and their pixels into thread blocks."""

    ctas: int
    num_warps: int
    parts: int
    block_c: int
    rounds: int  # of samples and blocks of channels that a cluster goes through


_MOST_BYTES = 110 * 1024  # of an image that a thread block keeps: two to a multiprocessor
_GOOD_BYTES = 64 * 1024  # three
_LEAST_BYTES = 16 * 1024
_MULTIPROCESSOR_BYTES = 220 * 1024  # of shared memory, less some for sums
_REGISTERS = 65536  # of a multiprocessor
_LEAST_REGISTERS, _MOST_REGISTERS = 64, 248  # of a thread
_MOST_PARTS = 8
_MOST_CONFIGS = 6
_ROUNDS = (1, 2, 3, 6)
_MOST_CHANNELS = 16  # of a group; their sums are in one warp


def _tiles(config: ClusterConfig, hw: int) -> int:
    """Of pixels, that each part of a thread block has; 0 if they do not come out even."""
    rows = config.ctas * config.num_warps * 256 // config.block_c
    return hw // rows if hw % rows == 0 else 0


def _bytes(config: ClusterConfig, hw: int) -> int:
    """Of the image, in a thread block."""
    return 2 * hw * config.parts * config.block_c // config.ctas


def _launch(config: ClusterConfig, hw: int) -> dict[str, int]:
    """No more registers than let as many thread blocks on a multiprocessor as its memory does."""
    resident = _MULTIPROCESSOR_BYTES // _bytes(config, hw)
    registers = _REGISTERS // (32 * config.num_warps * resident) // 8 * 8
    registers = min(max(registers, _LEAST_REGISTERS), _MOST_REGISTERS)
    return {"num_warps": config.num_warps, "num_ctas": config.ctas, "maxnreg": registers}


@lru_cache
def _candidates(hw: int, c: int, num_groups: int) -> tuple[ClusterConfig, ...]:
    """All that can do it. Those with about three thread blocks on a multiprocessor and few in a
    cluster come first."""
    cg = c // num_groups
    if cg > _MOST_CHANNELS:
        return ()
    found = []
    for block_c in (64, 32, 128):
        # the fewest channels that are whole groups
        parts = next((p for p in range(1, _MOST_PARTS + 1) if p * block_c % cg == 0), 0)
        if parts == 0 or c % (parts * block_c) > 0:
            continue
        for ctas in (1, 2, 4, 8, 16):
            for num_warps in (4, 8):
                config = ClusterConfig(ctas, num_warps, parts, block_c, 1)
                size = _bytes(config, hw)
                tiles = _tiles(config, hw)
                if 0 < tiles * parts <= 32 and _LEAST_BYTES <= size <= _MOST_BYTES:
                    found.append(config)

    def key(config: ClusterConfig) -> tuple[int, int]:
        return abs(_bytes(config, hw) - _GOOD_BYTES), config.ctas

    ordered = sorted(found, key=key)[:_MOST_CONFIGS]
    return tuple(config._replace(rounds=rounds) for rounds in _ROUNDS for config in ordered)


def can_cluster(xs: Halves, num_groups: int) -> bool:
    """Whether a cluster can hold whole groups of a sample, which it reads 16 bytes at a time."""
    x, x2 = xs
    if x2 is not None or x.device.type != "cuda" or not takes(x) or x.data_ptr() % 16 > 0:
        return False
    n, hw, c = extent(xs)
    return n > 0 and hw > 0 and len(_candidates(hw, c, num_groups)) > 0


def _clusters(tasks: int, config: ClusterConfig, device: torch.device) -> int:
    """How many there are: no fewer than give every multiprocessor two thread blocks, if there are
    tasks for so many."""
    most_rounds = tasks * config.ctas // (2 * describe(device).num_sms)
    return triton.cdiv(tasks, min(config.rounds, max(most_rounds, 1)))


def cluster_fwd(
    xs: Halves,
    num_groups: int,
    eps: float,
    params: Params,
    activation: str,
    config: ClusterConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """y, and mean and rstd as [2, N, G]."""
    x, (n, hw, c) = xs[0], extent(xs)
    if config is None:

        def run(f: ClusterConfig) -> Tensor:
            return cluster_fwd(xs, num_groups, eps, params, activation, f)[0]

        configs = _candidates(hw, c, num_groups)
        key = (n, hw, c, c, num_groups, x.dtype)
        config = choose("group_norm_cluster", key, lambda: configs, lambda: configs[0], run)
    ctas, _, parts, block_c, _ = config
    tasks = n * (c // (parts * block_c))
    y = _empty(x.shape, dtype=x.dtype, device=x.device)
    stats = _empty((2, n, num_groups), dtype=torch.float32, device=x.device)
    partial = _empty((n, ctas, 2, c), dtype=torch.float32, device=x.device)
    tile = (ctas, _tiles(config, hw), parts, block_c)
    group_norm_cluster_fwd_kernel[(_clusters(tasks, config, x.device),)](
        x, partial, *stats, *params, y, *row_strides(params), eps, tasks, c, c // num_groups,
        activation, *tile, **_launch(config, hw),
    )  # fmt: skip
    return y, stats
