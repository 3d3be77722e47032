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

from ..dependent_launch import overlapping
from ..device import describe
from ..gluon.descriptors import SUPPORTED, in_boxes, takes
from .norm_tables import check_partials_of

if SUPPORTED:
    from .norm_attention_groups_kernels import norm_attention_groups_kernel
    from .norm_attention_kernels import norm_attention_kernel
    from .norm_attention_rows_kernels import norm_attention_rows_kernel

_empty = torch.empty  # tests put a function here that returns NaNs

_POSITIONS, _HEAD_DIM = (64, 128, 256), 32
_SLOTS = 3  # for filters, of programs of several heads at once
_FEW_IMAGES = 4  # for which there are other kernels
_MOST_PARTIALS, _MOST_IN_GROUP, _MOST_GROUPS = 8, 32, 64


class AttentionConfig(NamedTuple):
    heads: int  # of a program
    step: int  # keys at a time
    num_warps: int  # 16 positions each at a time; 12 or 16: four for each of 3 or 4 heads, or one


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
    programs = chip.num_sms * max(1, chip.shared_memory // (_shared_bytes(t, c) + 1024))

    def time(heads: int) -> int:
        return triton.cdiv(n * num_heads // heads, programs) * (1 + heads)

    heads = min(_divisors(num_heads), key=time)
    if t == 256 and n * num_heads <= chip.num_sms:
        return AttentionConfig(1, 64, 16)
    at_once = _heads_at_once(t, c)
    if at_once and 2 * triton.cdiv(n * num_heads // at_once, chip.num_sms) < time(heads):
        return AttentionConfig(at_once, 64, 4 * at_once)
    return AttentionConfig(heads, 64, min(t // 16, 8))


def _heads_at_once(t: int, c: int) -> int:
    """Of a program, a warpgroup each: those whose filters, keys and values find room."""
    if (t, c) == (256, 192):
        return 3
    return 4 if t == 64 and c % (4 * _HEAD_DIM) == 0 and c <= 256 else 0


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
    if config.num_warps > 8 and config.heads == 1:
        kernel, rest = norm_attention_rows_kernel, ()
        options = {"num_warps": 4, "maxnreg": 128}
    elif config.num_warps > 8:
        assert config.heads == _heads_at_once(t, c) and config.num_warps == 4 * config.heads
        kernel, rest = norm_attention_groups_kernel, (config.heads, _SLOTS, t == 256)
        options = {"num_warps": 4, "maxnreg": 168 if config.heads == 3 else 128}
    else:
        kernel, rest = norm_attention_kernel, (config.heads, config.step)
        options = {"num_warps": config.num_warps}
    kernel[(n * (num_heads // config.heads),)](
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
        *rest,
        k,
        cg,
        triton.next_power_of_2(c),
        triton.next_power_of_2(c // cg),
        triton.next_power_of_2(cg),
        **options,
        **overlapping(x.device, n * t),
    )
    return o
