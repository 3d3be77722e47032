"""GroupNorm of an image that the thread blocks of a cluster keep in shared memory between them; see
`group_norm` for the formulas. For Hopper and 16-bit tensors.

    forward   read x, meet, write y                 two passes over memory
    backward  read x and dy, meet, write dx         three

A cluster of CTAS thread blocks has whole groups of one sample: PARTS blocks of BLOCK_C channels,
and each thread block every so many of their pixels. It puts its partial sums into memory, waits for
the others at the cluster's barrier, and adds up those of all, in the same order everywhere: the
same input gives the same bits. What the partials are and how they are merged is as in
`norm.multi_pass`.

The hardware starts the thread blocks of a cluster together or not at all, so that the barrier is
safe whatever else the GPU has to do.

A cluster may go through several tasks, samples or their blocks of channels, and asks for the next
one's tiles as it is done with those of one. Backward it may also take the next one's sums as they
come, while it still writes: all thread blocks write at about the same time, and then memory keeps
them waiting.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..activations import rounded_grad
from ..hopper.descriptors import SUPPORTED, missing
from ..registry.cost import of_passes
from ..registry.kernel import Kernel, configures
from ..registry.spec import NormSpec
from ..runtime.device import Device, describe
from ..runtime.hardware import THREAD_REGISTERS, WARP, thread_registers
from .multi_pass import Halves, Params, empty_like, extent, row_strides

if SUPPORTED:
    from .cluster_grad_kernels import group_norm_cluster_bwd_kernel
    from .cluster_kernels import group_norm_cluster_fwd_kernel

_empty = torch.empty  # tests put a function here that returns NaNs


@configures("cluster")
class ClusterConfig(NamedTuple):
    """How a sample's channels are cut into clusters, and their pixels into thread blocks."""

    ctas: int
    num_warps: int
    parts: int
    block_c: int
    rounds: int  # of samples and blocks of channels that a cluster goes through
    # Backward, groups of tiles from a request to the sums of what it brings, which are then taken
    # while the task before is written; 0: when that is done
    lag: int = 0


_GOOD_BYTES = 64 * 1024  # of it, three to a multiprocessor
_LEAST_BYTES = 16 * 1024
_MULTIPROCESSOR_BYTES = 220 * 1024  # of shared memory, less some for sums
# of an image that a thread block keeps: two to a multiprocessor
_MOST_BYTES = _MULTIPROCESSOR_BYTES // 2
_LEAST_REGISTERS = 64  # of a thread
_MOST_PARTS = 8
_MOST_CONFIGS = 6
_ROUNDS = (1, 2, 3, 6)
_LAG = 2
_LAG_ROUNDS = (3, 6)
_SUMS_REGISTERS = 128  # of a thread, for the sums of one task beside the writing of another
_MOST_CHANNELS = 16  # of a group; their sums are in one warp


def _tiles(config: ClusterConfig, hw: int) -> int:
    """Of pixels, that each part of a thread block has; 0 if they do not come out even."""
    rows = config.ctas * config.num_warps * 256 // config.block_c
    return hw // rows if hw % rows == 0 else 0


def _bytes(config: ClusterConfig, hw: int, tensors: int) -> int:
    """Of the images, x or x and dy, in a thread block."""
    return tensors * 2 * hw * config.parts * config.block_c // config.ctas


