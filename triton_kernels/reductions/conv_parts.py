"""A convolution in parts over the terms of its sum (`conv_split`), and how a kernel adds them: one
that does only that (`conv.plain.split_k_sum`), or a norm.

Such a kernel is two trips to memory, there and back, if it asks for all that it reads at once. What
is used first is asked for last. The compiler, which spares registers, may still ask for some, wait,
and ask for the next. Volatile loads it leaves in their order, but they pass over the cache of the
multiprocessor and are slower by more than that (docs/kernels/sampling.md).

A channel's pixels are successive in a part, since groups have few channels and all pixels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.layout import check_nhwc, check_shape


@dataclass(frozen=True)
class SplitConv:
    """y = factor (sum of parts + bias + extra_bias + emb[n, c] + residual), rounded to dtype."""

    parts: Tensor  # float32 [S, N, CO, H * W]
    shape: tuple[int, int, int, int]  # of y: N, H, W, CO
    dtype: torch.dtype
    bias: Tensor  # float32 [CO]
    extra_bias: Tensor | None = None  # float32 [CO]
    emb: Tensor | None = None  # float32 [N, CO], rows any distance apart
    residual: Tensor | None = None  # [N, H, W, CO]
    factor: float | None = None  # multiplies the sum of all that

    @property
    def device(self) -> torch.device:
        return self.parts.device


def terms_of(split: SplitConv | None) -> tuple[Tensor | float | None, ...]:
    """parts, bias, extra_bias, emb, residual, factor"""
    if split is None:
        return (None,) * 6
    n, h, w, c = split.shape
    check_shape("parts", split.parts, split.parts.shape[0], n, c, h * w)
    assert split.parts.is_contiguous() and split.parts.dtype == torch.float32
    if split.residual is not None:
        check_nhwc("residual", split.residual)
        check_shape("residual", split.residual, n, h, w, c)
    if split.emb is not None:
        check_shape("emb", split.emb, n, c)
    terms = split.bias, split.extra_bias, split.emb, split.residual, split.factor
    return split.parts, *terms


@triton.jit
def terms_of_parts(
    bias_ptr,  # float32 [C]
    extra_bias_ptr,  # float32 [C] or None
    emb_ptr,  # [N, C] or None
    stride_emb,
    n,
    offs_c,  # [L]
    mask_c,
):
    """What is added to the parts of a convolution in every pixel: [L]. Read past the cache of a
    multiprocessor, which may know an older tensor in its place if the previous kernel has not
    ended."""
    terms = tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0)
    if extra_bias_ptr is not None:
        terms += tl.load(extra_bias_ptr + offs_c, mask=mask_c, other=0.0)
    if emb_ptr is not None:
        place = n * stride_emb + offs_c
        terms += tl.load(emb_ptr + place, mask=mask_c, other=0.0, cache_modifier=".cg")
    return terms


@triton.jit
def load_parts(
    parts_ptr,  # float32 [SPLITS, N, C, HW]
    residual_ptr,  # [N, HW, C] or None
    N,
    HW,
    C,
    n,
    offs_c,
    offs_p,
    mask_c,
    mask_p,
    SPLITS: tl.constexpr,
):
    """A tile of every part, float32 [L, P], and of the residual. They are asked for in this
    order."""
    mask = mask_c[:, None] & mask_p[None, :]
    offs = (n * HW + offs_p)[None, :] * C + offs_c[:, None]
    parts = ()
    if residual_ptr is not None:
        parts = parts + (tl.load(residual_ptr + offs, mask=mask, other=0.0),)
    for split in tl.static_range(SPLITS):
        ptrs = parts_ptr + split * (N * C).to(tl.int64) * HW
        ptrs = ptrs + (n * C + offs_c)[:, None] * HW + offs_p[None, :]
        parts = parts + (tl.load(ptrs, mask=mask, other=0.0),)
    return parts


@triton.jit
def sum_of_parts(
    terms,  # of `terms_of_parts`
    parts,  # of `load_parts`
    factor,  # or None
):
    """A tile of a SplitConv, float32 [L, P], not rounded. The last is added first: the compiler,
    which spares registers, else asks for some of them, waits, and asks for the next."""
    acc = parts[len(parts) - 1] + terms[:, None]
    for i in tl.static_range(len(parts) - 1):
        acc += parts[i].to(tl.float32)
    if factor is not None:
        acc *= factor
    return acc
