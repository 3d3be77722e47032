"""GroupNorm and activation in one launch, for small images.

    z = (x - mean) rstd g + b,   a = act(z),   mean and rstd over a group of channels of an image

Inference at a small batch is a chain of kernels of a few microseconds, so the number of launches
decides its time.
x is one tensor or the concatenation of x1 and x2 over channels, which never exists in memory.
"""

import math

import triton
from torch import Tensor

from ..activations import check_activation
from ..reductions.conv_parts import SplitConv, terms_of
from ..registry.kernel import Kernel, Op
from ..registry.spec import NormSpec, dtype_name
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device, describe
from ..runtime.hardware import REGISTERS
from ..runtime.layout import check_nhwc, check_second, row_stride
from .pass_grid import MOST_HELD
from .single_cta_kernels import norm_single_cta_kernel

_PER_WARP, _MIN_WARPS = 1024, 4  # elements
_PROGRAMS = 2  # per multiprocessor; where there would be more, a program has several groups
_MANY_TILES = 8  # per image, whose sums have as many bytes as the pixels that a program reads
_HELD = 12  # bytes of registers for each number of a group: x, the result, and their addresses


def _lanes(spec: NormSpec) -> int:
    """Lanes of registers for a group of an image, with padding."""
    return triton.next_power_of_2(spec.c // spec.groups) * triton.next_power_of_2(spec.pixels)


def _refuse(spec: NormSpec, gpu: Device) -> str | None:
    lanes = _lanes(spec)
    return f"a group has {lanes} lanes of registers" if lanes > MOST_HELD else None


def _apart(spec: NormSpec, gpu: Device) -> str | None:
    """If there are partial sums, this kernel, which reads whole groups instead, is faster only if
    the sums are many, and its programs keep every multiprocessor busy and all run at once."""
    if not spec.tiles:
        return None
    if max(spec.tiles) < _MANY_TILES:
        return f"there are sums of {max(spec.tiles)} tiles only"
    programs, fit = spec.n * spec.groups, _PROGRAMS * _lanes(spec) * _HELD <= 4 * REGISTERS
    if not gpu.num_sms <= programs <= _PROGRAMS * gpu.num_sms or not fit:
        return f"{programs} groups do not keep {gpu.num_sms} multiprocessors busy at once"
    return None


NORM_SINGLE_CTA = Op(
    "norm_single_cta",
    ("h", "w", "c1", "c2", "groups", "dtype"),
    (Kernel("single_cta", refuse=_refuse),),
    apart=_apart,
)


def norm_single_cta(
    x1: Tensor | SplitConv,  # [N, H, W, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    num_groups: int,
    weight: Tensor | None,  # [C1 + C2]
    bias: Tensor | None,  # [C1 + C2]
    eps: float,
    activation: str,
    scale: Tensor | None = None,  # [N, C1 + C2], rows may be strided
    shift: Tensor | None = None,  # [N, C1 + C2]
    keep: bool = True,
    pool: bool = False,
    tf32: bool = False,
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, C1 + C2]; x1, or the sum of its parts with `keep`
    """act(norm(x)) of x1 beside x2, with g = weight (1 + scale), b = bias (1 + scale) + shift. With
    `pool` x1 is [N, 2 H, 2 W, C1] and its 2x2 means stand for it; these are returned beside. With
    `tf32` the norm and means of float32 are rounded to TF32: products in that read them."""
    check_activation(activation)
    n, h, w, c1 = x1.shape
    assert not pool or (isinstance(x1, Tensor) and h % 2 == w % 2 == 0)
    h, w = (h // 2, w // 2) if pool else (h, w)
    split = x1 if isinstance(x1, SplitConv) else None
    dtype, device = x1.dtype, x1.device
    like = x1 if split is None else split.parts
    if split is not None:
        x1 = like.new_empty(split.shape, dtype=dtype) if keep else None
    if x1 is not None:
        check_nhwc("x1", x1)
    c = c1 + check_second(x2, n, h, w)
    cg = c // num_groups
    spec = NormSpec(n, dtype_name(dtype), h, w, c1, c - c1, num_groups)
    gpu = describe(device)
    assert NORM_SINGLE_CTA.refuse(spec, gpu) is None, f"groups of {cg} over {h}x{w}"
    block_j, block_p = triton.next_power_of_2(cg), triton.next_power_of_2(h * w)
    block_g = 1
    most = _PROGRAMS * gpu.num_sms
    while n * num_groups > most * block_g and block_g * block_j * block_p < 2048:
        block_g *= 2
    programs = triton.cdiv(num_groups, block_g)
    a = like.new_empty((n, h, w, c), dtype=dtype)
    pooled = like.new_empty((n, h, w, c1)) if pool else None
    result = a, pooled if pool else x1
    if n == 0:
        return result
    parts, *terms = terms_of(split)
    film = (scale, shift)
    lanes = (block_g, block_j, block_p)
    norm_single_cta_kernel[(n * programs,)](
        x1, pooled, parts, *terms, x2, weight, bias, *film, a, *map(row_stride, (terms[2], *film)),
        n, h * w, c1, c, programs, eps, activation, 0 if parts is None else parts.shape[0], cg,
        *lanes, w if pool else None, split is not None and split.residual is not None, tf32,
        num_warps=_warps(math.prod(lanes)), **overlapping(device, n * h * w),
    )  # fmt: skip
    return result


def _warps(elements: int) -> int:
    """Few warps, since they wait at a barrier for every sum."""
    return min(max(elements // _PER_WARP, _MIN_WARPS), 16)
