"""A norm, the 1x1 convolution to queries, keys and values, and attention, in one launch on Hopper.

    a = norm(x)      q, k, v = a w^T + b  of every head      o = softmax(q k^T / sqrt(d)) v

For inference: nobody else reads a, q, k or v, so that they need not be in memory. A program has all
positions of an image in shared memory. It normalizes them there once, by partial sums that the
launch in front has left, and makes one or several heads of them, one after the other. x may be
normalized already.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..hopper.descriptors import SUPPORTED, in_boxes, takes
from ..norm.tables import check_partials_of
from ..runtime.dependent_launch import overlapping
from ..runtime.device import describe

if SUPPORTED:
    from .norm_attention_kernels import norm_attention_kernel

_empty = torch.empty  # tests put a function here that returns NaNs

_POSITIONS, _HEAD_DIM = (64, 128, 256), 32
_FEW_IMAGES = 4  # for which there are other kernels
_MOST_PARTIALS, _MOST_IN_GROUP, _MOST_GROUPS = 8, 32, 64


class AttentionConfig(NamedTuple):
    heads: int  # of a program
    step: int  # keys at a time
    num_warps: int  # 16 positions each at a time


def _shared_bytes(t: int, c: int) -> int:
    """x, filters, keys and values, and what is small."""
    return 2 * (t * c + 3 * _HEAD_DIM * c + 2 * t * _HEAD_DIM) + 12 * c + 8192


def serves_norm_attention(x: Tensor, num_heads: int, norm: tuple | None) -> bool:
    """Whether `norm_attention` should do it."""
    n, t, c = x.shape
    if not takes(x) or n <= _FEW_IMAGES or t not in _POSITIONS or c != num_heads * _HEAD_DIM:
        return False
    if c % 64 or _shared_bytes(t, c) > describe(x.device).shared_memory:
        return False
    if norm is None:
        return True
    partials, _, groups, *_ = norm
    few = partials.shape[1] <= _MOST_PARTIALS and groups <= _MOST_GROUPS
    return few and c // groups <= _MOST_IN_GROUP


def _divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


def _config(x: Tensor, num_heads: int) -> AttentionConfig:
    """As many heads a program that all programs run at once; that of a head is about the time of
    fetching and normalizing x."""
    n, t, c = x.shape
    chip = describe(x.device)
    at_once = chip.num_sms * max(1, chip.shared_memory // (_shared_bytes(t, c) + 1024))

    def time(heads: int) -> int:
        return triton.cdiv(n * num_heads // heads, at_once) * (1 + heads)

    return AttentionConfig(min(_divisors(num_heads), key=time), 64, min(t // 16, 8))


def norm_attention(
    x: Tensor,  # [N, T, C]
    norm: tuple | None,  # of x: partials float32 [N, K, 2, C], pixels, num_groups, [C], [C], eps
    weight: Tensor,  # [3C, C], dtype of x
    bias: Tensor,  # float32 [3C]
    num_heads: int,
    order: str,
    config: AttentionConfig | None = None,
) -> Tensor:  # [N, T, C]
    """Attention of norm(x) weight^T + bias, packed as `attention` says. No kernel may write weights
    and biases while earlier ones of the stream are under way: they are read ahead."""
    n, t, c = x.shape
    d = c // num_heads
    assert x.is_contiguous() and weight.shape == (3 * c, c) and weight.stride(1) == 1
    o = _empty(x.shape, dtype=x.dtype, device=x.device)
    if n == 0:
        return o
    config = config or _config(x, num_heads)
    partials, pixels, groups, *affine, eps = norm or (None, 1, c, None, None, 0.0)
    k = 1
    if partials is not None:
        check_partials_of(partials, pixels, n, c)
        k = partials.shape[1]
    cg = c // groups
    norm_attention_kernel[(n * (num_heads // config.heads),)](
        in_boxes(x, [n * t, c], [c, 1], [t, 64]),
        in_boxes(weight, [3 * c, c], list(weight.stride()), [d, 64]),
        bias,
        partials,
        *affine,
        o,
        1 / math.sqrt(d),
        eps,
        pixels,
        t,
        c,
        d,
        order == "heads_qkv",
        config.heads,
        config.step,
        k,
        cg,
        triton.next_power_of_2(c),
        triton.next_power_of_2(c // cg),
        triton.next_power_of_2(cg),
        num_warps=config.num_warps,
        **overlapping(x.device, n * t),
    )
    return o
