"""Multi-head self-attention over a packed [N, T, 3C] tensor, forward and backward.

    s = q k^T / sqrt(d)    p = softmax(s)    o = p v             per sample and head

The forward pass is the online softmax of FlashAttention-2 (Dao 2023, algorithm 1): a program keeps
BLOCK_M queries, walks over the keys in blocks of BLOCK_N, and never writes s. What the backward
pass (algorithm 2) needs of the softmax is one float32 a row, the logarithm of its denominator:

    lse = log sum_j exp s_j    p = exp(s - lse)    delta = sum_c o_c do_c    dp = do v^T
    ds = p (dp - delta)    dq = ds k / sqrt(d)    dk = ds^T q / sqrt(d)    dv = p^T do

Exponentials are taken in base 2, the hardware's: log2(e) is folded into the scale, and `lse` is
kept in base 2 as well. Scores, statistics and accumulators are float32.

Layout: q, k and v are read by strides where the projection put them, and dq, dk and dv are written
into one packed [N, T, 3C]; nothing is permuted or copied. T and D are compile-time constants (a
model has two or three of each): a row that fits one tile has no loop, and a T that is a multiple of
the tile has no masks. There are no atomics: the same input gives the same bits.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import attention_gluon
from .attention_kernels import (
    attention_bwd_dkdv_kernel,
    attention_bwd_dq_kernel,
    attention_fwd_kernel,
)
from .dependent_launch import overlapping
from .device import describe
from .layout import autocast, check_nhwc
from .library import derivative, op
from .tuning import choose, same

ORDERS = ("qkv_heads", "heads_qkv")
MAX_HEAD_DIM = 128

_Config = TypeVar("_Config", bound=tuple)


class _Tile(NamedTuple):
    """The positions a program keeps, how many it takes at a time of the others, and its launch.

    Forward and dq keep queries and walk over keys; dk and dv keep keys and walk over queries.
    """

    keep: int
    step: int
    num_warps: int
    num_stages: int


class _BwdConfig(NamedTuple):
    one_pass: bool  # one kernel that keeps all keys (T <= keep; 5 products), or two (7 products)
    keep: int  # as in `_Tile`
    step: int
    num_warps: int
    num_stages: int


# What `_fwd_config` and `_bwd_config` choose, and what may have been measured to be faster; each is
# tested by itself.
# In 16 bits and for heads of 64 all of them fit a Hopper SM; the first of each list fits any chip.
_FWD_CONFIGS = (
    _Tile(64, 64, 4, 2),
    _Tile(64, 128, 4, 2),
    _Tile(64, 256, 4, 2),  # T = 256 and d = 32: all keys in one tile
    _Tile(128, 64, 4, 3),
    _Tile(128, 64, 8, 3),
    _Tile(128, 128, 8, 2),
    _Tile(128, 128, 8, 3),
    _Tile(64, 64, 4, 3),
    _Tile(64, 256, 8, 2),
    _Tile(32, 32, 4, 2),
    _Tile(32, 32, 8, 2),
)
_BWD_CONFIGS = (
    _BwdConfig(False, 64, 32, 4, 2),
    _BwdConfig(False, 64, 64, 4, 2),
    _BwdConfig(False, 128, 32, 4, 3),
    _BwdConfig(False, 128, 64, 8, 2),
    _BwdConfig(False, 32, 32, 4, 2),
    _BwdConfig(False, 32, 32, 8, 2),
    _BwdConfig(True, 64, 64, 4, 1),
    _BwdConfig(True, 128, 64, 8, 2),
    _BwdConfig(True, 256, 32, 8, 2),
    _BwdConfig(True, 256, 64, 8, 1),
    _BwdConfig(True, 256, 32, 8, 1),
    _BwdConfig(True, 64, 64, 8, 1),
    _BwdConfig(True, 64, 32, 4, 1),
    _BwdConfig(True, 64, 32, 4, 2),
)


# Those of `attention_gluon`, which keep the keys of a head in shared memory: they stage nothing.
# They are for Hopper, in 16 bits, and only where they were measured to be faster.
_FWD_HEAD_CONFIGS = (
    _Tile(64, 128, 4, 0),
    _Tile(128, 128, 4, 0),
    _Tile(256, 128, 4, 0),
    _Tile(256, 256, 4, 0),
)
_BWD_HEAD_CONFIGS = (_BwdConfig(True, 256, 64, 4, 0),)


def _fwd_config(t: int, block_d: int, dtype: torch.dtype, allow_tf32: bool) -> _Tile:
    """Choices that fit every chip: compiled for sm_89 and sm_90, d = 16 to 128 and every precision,
    they spill at most 16 bytes of registers and need at most 81 KiB of shared memory."""
    row = block_d * dtype.itemsize  # bytes of q, k or v
    if dtype == torch.float32 and not allow_tf32:  # products are unrolled into FMAs
        return _Tile(32, 32, 4 if block_d <= 64 else 8, 2)
    if row > 256:
        return _Tile(32, 32, 4, 2)
    if row > 128 or t <= 64:
        return _Tile(64, 64, 4, 2)
    return _Tile(64, 128, 4, 2)


def _bwd_config(t: int, block_d: int, dtype: torch.dtype, allow_tf32: bool) -> _BwdConfig:
    row = block_d * dtype.itemsize
    if dtype == torch.float32 and not allow_tf32:
        return _BwdConfig(False, 32, 32, 4 if block_d <= 64 else 8, 2)
    if row > 256:
        return _BwdConfig(False, 32, 32, 4, 2)
    if row > 128:
        return _BwdConfig(False, 64, 32, 4, 2)
    if t <= 64:
        return _BwdConfig(True, 64, 64, 4, 1)
    return _BwdConfig(False, 64, 64, 4, 2)


def _keeps_head(config: _Tile | _BwdConfig) -> bool:
    """Whether it is one of `attention_gluon`."""
    return config.num_stages == 0


def _fwd_candidates(qkv: Tensor, d: int, block_d: int) -> list[_Tile]:
    found = _candidates(_FWD_CONFIGS, qkv, block_d)
    if attention_gluon.applies(qkv, d, backward=False):
        longest = max(128, triton.next_power_of_2(qkv.shape[1]))
        found += [c for c in _FWD_HEAD_CONFIGS if max(c.keep, c.step) <= longest]
    return found


def _bwd_candidates(qkv: Tensor, d: int, block_d: int) -> list[_BwdConfig]:
    found = _candidates(_BWD_CONFIGS, qkv, block_d)
    found = [c for c in found if c.keep >= qkv.shape[1] or not c.one_pass]
    if attention_gluon.applies(qkv, d, backward=True):
        found += _BWD_HEAD_CONFIGS
    return found


def _candidates(configs: Sequence[_Config], qkv: Tensor, block_d: int) -> list[_Config]:
    """Those that fit, less tiles far beyond T: all of them only in 16 bits, for heads of at most
    64, on a GPU with as much shared memory as Hopper's."""
    if qkv.itemsize > 2 or block_d > 64 or describe(qkv.device).shared_memory < 220_000:
        return []
    longest = max(64, triton.next_power_of_2(qkv.shape[1]))
    return [c for c in configs if max(c.keep, c.step) <= longest]