def _launch(config: ClusterConfig, hw: int, tensors: int) -> dict[str, int]:
    """No more registers than let as many thread blocks on a multiprocessor as its memory does."""
    resident = _MULTIPROCESSOR_BYTES // _bytes(config, hw, tensors)
    registers = thread_registers(WARP * config.num_warps * resident)
    registers = min(max(registers, _LEAST_REGISTERS), THREAD_REGISTERS // 8 * 8)
    return {"num_warps": config.num_warps, "num_ctas": config.ctas, "maxnreg": registers}


def _can_lag(config: ClusterConfig, hw: int, tensors: int) -> bool:
    enough = _launch(config, hw, tensors)["maxnreg"] >= _SUMS_REGISTERS
    return tensors == 2 and config.parts == 1 and enough


@lru_cache
def _candidates(hw: int, c: int, num_groups: int, tensors: int) -> tuple[ClusterConfig, ...]:
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
                size = _bytes(config, hw, tensors)
                tiles = _tiles(config, hw)
                if 0 < tiles * parts <= 32 and _LEAST_BYTES <= size <= _MOST_BYTES:
                    found.append(config)

    def key(config: ClusterConfig) -> tuple[int, int]:
        return abs(_bytes(config, hw, tensors) - _GOOD_BYTES), config.ctas

    ordered = sorted(found, key=key)[:_MOST_CONFIGS]
    lagging = [config._replace(lag=_LAG) for config in ordered if _can_lag(config, hw, tensors)]
    ways = [(_ROUNDS, ordered), (_LAG_ROUNDS, lagging)]
    return tuple(c._replace(rounds=r) for rounds, configs in ways for r in rounds for c in configs)


def _refuse(spec: NormSpec, gpu: Device) -> str | None:
    """A cluster holds whole groups of a sample, which it reads 16 bytes at a time, forward and
    backward."""
    if reason := missing(gpu, spec.itemsize):
        return reason
    if spec.c2 or not spec.aligned:
        return "two tensors, or one that begins at no multiple of 16 bytes"
    if spec.grad and not spec.dx:
        return "nobody wants the gradient of x"
    both = (_candidates(spec.pixels, spec.c, spec.groups, tensors) for tensors in (1, 2))
    size = f"{spec.n} images of {spec.pixels} pixels of {spec.c} channels in {spec.groups} groups"
    return None if spec.n and spec.pixels and all(both) else f"{size} fit no cluster"


def _configs(spec: NormSpec, gpu: Device) -> tuple[ClusterConfig, ...]:
    return _candidates(spec.pixels, spec.c, spec.groups, 2 if spec.grad else 1)


def _cost(spec: NormSpec, gpu: Device, config: ClusterConfig) -> float:
    return of_passes(spec.bytes, 1, meetings=1)


def _clusters(tasks: int, config: ClusterConfig, device: torch.device) -> int:
    """How many there are: no fewer than give every multiprocessor two thread blocks, if there are
    tasks for so many."""
    most_rounds = tasks * config.ctas // (2 * describe(device).num_sms)
    return triton.cdiv(tasks, min(config.rounds, max(most_rounds, 1)))


def _forward(
    config: ClusterConfig,
    xs: Halves,
    num_groups: int,
    eps: float,
    params: Params,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """y, and mean and rstd as [2, N, G]."""
    x, (n, hw, c) = xs[0], extent(xs)
    ctas, _, parts, block_c, *_ = config
    tasks = n * (c // (parts * block_c))
    y = _empty(x.shape, dtype=x.dtype, device=x.device)
    stats = _empty((2, n, num_groups), dtype=torch.float32, device=x.device)
    partial = _empty((n, ctas, 2, c), dtype=torch.float32, device=x.device)
    tile = (ctas, _tiles(config, hw), parts, block_c)
    group_norm_cluster_fwd_kernel[(_clusters(tasks, config, x.device),)](
        x, partial, *stats, *params, y, *row_strides(params), eps, tasks, c, c // num_groups,
        activation, *tile, **_launch(config, hw, 1),
    )  # fmt: skip
    return y, stats


def _backward(
    config: ClusterConfig,
    xs: Halves,
    dy: Tensor,
    stats: Tensor,
    params: Params,
    activation: str,
    dx: bool,  # always
) -> tuple[Halves, Tensor]:
    """The gradient of x, and D and E as float32 [N, 1, 2, C]."""
    x, (n, hw, c) = xs[0], extent(xs)
    g = stats.shape[2]
    ctas, _, parts, block_c, *_ = config
    tasks = n * (c // (parts * block_c))
    dxs = empty_like(xs)
    sums = _empty((n, 1, 2, c), dtype=torch.float32, device=x.device)
    partial = _empty((n, ctas, 2, c), dtype=torch.float32, device=x.device)
    clusters = _clusters(tasks, config, x.device)
    lag = config.lag if tasks > clusters else 0
    tile = (ctas, _tiles(config, hw), parts, block_c, lag)
    group_norm_cluster_bwd_kernel[(clusters,)](
        x, dy, partial, sums, *stats, *params, dxs[0], *row_strides(params), tasks, c, c // g,
        activation, rounded_grad(activation, x.dtype), *tile, **_launch(config, hw, 2),
    )  # fmt: skip
    return dxs, sums


CLUSTER = Kernel("cluster", ClusterConfig, _refuse, _configs, _cost, _forward)
CLUSTER_GRAD = Kernel("cluster", ClusterConfig, _refuse, _configs, _cost, _backward)
