"""Attention over few positions, for inference at a small batch: all keys of a head in one tile.

    o = softmax(q k^T / sqrt(d)) v,   (q, k, v) = x w^T + b

A program asks for x, and makes queries, keys and values of its head itself, with filters that it
has already: it needs no more of these than its head's, and a launch takes longer than three more
products.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..registry.kernel import Kernel, configures
from ..registry.spec import FEW_IMAGES, ProjectedSpec
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.device import Device

_empty = torch.empty  # tests put a function here that returns NaNs

_MAX_POSITIONS, _MAX_DEPTH = 64, 64
_MAX_CHANNELS = 512
_NUM_WARPS = 4

_LOG2_E = math.log2(math.e)


@triton.jit
def _attend(q, k, v, scale_log2, T: tl.constexpr, BLOCK_T: tl.constexpr):
    """o of queries [M, D], keys and values [BLOCK_T, D], of which T are there."""
    s = tl.dot(q, tl.trans(k)) * scale_log2
    if T != BLOCK_T:
        s = tl.where((tl.arange(0, BLOCK_T) < T)[None, :], s, float("-inf"))
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    return tl.dot(p.to(v.dtype), v) / tl.sum(p, 1)[:, None]


@triton.jit
def _first_three(p, BLOCK_C: tl.constexpr):
    """Of products p [M, 4 BLOCK_C] with four filters those with each of the first three."""
    p = tl.permute(tl.reshape(p, [p.shape[0], 2, 2, BLOCK_C]), (0, 3, 2, 1))
    low, high = tl.split(p)
    first, second = tl.split(low)
    third, _ = tl.split(high)
    return first, second, third


@triton.jit
def _qkv_attention_kernel(
    x_ptr,  # [N, T, C]
    # [3, C, C], or [3 heads, D, C]; in boxes [4, D, BLOCK_C], of which the last is not looked at:
    # tiles are powers of two, and three fetches would be waited for one after the other
    weight_desc,
    bias_ptr,  # float32 [3C]
    o_ptr,  # [N, T, C]
    num_heads,
    scale_log2,  # log2(e) / sqrt(d)
    T: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    HEADS_QKV: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,  # positions, at least T
):
    pid = tl.program_id(0)
    n, head = (pid // num_heads).to(tl.int64), pid % num_heads
    offs_t, offs_c, offs_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_C), tl.arange(0, D)
    mask = (offs_t < T)[:, None] & (offs_c < C)[None, :]
    part = D if HEADS_QKV else C  # from q to k and from k to v
    row = head * (3 * D) if HEADS_QKV else head * D
    biases = ()
    for i in tl.static_range(3):
        biases = biases + (tl.load(bias_ptr + row + i * part + offs_d)[None, :],)
    if HEADS_QKV:
        filters = weight_desc.load([3 * head, 0, 0])
    else:
        filters = weight_desc.load([0, head * D, 0])
    await_inputs()
    x = tl.load(x_ptr + (n * T + offs_t)[:, None] * C + offs_c[None, :], mask=mask, other=0.0)
    p = tl.zeros([BLOCK_T, 4 * D], tl.float32)
    w = tl.reshape(filters, [4 * D, BLOCK_C])
    q, k, v = _first_three(tl.dot(x, tl.trans(w), p, input_precision="tf32"), D)
    q, k, v = q + biases[0], k + biases[1], v + biases[2]
    o = _attend(q.to(x.dtype), k.to(x.dtype), v.to(x.dtype), scale_log2, T, BLOCK_T)
    ptrs = o_ptr + (n * T + offs_t)[:, None] * C + head * D + offs_d[None, :]
    tl.store(ptrs, o.to(o_ptr.dtype.element_ty), mask=(offs_t < T)[:, None])


@configures("per_head")
class PerHead(NamedTuple):
    """A program has a head of an image."""


def _refuse(spec: ProjectedSpec, gpu: Device) -> str | None:
    if not gpu.tma or spec.itemsize != 2:
        return "it does numbers of 16 bits, with TMA"
    if spec.groups is not None:
        return "it makes no norm"
    if spec.n > FEW_IMAGES or spec.t > _MAX_POSITIONS:
        return f"it does {FEW_IMAGES} images of {_MAX_POSITIONS} positions at most"
    if not 16 <= spec.d <= _MAX_DEPTH or spec.d & (spec.d - 1):
        return f"heads of {spec.d} channels; powers of two from 16 to {_MAX_DEPTH}"
    block_c = triton.next_power_of_2(spec.c)
    room = (4 * spec.d + _MAX_POSITIONS) * block_c * spec.itemsize + 2**15
    if block_c > _MAX_CHANNELS or room > gpu.shared_memory:
        return f"{spec.c} channels; its filters find no room"
    return None


PER_HEAD = Kernel("per_head", PerHead, _refuse)


def qkv_attention(
    x: Tensor,  # [N, T, C]
    weight: Tensor,  # [3C, C], dtype of x
    bias: Tensor,  # float32 [3C]
    num_heads: int,
    order: str,
) -> Tensor:  # [N, T, C]
    """`attention` of x weight^T + bias. No kernel may write these two while earlier ones of
    the stream are under way: they are read ahead."""
    n, t, c = x.shape
    d, block_c = c // num_heads, triton.next_power_of_2(c)
    assert x.is_contiguous() and weight.shape == (3 * c, c) and weight.stride(1) == 1
    o = _empty(x.shape, dtype=x.dtype, device=x.device)
    if o.numel() == 0:
        return o
    heads_qkv, stride = order == "heads_qkv", weight.stride(0)
    parts, rows = (3 * num_heads, d) if heads_qkv else (3, c)
    strides, box = [rows * stride, stride, 1], [4, d, block_c]
    filters = TensorDescriptor(weight, [parts, rows, c], strides, box)
    _qkv_attention_kernel[(n * num_heads,)](
        x, filters, bias, o, num_heads, _LOG2_E / math.sqrt(d), t, c, d, heads_qkv,
        block_c, max(triton.next_power_of_2(t), 16), num_warps=_NUM_WARPS, num_stages=1,
        **overlapping(x.device),
    )  # fmt: skip
    return o
