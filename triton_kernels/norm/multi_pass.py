"""GroupNorm of an image of any size, in passes over memory; see `group_norm` for the formulas.

    forward   partials (read x), table, apply (read x, write y)
    backward  sums (read x, dy), coefficients, dx (read x, dy, write dx), params

The three without brackets are small. All but the last are kernels of the fused step too
(`norm.sums`, `norm.tables`, `norm.passes`); here dz is computed twice instead of stored. x may be
x1 beside x2 along the channels.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry.cost import CACHE, of_passes
from ..registry.kernel import Kernel
from ..registry.spec import NormSpec, dtype_name
from ..runtime.dependent_launch import dependent_launches
from ..runtime.device import Device, describe
from .coefficients import affine
from .pass_grid import PassConfig, PassGrid, cut_evenly, cut_pass
from .passes import apply, norm_dx
from .sums import grad_partials_of, partials_of
from .tables import NormGrads, norm_grad_table, norm_table

# [N, H, W, C1] and, if the norm is over a concatenation, [N, H, W, C - C1]
Halves = tuple[Tensor, Tensor | None]
# weight and bias: [C]; scale and shift: [N, C]
Params = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]

# Sixteen to 32 elements a thread, so that each thread has two or more 16-byte loads in flight and
# its accumulators stay within 64 registers; the number of tiles trades the reduction at the end of
# a program against an even spread of programs over the chip.
_STATS = PassConfig(4096, 4, 4)
_SUMS = PassConfig(2048, 8, 4)
# Sums over the pixels of a tile go from warp to warp through shared memory, number by number, each
# lane's eight channels one after the other: the lanes are then 128 bytes apart with four warps, on
# one bank. One warp needs none of it, and from two rounds of programs on either pass was faster
# with it, at every shape that was timed.
_ONE_WARP = PassConfig(512, 16, 1)


def _config(few: PassConfig, xs: Halves) -> PassConfig:
    """That of a pass that takes sums: this one, where there are few programs."""
    round_ = describe(xs[0].device).busy * _ONE_WARP.tile * _ONE_WARP.tiles
    return _ONE_WARP if math.prod(extent(xs)) >= 2 * round_ else few


def _cut(xs: Halves, few: PassConfig) -> tuple[PassGrid, int]:
    """Chunks of one size, about as large as such a pass has them, and the warps of a program."""
    config, (n, hw, c), c1 = _config(few, xs), extent(xs), xs[0].shape[3]
    grid = cut_pass(n, hw, c1, c - c1, config, describe(xs[0].device))
    even = cut_evenly(n, hw, c1, c - c1, grid.k, grid.block_p, grid.block_c)
    return even, config.num_warps


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


def empty_like(xs: Halves) -> Halves:
    """Where their gradients go."""
    return tuple(None if x is None else x.new_empty(x.shape) for x in xs)


@triton.jit
def _group_norm_bwd_params_kernel(
    partial_ptr,  # float32 [N, K, 2, C]: D and E of a chunk
    weight_ptr,  # [C] or None
    bias_ptr,  # [C] or None
    scale_ptr,  # [N, C] or None
    d_weight_ptr,  # [C] or None
    d_bias_ptr,  # [C] or None
    d_scale_ptr,  # [N, C] or None
    d_shift_ptr,  # [N, C] or None
    stride_scale,
    N,
    C,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    d_weight = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    d_bias = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for n0 in range(0, N, BLOCK_N):
        offs_n = n0 + tl.arange(0, BLOCK_N)
        mask = (offs_n < N)[:, None] & mask_c[None, :]
        acc_d = tl.zeros([BLOCK_N, BLOCK_K, BLOCK_C], tl.float32)
        acc_e = tl.zeros([BLOCK_N, BLOCK_K, BLOCK_C], tl.float32)
        for k0 in range(0, K, BLOCK_K):
            offs_k = k0 + tl.arange(0, BLOCK_K)
            mask_k = mask[:, None, :] & (offs_k < K)[None, :, None]
            offs = (offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]) * 2 * C
            offs = offs[:, :, None] + offs_c[None, None, :]
            acc_d += tl.load(partial_ptr + offs, mask=mask_k, other=0.0)
            acc_e += tl.load(partial_ptr + offs + C, mask=mask_k, other=0.0)
        sum_d = tl.sum(acc_d, 1)
        sum_e = tl.sum(acc_e, 1)
        offs_nc = offs_n.to(tl.int64)[:, None] * C + offs_c[None, :]
        if d_shift_ptr is not None:
            tl.store(d_shift_ptr + offs_nc, sum_d.to(d_shift_ptr.dtype.element_ty), mask=mask)
        if d_scale_ptr is not None:
            weight, bias = affine(weight_ptr, bias_ptr, None, None, 0, 0, 0, offs_c, mask_c)
            d_scale = weight[None, :] * sum_e + bias[None, :] * sum_d
            tl.store(d_scale_ptr + offs_nc, d_scale.to(d_scale_ptr.dtype.element_ty), mask=mask)
        if scale_ptr is not None:
            offs_s = offs_n.to(tl.int64)[:, None] * stride_scale + offs_c[None, :]
            one_scale = 1.0 + tl.load(scale_ptr + offs_s, mask=mask, other=0.0).to(tl.float32)
            sum_d *= one_scale
            sum_e *= one_scale
        d_weight += sum_e
        d_bias += sum_d
    if d_weight_ptr is not None:
        total = tl.sum(d_weight, 0)
        tl.store(d_weight_ptr + offs_c, total.to(d_weight_ptr.dtype.element_ty), mask=mask_c)
    if d_bias_ptr is not None:
        total = tl.sum(d_bias, 0)
        tl.store(d_bias_ptr + offs_c, total.to(d_bias_ptr.dtype.element_ty), mask=mask_c)


def params_grad(
    sums: Tensor,  # float32 [N, K, 2, C]: D and E of every chunk
    params: Params,
    needed: tuple[bool, bool, bool, bool],
) -> Params:
    """Gradients of weight, bias, scale and shift, those that are needed, each in its dtype."""
    n, k, _, c = sums.shape
    weight, bias, scale, _ = params
    grads = tuple(
        p.new_empty(p.shape) if need else None for p, need in zip(params, needed, strict=True)
    )
    block_c = min(triton.next_power_of_2(c), 16)
    block_n = min(triton.next_power_of_2(max(n, 1)), 128)
    block_k = min(triton.next_power_of_2(max(k, 1)), 128 // block_n)
    shape = (row_strides(params)[0], n, c, k)
    _group_norm_bwd_params_kernel[(triton.cdiv(c, block_c),)](
        sums, weight, bias, scale, *grads, *shape, block_n, block_k, block_c
    )
    return grads


# --- the kernels of group_norm ------------------------------------------------------------------


def _forward(_: tuple, xs: Halves, num_groups: int, eps: float, params: Params, act: str):
    x, (n, hw, c) = xs[0], extent(xs)
    stats = x.new_empty((2, n, num_groups), dtype=torch.float32)
    if hw == 0:
        return x.new_empty((*x.shape[:3], c)), stats
    partials = partials_of(xs, *_cut(xs, _STATS))
    args = (num_groups, *params[:2], eps, *params[2:])
    with dependent_launches():  # as `following`
        table = norm_table((partials,), (hw,), *args, stats_out=stats)
        return apply(*xs, table, act), stats


def _backward(_: tuple, xs: Halves, dy: Tensor, stats: Tensor, params: Params, act: str, dx: bool):
    n, hw, c = extent(xs)
    if hw == 0:
        return empty_like(xs), dy.new_zeros((n, 1, 2, c), dtype=torch.float32)
    table = dy.new_empty((n, 4, c), dtype=torch.float32)
    rest = {"stats": stats, "params": params}
    sums = grad_partials_of(dy, xs, table, act, *_cut(xs, _SUMS), **rest)
    if not dx:
        return (None, None), sums
    rows = table.new_empty((n, 2 * c))  # of the same sums, which nobody reads here
    options = {"sums": rows, "centred": True}
    coeff = norm_grad_table(sums, table, hw, stats.shape[2], NormGrads(), **options)
    with dependent_launches():
        dx1, dx2, _ = norm_dx(dy, *xs, coeff, table=table, activation=act)
    return (dx1, dx2), sums


def _cost(spec: NormSpec, gpu: Device, config: tuple) -> float:
    """What is read twice comes from the L2 cache, if it is small."""
    x = spec.elements * spec.itemsize
    read = spec.bytes - x  # by each of the two passes
    return of_passes(spec.bytes + (read if x >= CACHE else 0), 3)


MULTI_PASS = Kernel("multi_pass", cost=_cost, launch=_forward)
MULTI_PASS_GRAD = Kernel("multi_pass", cost=_cost, launch=_backward)