# --- launchers ------------------------------------------------------------------------------------


def _constants(qkv: Tensor, num_heads: int, order: str, allow_tf32: bool) -> dict:
    """The arguments that every kernel has, by name."""
    d = qkv.shape[2] // 3 // num_heads
    return dict(
        num_heads=num_heads,
        scale=1 / math.sqrt(d),
        T=qkv.shape[1],
        D=d,
        HEADS_QKV=order == "heads_qkv",
        PRECISION="tf32" if allow_tf32 else "ieee",
        BLOCK_D=max(16, triton.next_power_of_2(d)),
    )


def attention_fwd(
    qkv: Tensor,
    num_heads: int,
    order: str,
    allow_tf32: bool,
    config: _Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """o [N, T, C] and lse, float32 [N, heads, T] in base 2."""
    n, t, c3 = qkv.shape
    assert t * c3 < 2**31, qkv.shape  # offsets within a sample are int32
    constants = _constants(qkv, num_heads, order, allow_tf32)
    o = torch.empty((n, t, c3 // 3), dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty((n, num_heads, t), dtype=torch.float32, device=qkv.device)
    if o.numel() == 0:
        return o, lse
    if config is None:
        config = choose(
            "attention",
            # a head is a head, whichever sample it belongs to; where it can stay in shared memory,
            # rows of other lengths say something too
            (n * num_heads, t, constants["D"], qkv.dtype, allow_tf32 and qkv.itemsize == 4),
            lambda: _fwd_candidates(qkv, constants["D"], constants["BLOCK_D"]),
            lambda: _fwd_config(t, constants["BLOCK_D"], qkv.dtype, allow_tf32),
            lambda c: attention_fwd(qkv, num_heads, order, allow_tf32, c)[0],
            same if attention_gluon.applies(qkv, constants["D"], backward=False) else None,
        )
        if _keeps_head(config) and not attention_gluon.fetchable(qkv):
            config = _fwd_config(t, constants["BLOCK_D"], qkv.dtype, allow_tf32)
    if _keeps_head(config):
        attention_gluon.forward(qkv, o, lse, constants, config.keep, config.step)
        return o, lse
    attention_fwd_kernel[(n * num_heads * triton.cdiv(t, config.keep),)](
        qkv,
        o,
        lse,
        **constants,
        BLOCK_M=config.keep,
        BLOCK_N=config.step,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **overlapping(qkv.device, n * t),
    )
    return o, lse


def _attention_bwd(
    do: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    num_heads: int,
    order: str,
    allow_tf32: bool,
    config: _BwdConfig | None = None,
) -> Tensor:
    """dqkv [N, T, 3C]; `do` may have any strides."""
    return attention_bwd_rows(do, qkv, o, lse, num_heads, order, allow_tf32, None, config)[0]


def attention_bwd_rows(
    do: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    num_heads: int,
    order: str,
    allow_tf32: bool,
    place: Callable[[int, int], Tensor] | None,  # (rows, columns) -> where they go, float32
    config: _BwdConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same, and if they have a place, rows [rows, 3C] whose sum is that of dqkv over samples
    and positions."""
    n, t, c3 = qkv.shape
    # offsets within a sample are int32
    assert t * max(c3, do.stride(1)) + c3 * do.stride(2) < 2**31, (qkv.shape, do.stride())
    constants = _constants(qkv, num_heads, order, allow_tf32)
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    if dqkv.numel() == 0:
        return dqkv, None if place is None else place(0, c3)
    if config is None:
        config = choose(
            "attention_bwd",
            (n * num_heads, t, constants["D"], qkv.dtype, allow_tf32 and qkv.itemsize == 4),
            lambda: _bwd_candidates(qkv, constants["D"], constants["BLOCK_D"]),
            lambda: _bwd_config(t, constants["BLOCK_D"], qkv.dtype, allow_tf32),
            lambda c: _attention_bwd(do, qkv, o, lse, num_heads, order, allow_tf32, c),
            same if attention_gluon.applies(qkv, constants["D"], backward=True) else None,
        )
        if _keeps_head(config) and not all(map(attention_gluon.fetchable, (qkv, do))):
            config = _bwd_config(t, constants["BLOCK_D"], qkv.dtype, allow_tf32)
    if _keeps_head(config):
        rows = None if place is None else place(n, c3)
        attention_gluon.backward(do, qkv, o, lse, dqkv, rows, constants)
        return dqkv, rows
    _, keep, step, num_warps, num_stages = config
    grid = (n * num_heads * triton.cdiv(t, keep),)
    rows = None if place is None else place(n * triton.cdiv(t, keep), c3)
    shared = dict(
        **constants,
        rows_ptr=rows,
        stride_don=do.stride(0),
        stride_dot=do.stride(1),
        stride_doc=do.stride(2),
        num_warps=num_warps,
        num_stages=num_stages,
        **overlapping(qkv.device),
    )
    if config.one_pass:
        assert keep >= t, f"one pass over {t} positions with tiles of {keep}"
        delta = None
    else:
        delta = torch.empty((n, num_heads, t), dtype=torch.float32, device=qkv.device)
        attention_bwd_dq_kernel[grid](
            do, qkv, o, lse, delta, dqkv, **shared, BLOCK_M=keep, BLOCK_N=step
        )
    attention_bwd_dkdv_kernel[grid](
        do,
        qkv,
        o,
        lse,
        delta,
        dqkv,
        **shared,
        BLOCK_M=step,
        BLOCK_N=keep,
        ONE_PASS=config.one_pass,
    )
    return dqkv, rows


# --- the op --------------------------------------------------------------------------------------


def _fake_attention(qkv, num_heads, order, allow_tf32):
    n, t, c3 = qkv.shape
    lse = qkv.new_empty((n, num_heads, t), dtype=torch.float32)
    return qkv.new_empty((n, t, c3 // 3)), lse


@op("attention", _fake_attention, differentiable=True)
def _attention(qkv: Tensor, num_heads: int, order: str, allow_tf32: bool) -> tuple[Tensor, Tensor]:
    return attention_fwd(qkv, num_heads, order, allow_tf32)


@op("attention_backward", lambda do, qkv, *_: qkv.new_empty(qkv.shape))
def _attention_backward(
    do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, num_heads: int, order: str, allow_tf32: bool
) -> Tensor:
    return _attention_bwd(do, qkv, o, lse, num_heads, order, allow_tf32)


@derivative(of=_attention)
class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, num_heads, order, allow_tf32):
        o, lse = _attention.below_autograd(qkv, num_heads, order, allow_tf32)
        ctx.save_for_backward(qkv, o, lse)
        ctx.options = num_heads, order, allow_tf32
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        return _attention_backward(do, *ctx.saved_tensors, *ctx.options), None, None, None


def attention(
    qkv: Tensor,  # [N, T, 3C]
    num_heads: int,
    *,
    order: str = "qkv_heads",
    allow_tf32: bool = False,
) -> Tensor:  # [N, T, C], heads outermost in C
    """softmax(q k^T / sqrt(d)) v per head, d = C // num_heads, at most 128.

    `order` says how the 3C channels are packed: "qkv_heads" is [3, heads, d] (guided-diffusion's
    new order, unet.cu), "heads_qkv" is [heads, 3, d] (its legacy order). `allow_tf32` concerns
    float32 alone. Under torch.autocast qkv is first cast to its dtype.

    Raises ValueError for a shape, dtype, stride or order that does not fit.
    """
    check_nhwc("qkv", qkv, ndim=3)
    c3 = qkv.shape[2]
    if order not in ORDERS:
        raise ValueError(f"order={order!r} is unknown; choose one of {', '.join(ORDERS)}")
    if c3 == 0 or c3 % 3:
        raise ValueError(f"qkv has {c3} channels; expected a positive multiple of 3 (q, k and v)")
    if num_heads < 1 or c3 // 3 % num_heads:
        raise ValueError(f"num_heads={num_heads} does not divide C={c3 // 3}")
    if c3 // 3 // num_heads > MAX_HEAD_DIM:
        d = c3 // 3 // num_heads
        raise ValueError(f"a head has {d} channels; at most {MAX_HEAD_DIM} are supported")
    o, _ = _attention(autocast(qkv), num_heads, order, allow_tf32)
    return o
