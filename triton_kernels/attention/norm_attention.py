"""A norm, the 1x1 convolution to queries, keys and values, and attention, in one launch on Hopper.

    a = x, or norm(x)      q, k, v = a w^T + b  of every head      o = softmax(q k^T / sqrt(d)) v

For inference: nobody else reads a, q, k or v, so that they need not be in memory. A program has all
positions of an image in shared memory. It normalizes them there once, by partial sums that the
launch in front has left, and makes one or several heads of them, one after the other. x may be
normalized already.
"""

import math
from typing import NamedTuple

import triton
from torch import Tensor

from ..hopper.descriptors import SUPPORTED, in_boxes, missing
from ..norm.tables import Statistics
from ..registry.choose import select
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import FEW_IMAGES, ProjectedSpec, dtype_name
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device, describe

if SUPPORTED:
    from .norm_attention_kernels import norm_attention_kernel

_POSITIONS, _HEAD_DIM = (64, 128, 256), 32
_MOST_PARTIALS, _MOST_IN_GROUP, _MOST_GROUPS = 8, 32, 64


@configures("per_image")
class AttentionConfig(NamedTuple):
    heads: int  # of a program
    step: int  # keys at a time
    num_warps: int  # 16 positions each at a time


def _shared_bytes(t: int, c: int) -> int:
    """x, filters, keys and values, and what is small."""
    return 2 * (t * c + 3 * _HEAD_DIM * c + 2 * t * _HEAD_DIM) + 12 * c + 8192


def _refuse(spec: ProjectedSpec, gpu: Device) -> str | None:
    if reason := missing(gpu, spec.itemsize):
        return reason
    if spec.n <= FEW_IMAGES or spec.t not in _POSITIONS or spec.d != _HEAD_DIM:
        sizes = ", ".join(map(str, _POSITIONS))
        return f"it does more than {FEW_IMAGES} images of {sizes} positions, heads of {_HEAD_DIM}"
    if spec.c != spec.heads * spec.d or spec.c % 64:
        return f"{spec.c} channels are no multiple of 64"
    if _shared_bytes(spec.t, spec.c) > gpu.shared_memory:
        return f"{spec.t} positions of {spec.c} channels find no room"
    if spec.groups is None:
        return None
    group = spec.c // spec.groups
    if spec.tiles > _MOST_PARTIALS or spec.groups > _MOST_GROUPS or group > _MOST_IN_GROUP:
        return f"{spec.tiles} tiles, {spec.groups} groups of {group} channels are too many sums"
    return None


def _divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


def _configs(spec: ProjectedSpec, gpu: Device) -> list[AttentionConfig]:
    """As many heads a program that all programs run at once; that of a head is about the time of
    fetching and normalizing x."""
    at_once = gpu.num_sms * max(1, gpu.holds(_shared_bytes(spec.t, spec.c)))

    def time(heads: int) -> int:
        return triton.cdiv(spec.n * spec.heads // heads, at_once) * (1 + heads)

    return [AttentionConfig(min(_divisors(spec.heads), key=time), 64, min(spec.t // 16, 8))]


PROJECTED = Op(
    "projected_attention",
    ("t", "c", "heads", "groups", "tiles", "dtype"),
    (Kernel("per_image", AttentionConfig, _refuse, _configs),),
    similar=False,
)


def projected_spec(
    x: Tensor,  # [N, T, C]
    num_heads: int,
    norm: Statistics | None = None,  # of x
) -> ProjectedSpec:
    """What `projected_attention` computes of such tensors."""
    n, t, c = x.shape
    sums = {} if norm is None else {"groups": norm.num_groups, "tiles": norm.tiles[0]}
    return ProjectedSpec(n, dtype_name(x.dtype), t, c, num_heads, **sums)


def projected_attention(
    x: Tensor,  # [N, T, C]
    norm: Statistics | None,  # of x
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
    o = x.new_empty(x.shape)
    if n == 0:
        return o
    if config is None:
        spec = projected_spec(x, num_heads, norm)
        config = select(PROJECTED, spec, describe(x.device)).config
    norm = norm or Statistics((None,), (1,), c, None, None, 0.0)
    (partials,), (pixels,), groups, *affine, eps, _, _ = norm
    if partials is not None:
        norm.check(n, c)
    k, cg = norm.tiles[0], c // groups
    norm_attention_kernel[(n * (num_heads // config.heads),)](
        in_boxes(x, [n * t, c], [t, 64]),
        in_boxes(weight, [3 * c, c], [d, 64], list(weight.stride())),
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
