"""GroupNorm of an image that a cluster of thread blocks keeps in shared memory; see `group_norm`
for the formulas. For Hopper and 16-bit tensors.

    forward   read x, synchronise, write y            two passes over memory
    backward  read x and dy, synchronise, write dx    three

A cluster of CTAS thread blocks has whole groups of one sample: PARTS blocks of BLOCK_C channels.
The pixels are divided among the thread blocks. Each thread block writes its partial sums to memory,
waits for the others at the cluster's barrier, and adds the partial sums of all, in the same order
in every thread block: the same input gives the same bits. The partial sums are those of
`norm.multi_pass`, and are merged in the same way.

The hardware starts the thread blocks of a cluster together or not at all, so the barrier cannot
deadlock, whatever else the GPU runs.

A cluster may loop over several tasks (samples, or blocks of their channels), and loads the tiles
of the next task as soon as those of the current one are free. Backward it may also take the sums of
the next task while it still writes the current one: all thread blocks write at about the same time,
and would otherwise wait for memory.
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


@configures("cluster")
class ClusterConfig(NamedTuple):
    """How channels are divided among clusters, and pixels among the thread blocks of a cluster."""

    ctas: int
    num_warps: int
    parts: int
    block_c: int
    rounds: int  # tasks of a cluster
    # Backward: groups of tiles between a load and the sums of what it loads, which are taken while
    # the task before is written; 0: the sums are taken after that
    lag: int = 0


_GOOD_BYTES = 64 * 1024  # of an image per thread block: three of them fit a multiprocessor
_LEAST_BYTES = 16 * 1024
_MULTIPROCESSOR_BYTES = 220 * 1024  # of shared memory, without what sums need
# of an image per thread block: two of them fit a multiprocessor
_MOST_BYTES = _MULTIPROCESSOR_BYTES // 2
_LEAST_REGISTERS = 64  # of a thread
_MOST_PARTS = 8
_MOST_CONFIGS = 6
_ROUNDS = (1, 2, 3, 6)
_LAG = 2
_LAG_ROUNDS = (3, 6)
_SUMS_REGISTERS = 128  # of a thread, for the sums of one task beside the writing of another
_MOST_CHANNELS = 16  # of a group, whose sums are in one warp


def _tiles(config: ClusterConfig, hw: int) -> int:
    """Tiles of pixels of each part of a thread block; 0 if they do not divide the image."""
    rows = config.ctas * config.num_warps * 256 // config.block_c
    return hw // rows if hw % rows == 0 else 0


def _bytes(config: ClusterConfig, hw: int, tensors: int) -> int:
    """Bytes of x, or of x and dy, in a thread block."""
    return tensors * 2 * hw * config.parts * config.block_c // config.ctas


def _launch(config: ClusterConfig, hw: int, tensors: int) -> dict[str, int]:
    """Launch options. Registers are limited so that as many thread blocks fit a multiprocessor as
    its shared memory allows."""
    resident = _MULTIPROCESSOR_BYTES // _bytes(config, hw, tensors)
    registers = thread_registers(WARP * config.num_warps * resident)
    registers = min(max(registers, _LEAST_REGISTERS), THREAD_REGISTERS // 8 * 8)
    return {"num_warps": config.num_warps, "num_ctas": config.ctas, "maxnreg": registers}


def _can_lag(config: ClusterConfig, hw: int, tensors: int) -> bool:
    enough = _launch(config, hw, tensors)["maxnreg"] >= _SUMS_REGISTERS
    return tensors == 2 and config.parts == 1 and enough


@lru_cache
def _candidates(hw: int, c: int, num_groups: int, tensors: int) -> tuple[ClusterConfig, ...]:
    """All configurations. Those with about three thread blocks on a multiprocessor, and few in a
    cluster, come first."""
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
    """Number of clusters: at least two thread blocks for every multiprocessor, if there are enough
    tasks."""
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
    y = x.new_empty(x.shape)
    stats = x.new_empty((2, n, num_groups), dtype=torch.float32)
    partial = x.new_empty((n, ctas, 2, c), dtype=torch.float32)
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
    sums = x.new_empty((n, 1, 2, c), dtype=torch.float32)
    partial = x.new_empty((n, ctas, 2, c), dtype=torch.float32)
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
