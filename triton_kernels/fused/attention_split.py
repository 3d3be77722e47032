"""An attention block behind its norm in one launch, its result in parts, for small images.

    q, k, v = a Wq + bq, a Wk + bk, a Wv + bv      a [N, T, C], what the norm made
    o       = softmax(q k^T / sqrt(d)) v           per sample and head
    parts[head] = o Wproj of this head's rows      their sum over heads is the projection

A program has the queries of one head, and makes its keys and values itself. That is done again for
every block of queries, and costs less than the launches that it spares: three matrix products of a
few microseconds are three launches otherwise, and this is one. A head's share of the projection is
a part like those of `conv_split`: the norm behind it adds them up as it reads.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import _LOG2_E, _head_offset
from ..dependent_launch import await_inputs, overlapping
from ..device import describe
from ..tuning import decided

_empty = torch.empty  # tests put a function here that returns NaNs

_BLOCK_M = 64  # queries of a program
_MAX_T = 256  # keys that a program holds
_MAX_D = 64  # of a head
_BLOCK_C = 64  # channels of the result at a time


@triton.jit
def _attention_split_kernel(
    a_ptr,  # [N, T, C]
    qkv_weight_ptr,  # [3C, C]
    qkv_bias_ptr,  # float32 [3C]
    proj_weight_ptr,  # [C, C]
    parts_ptr,  # float32 [heads, N, C, T], out
    N,
    num_heads,
    scale,  # 1 / sqrt(d)
    T: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    HEADS_QKV: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    pid_m = pid % tl.cdiv(T, BLOCK_M)
    row = pid // tl.cdiv(T, BLOCK_M)
    n, head = row // num_heads, row % num_heads
    offset, part = _head_offset(head, num_heads, D, HEADS_QKV)
    offs_t, offs_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_d = offs_d < D
    rows = offset + offs_d  # of q in the filters
    a_ptr += n.to(tl.int64) * T * C
    dtype = a_ptr.dtype.element_ty

    q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    v = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for k0 in range(0, C, BLOCK_K):
        offs_k = k0 + tl.arange(0, BLOCK_K)
        mask_k = (offs_k < C)[None, :]
        w_ptrs = qkv_weight_ptr + rows[:, None] * C + offs_k[None, :]
        mask_w = mask_d[:, None] & mask_k
        wq = tl.load(w_ptrs, mask=mask_w, other=0.0)
        wk = tl.load(w_ptrs + part * C, mask=mask_w, other=0.0)
        wv = tl.load(w_ptrs + 2 * part * C, mask=mask_w, other=0.0)
        a_ptrs = a_ptr + offs_t[:, None] * C + offs_k[None, :]
        a = tl.load(a_ptrs, mask=(offs_t < T)[:, None] & mask_k, other=0.0)
        k = tl.dot(a, tl.trans(wk), k, input_precision=PRECISION)
        v = tl.dot(a, tl.trans(wv), v, input_precision=PRECISION)
        if T > BLOCK_M:
            a_ptrs = a_ptr + offs_m[:, None] * C + offs_k[None, :]
            a = tl.load(a_ptrs, mask=(offs_m < T)[:, None] & mask_k, other=0.0)
        q = tl.dot(a, tl.trans(wq), q, input_precision=PRECISION)
    bias_ptrs = qkv_bias_ptr + rows
    q = (q + tl.load(bias_ptrs, mask=mask_d, other=0.0)[None, :]).to(dtype)
    k = (k + tl.load(bias_ptrs + part, mask=mask_d, other=0.0)[None, :]).to(dtype)
    v = (v + tl.load(bias_ptrs + 2 * part, mask=mask_d, other=0.0)[None, :]).to(dtype)

    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * _LOG2_E)
    if T != BLOCK_T:
        s = tl.where((offs_t < T)[None, :], s, float("-inf"))
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    denominator = tl.sum(p, 1)
    o = tl.dot(p.to(dtype), v, input_precision=PRECISION) / denominator[:, None]
    o = tl.trans(o.to(dtype))

    parts_ptr += (head * N + n).to(tl.int64) * C * T
    for c0 in range(0, C, BLOCK_C):
        offs_c = c0 + tl.arange(0, BLOCK_C)
        mask_c = (offs_c < C)[:, None]
        w_ptrs = proj_weight_ptr + offs_c[:, None] * C + head * D + offs_d[None, :]
        w = tl.load(w_ptrs, mask=mask_c & mask_d[None, :], other=0.0)
        y = tl.dot(w, o, input_precision=PRECISION)
        to = parts_ptr + offs_c[:, None] * T + offs_m[None, :]
        tl.store(to, y, mask=mask_c & (offs_m < T)[None, :])


def attention_split(
    a: Tensor,  # [N, H, W, C]
    qkv_weight: Tensor,  # [3C, C, 1, 1], dtype of a
    qkv_bias: Tensor,  # float32 [3C]
    proj_weight: Tensor,  # [C, C, 1, 1], dtype of a
    num_heads: int,
    order: str,  # of `attention.ORDERS`
) -> Tensor:  # float32 [heads, N, C, H W]
    """The parts of proj(attention(qkv(a))), without proj's bias."""
    n, h, w, c = a.shape
    t, d = h * w, c // num_heads
    assert a.is_contiguous() and qkv_weight.is_contiguous() and proj_weight.is_contiguous()
    assert a.dtype == qkv_weight.dtype == proj_weight.dtype
    assert qkv_weight.shape == (3 * c, c, 1, 1) and proj_weight.shape == (c, c, 1, 1)
    parts = _empty((num_heads, n, c, t), dtype=torch.float32, device=a.device)
    if n == 0:
        return parts
    block_t, block_d = (max(16, triton.next_power_of_2(size)) for size in (t, d))
    block_m = min(_BLOCK_M, block_t)
    grid = (n * num_heads * triton.cdiv(t, block_m),)
    _attention_split_kernel[grid](
        a, qkv_weight, qkv_bias, proj_weight, parts, n, num_heads, 1 / math.sqrt(d),
        t, c, d, order == "heads_qkv", "tf32", block_t, block_m, block_d,
        BLOCK_K=64 if a.itemsize == 2 else 32, BLOCK_C=_BLOCK_C,
        num_warps=8 if block_t > 64 else 4, num_stages=3, **overlapping(a.device),
    )  # fmt: skip
    return parts


def attention_split_pays(
    n: int, h: int, w: int, channels: int, num_heads: int, dtype: torch.dtype
) -> bool:
    """Whether it can be done, the programs find a place at once, or about that, and it was measured
    to be faster: of more programs the keys and values that are made again cost too much."""
    if h * w > _MAX_T or channels // num_heads > _MAX_D:
        return False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    few = n * num_heads * triton.cdiv(h * w, _BLOCK_M) <= 2 * describe(device).num_sms
    return few and decided("attention_split", (n, h, w, channels, num_heads, dtype))
