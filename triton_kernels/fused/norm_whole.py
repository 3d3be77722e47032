"""GroupNorm and activation in one launch, where a second would cost more than it computes.

    norm_whole      x -> a, whole groups of an image in registers; x may be a convolution in parts
    norm_of_sums    x, partials -> a: `norm_table` and `apply` in one, for tensors of few programs;
                    x1 may be upsampled on the way
    sum_parts       a convolution in parts -> y and its partials
    resample_parts  the same, and y upsampled or pooled

    z = (x - mean) rstd g + b,   a = act(z),   mean and rstd over a group of channels of an image

Inference at a small batch is a chain of kernels of a few microseconds, so their number is its time.
x is one tensor or the concatenation of x1 and x2 over channels, which never exists in memory.
"""

import torch
import triton
from torch import Tensor

from ..activations import check_activation
from ..dependent_launch import overlapping
from ..layout import check_nhwc, check_second, check_shape, row_stride
from ..norm.pass_grid import PassConfig
from ..resample import spread
from .conv_split import SplitConv
from .norm_few import norm_few, serves_few
from .norm_passes import cut
from .norm_sums_kernels import norm_sums_kernel
from .norm_tables import check_partials_of, tiles_at_a_time
from .norm_whole_kernels import norm_whole_kernel
from .parts_kernels import resample_parts_kernel, sum_parts_kernel

_empty = torch.empty  # tests put a function here that returns NaNs

_MAX_ELEMENTS = 16384  # of a group: 32 numbers a thread of 16 warps
_PER_WARP, _MIN_WARPS = 1024, 4  # elements
_SUMS_CONFIG = PassConfig(4096, 1, 4)  # the one tile is asked for before the sums
_FEW_ELEMENTS = 2**20
_FEW_PROGRAMS = 264  # a group more a program, if there are more than twice an H200's processors


