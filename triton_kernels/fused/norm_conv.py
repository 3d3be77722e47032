"""A 3x3 convolution that makes its own input, act(norm(x)), for few images.

    y = conv(act((x - mean) rstd g + b)) + bias + emb[n, co] + residual + 1x1 convolutions of others

At batch 1 the launch of a norm costs more than what it computes, and a convolution leaves most of
the chip's arithmetic idle. So every program takes the statistics of its input from the partial sums
that the convolution before left, and activates what it reads. It leaves sums for the next.

A program has whole rows of one image. A row of the filter is three products with the same pixels,
one for each column of the filter; that the results belong to pixels beside each other is put right
once at the end, by moving two of the three accumulators by a pixel. So pixels are activated three
times by each program that reads them and not nine times:

    acc_s[co, h, w] = sum_{r, ci} weight[co, ci, r, s] a[h + r - 1, w, ci]
    y[co, h, w]     = acc_0[co, h, w - 1] + acc_1[co, h, w] + acc_2[co, h, w + 1]
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..activations import check_activation
from ..dependent_launch import overlapping
from ..device import describe
from ..layout import check_nhwc, check_shape
from ..tuning import choose, decided
from .norm_conv_kernels import _norm_conv_kernel
from .norm_tables import _check_partials, _row_stride

_empty = torch.empty  # tests put a function here that returns NaNs

_MIN_PIXELS = 1024  # of an image: smaller ones are better cut into parts, see `conv_split`
_LOADED = 8192  # partial sums at a time


class NormConvConfig(NamedTuple):
    block_c: int  # output channels of a program
    block_m: int  # its pixels, whole rows
    num_warps: int
    num_stages: int


# The first that fits is taken unless another was measured to be faster: few pixels, for programs on
# many multiprocessors, and few warps, which meet at barriers.
_CONFIGS = [
    NormConvConfig(64, 32, 4, 2),
    NormConvConfig(64, 64, 8, 2),
    NormConvConfig(32, 64, 8, 2),
    NormConvConfig(32, 64, 4, 2),
]


def norm_conv(
    x1: Tensor,  # [N, H, W, C1], or [N, H / 2, W / 2, C1] with upsample1
    x2: Tensor | None,  # [N, H, W, C2]
    partials: tuple[Tensor, ...],  # of each: float32 [N, K, 2, C1], [N, K2, 2, C2]
    pixels: tuple[int, ...],  # H W of the image that each describes
    num_groups: int,
    norm_weight: Tensor | None,  # [C1 + C2]
    norm_bias: Tensor | None,  # [C1 + C2]
    eps: float,
    activation: str,
    weight: Tensor,  # [CO, C1 + C2, 3, 3] in channels_last memory, dtype of x1
    bias: Tensor,  # float32 [CO]
    *,
    scale: Tensor | None = None,  # [N, C1 + C2], rows may be strided
    shift: Tensor | None = None,  # [N, C1 + C2]
    emb: Tensor | None = None,  # float32 [N, CO], rows any distance apart
    residual: Tensor | None = None,  # [N, H, W, CO], dtype of x1
    extra: Sequence[tuple[Tensor, Tensor]] = (),  # up to two: [N, H, W, C] or half, [CO, C]
    extra_bias: Tensor | None = None,  # float32 [CO]
    upsample1: bool = False,
    config: NormConvConfig | None = None,
) -> tuple[Tensor, Tensor]:  # [N, H, W, CO]; float32 [N, K, 2, CO]
    """`conv_forward` of `apply` of the table that `norm_table` would make of these partials.

    With upsample1 x1 is read as if every pixel were a 2x2 block of the image, and so is any of the
    others whose convolution is added if it has half the height.
    """
    check_activation(activation)
    check_nhwc("x1", x1)
    n, h, w, c1 = x1.shape
    h, w, c2 = (2 * h, 2 * w, 0) if upsample1 else (h, w, 0)
    if x2 is not None:
        check_nhwc("x2", x2)
        c2 = x2.shape[3]
        check_shape("x2", x2, n, h, w, c2)
    c, co, cg = c1 + c2, weight.shape[0], (c1 + c2) // num_groups
    check_shape("weight", weight, co, c, 3, 3)
    assert weight.permute(0, 2, 3, 1).is_contiguous() and weight.dtype == x1.dtype
    for part, count, channels in zip(partials, pixels, (c1, c2), strict=False):
        _check_partials(part, count)
        check_shape("partials", part, n, part.shape[1], 2, channels)
    if residual is not None:
        check_nhwc("residual", residual)
        check_shape("residual", residual, n, h, w, co)
    assert emb is None or (emb.shape == (n, co) and emb.stride(1) == 1)
    for other, w1x1 in extra:
        check_nhwc("extra", other)
        half = other.shape[1] != h
        check_shape("extra", other, n, h >> half, w >> half, other.shape[3])
        assert w1x1.shape == (co, other.shape[3]) and w1x1.stride(1) == 1
    channels = [other.shape[3] for other, _ in extra]
    halves = [part for part in (c1, c2, *channels) if part]
    assert len(extra) <= 2 and norm_conv_supported(h, w, halves)
    if config is None:
        norm = (partials, pixels, num_groups, norm_weight, norm_bias, eps, activation)
        terms = {"scale": scale, "shift": shift, "emb": emb, "residual": residual}
        terms |= {"extra": extra, "extra_bias": extra_bias, "upsample1": upsample1}
        config = choose(
            "norm_conv_tile",
            (n, h, w, c1, c2, co, x1.dtype, upsample1, residual is not None, *channels),
            lambda: _candidates(h, w),
            lambda: _candidates(h, w)[0],
            lambda c: norm_conv(x1, x2, *norm, weight, bias, **terms, config=c)[0],
        )
    block_m, block_c = config.block_m, min(config.block_c, max(16, triton.next_power_of_2(co)))
    tiles = h * w // block_m
    y = _empty((n, h, w, co), dtype=x1.dtype, device=x1.device)
    sums = _empty((n, tiles, 2, co), dtype=torch.float32, device=x1.device)
    if n == 0:
        return y, sums
    block_j = triton.next_power_of_2(cg)
    block_g = triton.next_power_of_2(num_groups)
    first, second = partials[0], partials[1] if x2 is not None else None
    ks = first.shape[1], 1 if second is None else second.shape[1]
    lanes = [triton.next_power_of_2(max(half, 1)) for half in (c1, c2)]
    blocks_k = [
        min(triton.next_power_of_2(k), max(_LOADED // lane, 1))
        for k, lane in zip(ks, lanes, strict=True)
    ]
    others = [t for pair in extra for t in pair] + [None] * (4 - 2 * len(extra))
    strides = [w1x1.stride(0) for _, w1x1 in extra] + [0] * (2 - len(extra))
    film, halved = (scale, shift), [other.shape[1] != h for other, _ in extra]
    _norm_conv_kernel[(n * tiles * triton.cdiv(co, block_c),)](
        x1, x2, first, second, norm_weight, norm_bias, *film, weight, bias, extra_bias, emb,
        residual, *others, y, sums, *map(_row_stride, film), _row_stride(emb), *strides,
        pixels[0], pixels[-1], h, c1, c2, co, eps, *(channels + [0, 0])[:2],
        upsample1, *(halved + [False] * 2)[:2], activation, *ks, cg, "tf32", w, block_m, block_c,
        _block_k(halves, x1.itemsize), block_g, block_j, *blocks_k, *lanes,
        num_warps=config.num_warps, num_stages=config.num_stages, **overlapping(x1.device),
    )  # fmt: skip
    return y, sums


def norm_conv_supported(h: int, w: int, halves: Sequence[int]) -> bool:
    """Whether tiles of whole rows divide the images, and blocks of channels what is read."""
    return any(_fits(config, h, w) for config in _CONFIGS) and all(c % 16 == 0 for c in halves)


def norm_conv_pays(
    n: int, h: int, w: int, channels: int, out_channels: int, dtype: torch.dtype
) -> bool:
    """Whether the image is large, the programs find a place at once, and it was measured to be
    faster."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiles = n * triton.cdiv(h * w, 64) * triton.cdiv(out_channels, 64)
    few = tiles <= describe(device).num_sms and h * w >= _MIN_PIXELS
    return few and decided("norm_conv", (n, h, w, channels, out_channels, dtype))


def _fits(config: NormConvConfig, h: int, w: int) -> bool:
    return config.block_m % w == 0 and h % (config.block_m // w) == 0


def _block_k(halves: Sequence[int], itemsize: int) -> int:
    most = 64 if itemsize == 2 else 32
    return next(k for k in (64, 32, 16) if k <= most and all(c % k == 0 for c in halves))


def _candidates(h: int, w: int) -> list[NormConvConfig]:
    return [c for c in _CONFIGS if _fits(c, h, w)]
