"""Attention over few positions, for inference at a small batch: all keys of a head in one tile.

    o = softmax(q k^T / sqrt(d)) v

A program has some queries of one head and asks for them and for all keys and values at once, where
`attention_fwd` asks for the values of a tile when the product with its keys is done.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import await_inputs, begin_next, overlapping

_empty = torch.empty  # tests put a function here that returns NaNs

_MAX_IMAGES, _MAX_POSITIONS, _MAX_DEPTH = 4, 64, 64
_QUERIES, _NUM_WARPS = 64, 4  # of a program

_LOG2_E = math.log2(math.e)


@triton.jit
def _attention_few_kernel(
    qkv_ptr,  # [N, T, 3C]
    o_ptr,  # [N, T, C]
    num_heads,
    scale_log2,  # log2(e) / sqrt(d)
    T: tl.constexpr,
    D: tl.constexpr,
    HEADS_QKV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,  # queries
    BLOCK_T: tl.constexpr,  # keys, at least T
):
    begin_next()
    pid = tl.program_id(0)
    row = pid // tl.cdiv(T, BLOCK_M)
    n, head = (row // num_heads).to(tl.int64), row % num_heads
    channels = num_heads * D
    part = D if HEADS_QKV else channels  # from q to k and from k to v
    q_ptr = qkv_ptr + n * T * (3 * channels) + (head * (3 * D) if HEADS_QKV else head * D)
    offs_m = pid % tl.cdiv(T, BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_t, offs_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    mask_m = (offs_m < T)[:, None] & (offs_d < D)[None, :]
    mask_t = (offs_t < T)[:, None] & (offs_d < D)[None, :]
    queries = offs_m[:, None] * (3 * channels) + offs_d[None, :]
    keys = offs_t[:, None] * (3 * channels) + offs_d[None, :]
    await_inputs()
    v = tl.load(q_ptr + 2 * part + keys, mask=mask_t, other=0.0, volatile=True)
    k = tl.load(q_ptr + part + keys, mask=mask_t, other=0.0, volatile=True)
    q = tl.load(q_ptr + queries, mask=mask_m, other=0.0, volatile=True)
    s = tl.dot(q, tl.trans(k)) * scale_log2
    if T != BLOCK_T:
        s = tl.where((offs_t < T)[None, :], s, float("-inf"))
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    o = tl.dot(p.to(v.dtype), v) / tl.sum(p, 1)[:, None]
    ptrs = o_ptr + (n * T + offs_m)[:, None] * channels + head * D + offs_d[None, :]
    tl.store(ptrs, o.to(o_ptr.dtype.element_ty), mask=mask_m)


def serves_attention(qkv: Tensor, num_heads: int) -> bool:
    """Whether `attention_few` should do it: images are few, and registers hold all keys."""
    n, t, c3 = qkv.shape
    few = n <= _MAX_IMAGES and t <= _MAX_POSITIONS
    return few and c3 // 3 // num_heads <= _MAX_DEPTH and qkv.dtype.itemsize == 2


def attention_few(qkv: Tensor, num_heads: int, order: str) -> Tensor:  # [N, T, 3C] -> [N, T, C]
    """softmax(q k^T / sqrt(d)) v, with qkv packed as in `attention`."""
    n, t, c3 = qkv.shape
    d = c3 // 3 // num_heads
    assert qkv.is_contiguous() and t * c3 < 2**31
    o = _empty((n, t, c3 // 3), dtype=qkv.dtype, device=qkv.device)
    if o.numel() == 0:
        return o
    block_t = max(triton.next_power_of_2(t), 16)
    block_m = min(block_t, _QUERIES)
    _attention_few_kernel[(n * num_heads * triton.cdiv(t, block_m),)](
        qkv, o, num_heads, _LOG2_E / math.sqrt(d), t, d, order == "heads_qkv",
        max(16, triton.next_power_of_2(d)), block_m, block_t,
        num_warps=_NUM_WARPS, **overlapping(qkv.device),
    )  # fmt: skip
    return o