def norm_whole_supported(channels: int, num_groups: int, pixels: int) -> bool:
    """Whether a group of an image fits into registers."""
    lanes = triton.next_power_of_2(channels // num_groups)
    return lanes * triton.next_power_of_2(pixels) <= _MAX_ELEMENTS


def norm_whole(
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
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, C1 + C2]; x1, or the sum of its parts with `keep`
    """act(norm(x)) of x1 beside x2, with g = weight (1 + scale), b = bias (1 + scale) + shift. With
    `pool` x1 is [N, 2 H, 2 W, C1] and its 2x2 means stand for it; these are returned beside."""
    check_activation(activation)
    n, h, w, c1 = x1.shape
    assert not pool or (isinstance(x1, Tensor) and h % 2 == w % 2 == 0)
    h, w = (h // 2, w // 2) if pool else (h, w)
    split = x1 if isinstance(x1, SplitConv) else None
    dtype, device = x1.dtype, x1.device
    if split is not None:
        x1 = _empty(split.shape, dtype=dtype, device=device) if keep else None
    if x1 is not None:
        check_nhwc("x1", x1)
    c = c1 + check_second(x2, n, h, w)
    cg = c // num_groups
    assert norm_whole_supported(c, num_groups, h * w), f"groups of {cg} channels over {h}x{w}"
    block_j, block_p = triton.next_power_of_2(cg), triton.next_power_of_2(h * w)
    block_g = 1
    while n * num_groups > _FEW_PROGRAMS * block_g and block_g * block_j * block_p < 2048:
        block_g *= 2
    programs = triton.cdiv(num_groups, block_g)
    a = _empty((n, h, w, c), dtype=dtype, device=device)
    pooled = _empty((n, h, w, c1), dtype=dtype, device=device) if pool else None
    result = a, pooled if pool else x1
    if n == 0:
        return result
    parts, *terms = _terms(split)
    film = (scale, shift)
    norm_whole_kernel[(n * programs,)](
        x1,
        pooled,
        parts,
        *terms,
        x2,
        weight,
        bias,
        *film,
        a,
        row_stride(terms[2]),
        *map(row_stride, film),
        n,
        h * w,
        c1,
        c,
        programs,
        eps,
        activation,
        0 if parts is None else parts.shape[0],
        cg,
        block_g,
        block_j,
        block_p,
        w if pool else None,
        split is not None and split.residual is not None,
        num_warps=_warps(block_g * block_j * block_p),
        **overlapping(device, n * h * w),
    )
    return result


def _warps(elements: int) -> int:
    """Few, since they meet at a barrier for every sum."""
    return min(max(elements // _PER_WARP, _MIN_WARPS), 16)


def sum_parts(split: SplitConv) -> tuple[Tensor, Tensor | None]:
    """The convolution that was in parts, [N, H, W, CO]; and its partials, float32 [N, K, 2, CO], if
    its pixels are whole tiles."""
    n, h, w, c = split.shape
    y = _empty(split.shape, dtype=split.dtype, device=split.parts.device)
    block_c, block_p = 16, min(triton.next_power_of_2(h * w), 64)
    blocks = triton.cdiv(c, block_c), triton.cdiv(h * w, block_p)
    partials = None
    if h * w % block_p == 0:
        partials = _empty((n, blocks[1], 2, c), dtype=torch.float32, device=y.device)
    if n == 0:
        return y, partials
    parts, *terms = _terms(split)
    sum_parts_kernel[(n * blocks[0] * blocks[1],)](
        parts, *terms, y, partials, row_stride(terms[2]), n, h * w, c, *blocks, parts.shape[0],
        block_c, block_p, num_warps=4, **overlapping(y.device, n * h * w),
    )  # fmt: skip
    return y, partials


def resample_parts(
    split: SplitConv,
    up: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The convolution that was in parts, y [N, H, W, CO]; its nearest upsampling [N, 2H, 2W, CO] or
    its means over 2x2 pixels [N, H / 2, W / 2, CO], of which there is an even number of rows and
    columns; and the partials of y, float32 [N, K, 2, CO], if its pixels are whole tiles."""
    n, h, w, c = split.shape
    assert up or h % 2 == w % 2 == 0
    size = (2 * h, 2 * w) if up else (h // 2, w // 2)
    y = _empty(split.shape, dtype=split.dtype, device=split.parts.device)
    resampled = _empty((n, *size, c), dtype=split.dtype, device=split.parts.device)
    block_c, block_p = 16, 64 if up else 16
    pixels = h * w // (1 if up else 4)
    blocks = triton.cdiv(c, block_c), triton.cdiv(pixels, block_p)
    partials = None
    if pixels % block_p == 0:
        partials = _empty((n, blocks[1], 2, c), dtype=torch.float32, device=y.device)
    if n == 0:
        return y, resampled, partials
    parts, *terms = _terms(split)
    resample_parts_kernel[(n * blocks[0] * blocks[1],)](
        parts, *terms, y, resampled, partials, row_stride(terms[2]), n, h * w, w, c, *blocks,
        parts.shape[0], up, block_c, block_p, num_warps=4 if up else 2,
        **overlapping(y.device, n * h * w),
    )  # fmt: skip
    return y, resampled, partials


def _terms(split: SplitConv | None) -> tuple[Tensor | None, ...]:
    """parts, bias, extra_bias, emb, residual"""
    if split is None:
        return (None,) * 5
    n, h, w, c = split.shape
    check_shape("parts", split.parts, split.parts.shape[0], n, c, h * w)
    assert split.parts.is_contiguous() and split.parts.dtype == torch.float32
    if split.residual is not None:
        check_nhwc("residual", split.residual)
        check_shape("residual", split.residual, n, h, w, c)
    if split.emb is not None:
        check_shape("emb", split.emb, n, c)
    return split.parts, split.bias, split.extra_bias, split.emb, split.residual


def norm_of_sums(
    x1: Tensor,  # [N, H, W, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    partials: tuple[Tensor, ...],  # of each: float32 [N, K, 2, C1], [N, K2, 2, C2]
    pixels: tuple[int, ...],  # H W of the image that each describes
    num_groups: int,
    weight: Tensor | None,  # [C1 + C2]
    bias: Tensor | None,  # [C1 + C2]
    eps: float,
    activation: str,
    scale: Tensor | None = None,  # [N, C1 + C2], rows may be strided
    shift: Tensor | None = None,  # [N, C1 + C2]
) -> Tensor:  # [N, H, W, C1 + C2]
    """`apply` of the table that `norm_table` would make of these partials. Every program makes its
    part of the table anew."""
    check_activation(activation)
    check_nhwc("x1", x1)
    n, h, w, c1 = x1.shape
    c2 = check_second(x2, n, h, w)
    c, cg = c1 + c2, (c1 + c2) // num_groups
    for part, count, channels in zip(partials, pixels, (c1, c2), strict=False):
        check_partials_of(part, count, n, channels)
    if serves_few(n, cg, sum(part.shape[1] for part in partials)):
        return norm_few(
            x1, x2, partials, pixels, num_groups, weight, bias, eps, activation, scale, shift
        )[0]
    grid = cut(n, h * w, c1, c2, _SUMS_CONFIG)
    a = _empty((n, h, w, c), dtype=x1.dtype, device=x1.device)
    if n == 0:
        return a
    block_c = grid.block_c
    groups = triton.next_power_of_2(1 + triton.cdiv(block_c - 1, cg)), triton.next_power_of_2(cg)
    if cg == groups[1] <= block_c and c1 % cg == 0:  # blocks of channels are whole groups
        groups = block_c // cg, cg
    first, second = partials[0], partials[1] if x2 is not None else None
    ks = first.shape[1], 1 if second is None else second.shape[1]
    film = (scale, shift)
    norm_sums_kernel[(grid.programs,)](
        x1, x2, first, second, weight, bias, *film, a, *map(row_stride, film),
        pixels[0], pixels[-1], h * w, c1, c2, grid.k, grid.cb1, grid.cb, eps,
        activation, *ks, cg, *grid.tile, *groups, *tiles_at_a_time(groups, *ks),
        num_warps=_SUMS_CONFIG.num_warps, **overlapping(x1.device, n * h * w),
    )  # fmt: skip
    return a


def norm_of_sums_upsampled(
    x1: Tensor,  # [N, H / 2, W / 2, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    partials: tuple[Tensor, ...],  # of each: float32 [N, K, 2, C1], [N, K2, 2, C2]
    pixels: tuple[int, ...],  # of the image that each describes
    num_groups: int,
    weight: Tensor | None,  # [C1 + C2]
    bias: Tensor | None,  # [C1 + C2]
    eps: float,
    activation: str,
    scale: Tensor | None = None,  # [N, C1 + C2], rows may be strided
    shift: Tensor | None = None,  # [N, C1 + C2]
) -> tuple[Tensor, Tensor]:  # [N, H, W, C1 + C2]; [N, H, W, C1]
    """`norm_of_sums` of upsample(x1), where every pixel becomes a 2x2 block, beside x2; and
    upsample(x1), for its other readers."""
    check_activation(activation)
    check_nhwc("x1", x1)
    n, h, w, c1 = x1.shape
    c = c1 + check_second(x2, n, 2 * h, 2 * w)
    arguments = (x2, partials, pixels, num_groups, weight, bias, eps, activation, scale, shift)
    if serves_few(n, c // num_groups, sum(part.shape[1] for part in partials)):
        for part, count, channels in zip(partials, pixels, (c1, c - c1), strict=False):
            check_partials_of(part, count, n, channels)
        return norm_few(x1, *arguments, up=True)
    large = spread(x1, (n, 2 * h, 2 * w, c1), 1.0)
    return norm_of_sums(large, *arguments), large


def norm_of_sums_pays(elements: int) -> bool:
    """Whether so few programs read the partials of a tensor so large that a launch costs more."""
    return elements <= _FEW_ELEMENTS
