"""GroupNorm of an image of any size, in passes over memory; see `group_norm` for the formulas.

    forward   partials (read x), table, apply (read x, write y)
    backward  sums (read x, dy), finalize, dx (read x, dy, write dx), params

The three without brackets are small. Those of forward are the fused step's (`norm.tables`,
`norm.passes`). Sums of squares cancel when the mean is large, so every lane of a tile runs
Welford's recurrence over its pixels, and lanes, chunks and channels are then merged by Chan's
formula: no partial is ever a difference of large numbers. Partials are merged in a fixed order,
without atomics: the same input gives the same bits.

A tile is BLOCK_P pixels by BLOCK_C channels. TILES tiles make the chunk of pixels of one program,
K chunks an image, CB blocks of channels the C channels. CG = C // G.

x may be x1 beside x2 along the channels, a concatenation that is never in memory: the first CB1
blocks of channels are of x1 and its C1 channels, the others of x2. What a program shares with
others, it keeps at the channel's place in the whole.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..registry.choose import select
from ..registry.cost import CACHE, of_passes
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import NormSpec, dtype_name
from ..runtime.dependent_launch import dependent_launches
from ..runtime.device import Device, describe
from .multi_pass_kernels import (
    group_norm_bwd_dx_kernel,
    group_norm_bwd_finalize_kernel,
    group_norm_bwd_params_kernel,
    group_norm_bwd_sums_kernel,
)
from .pass_grid import PassConfig, PassGrid, cut_pass
from .passes import apply
from .tables import norm_table, partials_of

_empty = torch.empty  # tests put a function here that returns NaNs

# [N, H, W, C1] and, if the norm is over a concatenation, [N, H, W, C - C1]
Halves = tuple[Tensor, Tensor | None]
# weight and bias: [C]; scale and shift: [N, C]
Params = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

# Sixteen to 32 elements a thread, so that each thread has two or more 16-byte loads in flight and
# its accumulators stay within 64 registers; the number of tiles trades the reduction at the end of
# a program against an even spread of programs over the chip.
#
# Sums over the pixels of a tile go from warp to warp through shared memory, number by number, each
# lane's eight channels one after the other: the lanes are then 128 bytes apart with four warps, on
# one bank. One warp needs none of it, and in large images it is the faster (`_pass`).
_STATS_CONFIGS = [
    PassConfig(4096, 4, 4),
    PassConfig(2048, 4, 4),
    PassConfig(4096, 8, 4),
    PassConfig(8192, 4, 8),
    PassConfig(2048, 8, 4),
    PassConfig(2048, 16, 4),
    PassConfig(4096, 16, 4),
    PassConfig(4096, 8, 8),
    PassConfig(1024, 8, 1),
    PassConfig(1024, 16, 1),
    PassConfig(512, 16, 1),
    PassConfig(512, 32, 1),
    PassConfig(1024, 16, 2),
]
_SUMS_CONFIGS = [
    PassConfig(2048, 8, 4),
    PassConfig(2048, 4, 4),
    PassConfig(4096, 4, 8),
    PassConfig(4096, 8, 8),
    PassConfig(2048, 16, 4),
    PassConfig(1024, 16, 4),
    PassConfig(512, 16, 1),
    PassConfig(512, 8, 1),
    PassConfig(256, 16, 1),
    PassConfig(1024, 8, 2),
]
_DX_CONFIGS = [
    PassConfig(2048, 2, 4),
    PassConfig(2048, 4, 4),
    PassConfig(4096, 2, 8),
    PassConfig(2048, 1, 4),
    PassConfig(4096, 1, 8),
    PassConfig(1024, 4, 4),
]


_ONE_WARP = PassConfig(512, 16, 1)  # of the first and third list


def _cut(xs: Halves, config: PassConfig) -> PassGrid:
    n, hw, c = extent(xs)
    c1 = xs[0].shape[3]
    return cut_pass(n, hw, c1, c - c1, config, describe(xs[0].device))


def _group_blocks(g: int, elements: int) -> tuple[int, int]:
    """BLOCK_G, BLOCK_E of a finalize kernel that merges `elements` partials a group."""
    block_e = min(triton.next_power_of_2(max(elements, 1)), 512)
    return min(max(1024 // block_e, 1), triton.next_power_of_2(g)), block_e


def extent(xs: Halves) -> tuple[int, int, int]:
    """N, H W and C of the whole."""
    x, x2 = xs
    n, h, w, c1 = x.shape
    return n, h * w, c1 if x2 is None else c1 + x2.shape[3]


def row_strides(params: Params) -> tuple[int, int]:
    """Elements between the rows of scale and of shift."""
    return tuple(0 if p is None else p.stride(0) for p in params[2:])


def spec_of(xs: Halves, num_groups: int, **rest: Any) -> NormSpec:
    """What a GroupNorm of these tensors computes."""
    x, x2 = xs
    n, h, w, c1 = x.shape
    c2 = 0 if x2 is None else x2.shape[3]
    return NormSpec(n, dtype_name(x.dtype), h, w, c1, c2, num_groups, **rest)


KEY = ("pixels", "c1", "c", "groups", "dtype")  # on which a measurement of the ops depends


def _pass(name: str, listed: list[PassConfig]) -> Op:
    """A pass, whose configurations are these."""

    def configs(spec: NormSpec, gpu: Device) -> list[PassConfig]:
        # from two rounds of programs on every shape that was timed had a faster pass with it
        large = spec.elements >= 2 * gpu.busy * _ONE_WARP.tile * _ONE_WARP.tiles
        return [_ONE_WARP, *listed] if large and _ONE_WARP in listed else listed

    return Op(name, KEY, (Kernel("pass", PassConfig, lambda *_: None, configs),), similar=False)


STATS = _pass("group_norm_stats", _STATS_CONFIGS)
SUMS = _pass("group_norm_sums", _SUMS_CONFIGS)
DX = _pass("group_norm_dx", _DX_CONFIGS)


def _chosen(op: Op, xs: Halves, num_groups: int, run: Callable[[PassConfig], Tensor]) -> PassConfig:
    spec = spec_of(xs, num_groups, grad=op in (SUMS, DX))
    return select(op, spec, describe(xs[0].device), run).config


def stream_partials(xs: Halves, num_groups: int, config: PassConfig | None = None) -> Tensor:
    """The sums of x that `norm_table` wants: float32 [N, K, 2, C]."""
    if config is None:

        def run(c: PassConfig) -> Tensor:
            partials = stream_partials(xs, num_groups, c)
            return partials if partials.shape[1] == 1 else partials[:, :, 0].sum(1)

        config = _chosen(STATS, xs, num_groups, run)
    grid = _cut(xs, config)
    return partials_of(xs, grid.k, grid.block_p, grid.block_c, config.num_warps)


def _shape(xs: Halves, stats: Tensor, params: Params, grid: PassGrid) -> tuple[int, ...]:
    """Arguments that the kernels over x have in common."""
    _, hw, c = extent(xs)
    g = stats.shape[2]
    return *row_strides(params), hw, xs[0].shape[3], c, g, grid.k, grid.cb1, grid.cb, c // g


def stream_sums(
    xs: Halves,
    dy: Tensor,
    stats: Tensor,
    params: Params,
    activation: str,
    config: PassConfig | None = None,
) -> Tensor:
    """D and E of every chunk: float32 [N, K, 2, C]."""
    if config is None:

        def run(c: PassConfig) -> Tensor:
            sums = stream_sums(xs, dy, stats, params, activation, c)
            return sums if sums.shape[1] == 1 else sums.sum(1)

        config = _chosen(SUMS, xs, stats.shape[2], run)
    grid = _cut(xs, config)
    n, _, c = extent(xs)
    sums = _empty((n, grid.k, 2, c), dtype=torch.float32, device=dy.device)
    shape = _shape(xs, stats, params, grid)
    group_norm_bwd_sums_kernel[(grid.programs,)](
        *xs, dy, *stats, *params, sums, *shape, activation, *grid.tile, num_warps=config.num_warps
    )
    return sums


def empty_like(xs: Halves) -> Halves:
    """Where their gradients go."""
    return tuple(None if x is None else _empty(x.shape, dtype=x.dtype, device=x.device) for x in xs)


def stream_dx(
    xs: Halves,
    dy: Tensor,
    stats: Tensor,
    sums: Tensor,  # of `stream_sums`
    params: Params,
    activation: str,
    config: PassConfig | None = None,
) -> Halves:
    """The gradient of x."""
    n, hw, c = extent(xs)
    g, k = stats.shape[2], sums.shape[1]
    if config is None:

        def run(c: PassConfig) -> Tensor:
            return stream_dx(xs, dy, stats, sums, params, activation, c)[0]

        config = _chosen(DX, xs, g, run)
    weight, _, scale, _ = params
    m1_m2 = _empty((2, n, g), dtype=torch.float32, device=dy.device)
    block_g, block_e = _group_blocks(g, k * (c // g))
    blocks = triton.cdiv(g, block_g)
    shape = (row_strides(params)[0], hw, c, g, blocks, k, c // g)
    group_norm_bwd_finalize_kernel[(n * blocks,)](
        sums, weight, scale, *m1_m2, *shape, block_g, block_e
    )
    grid = _cut(xs, config)
    dxs = empty_like(xs)
    shape = _shape(xs, stats, params, grid)
    group_norm_bwd_dx_kernel[(grid.programs,)](
        *xs, dy, *stats, *m1_m2, *params, *dxs, *shape, activation, *grid.tile,
        num_warps=config.num_warps,
    )  # fmt: skip
    return dxs


def params_grad(
    sums: Tensor,  # float32 [N, K, 2, C]: D and E of every chunk
    params: Params,
    needed: tuple[bool, bool, bool, bool],
) -> Params:
    """Gradients of weight, bias, scale and shift, those that are needed, each in its dtype."""
    n, k, _, c = sums.shape
    weight, bias, scale, _ = params
    grads = tuple(
        _empty(p.shape, dtype=p.dtype, device=p.device) if need else None
        for p, need in zip(params, needed, strict=True)
    )
    block_c = min(triton.next_power_of_2(c), 16)
    block_n = min(triton.next_power_of_2(max(n, 1)), 128)
    block_k = min(triton.next_power_of_2(max(k, 1)), 128 // block_n)
    shape = (row_strides(params)[0], n, c, k)
    group_norm_bwd_params_kernel[(triton.cdiv(c, block_c),)](
        sums, weight, bias, scale, *grads, *shape, block_n, block_k, block_c
    )
    return grads


# --- the kernels of group_norm ------------------------------------------------------------------


@configures("multi_pass")
class MultiPass(NamedTuple):
    """Each pass has a configuration of its own."""


def _forward(_: MultiPass, xs: Halves, num_groups: int, eps: float, params: Params, act: str):
    x, (n, hw, c) = xs[0], extent(xs)
    stats = _empty((2, n, num_groups), dtype=torch.float32, device=x.device)
    if hw == 0:
        return _empty((*x.shape[:3], c), dtype=x.dtype, device=x.device), stats
    partials = stream_partials(xs, num_groups)
    args = (num_groups, *params[:2], eps, *params[2:])
    with dependent_launches():  # as `following`
        table = norm_table((partials,), (hw,), *args, stats_out=stats)
        return apply(*xs, table, act), stats


def _backward(
    _: MultiPass, xs: Halves, dy: Tensor, stats: Tensor, params: Params, act: str, dx: bool
):
    sums = stream_sums(xs, dy, stats, params, act)
    return stream_dx(xs, dy, stats, sums, params, act) if dx else (None, None), sums


def _cost(spec: NormSpec, gpu: Device, config: MultiPass) -> float:
    """What is read twice comes from the L2 cache, if it is small."""
    x = spec.elements * spec.itemsize
    read = spec.bytes - x  # by each of the two passes
    return of_passes(spec.bytes + (read if x >= CACHE else 0), 3)


def _configs(*_: Any) -> list[MultiPass]:
    return [MultiPass()]


MULTI_PASS = Kernel("multi_pass", MultiPass, lambda *_: None, _configs, _cost, _forward)
MULTI_PASS_GRAD = Kernel("multi_pass", MultiPass, lambda *_: None, _configs, _cost, _backward)
