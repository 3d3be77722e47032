"""Adds up the parts of a convolution (`reductions.conv_parts`) where no norm does."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reductions.conv_parts import SplitConv, load_parts, sum_of_parts, terms_of, terms_of_parts
from ...runtime.dependent_launch import await_inputs, begin_next, overlapping
from ...runtime.layout import row_stride
from ...tf32 import as_operand


@triton.jit
def _store_sums(
    partial_ptr,  # float32 [rows, 2, C]
    ys,  # tiles [L, P], of one row
    row,
    C,
    offs_c,
    mask_c,
):
    """The sum of the tiles over their pixels, which are all there, and of (y - mean)^2."""
    total = ys[0].to(tl.float32)
    for i in tl.static_range(1, len(ys)):
        total += ys[i].to(tl.float32)
    sums = tl.sum(total, 1)
    mean = sums / (len(ys) * total.shape[1])
    within = tl.zeros(total.shape, tl.float32)
    for i in tl.static_range(len(ys)):
        delta = ys[i].to(tl.float32) - mean[:, None]
        within += delta * delta
    sums_ptr = partial_ptr + row.to(tl.int64) * 2 * C + offs_c
    tl.store(sums_ptr, sums, mask=mask_c)
    tl.store(sums_ptr + C, tl.sum(within, 1), mask=mask_c)


@triton.jit(do_not_specialize=["N"])
def _sum_parts_kernel(
    parts_ptr,
    bias_ptr,
    extra_bias_ptr,
    emb_ptr,
    residual_ptr,
    factor,  # or None
    y_ptr,  # [N, HW, C], out
    resampled_ptr,  # [N, H / 2, W / 2, C], or [N, 2H, 2W, C] with UP; out, or None
    partial_ptr,  # float32 [N, PB, 2, C], out, or None: the sums of y over the pixels of a program
    stride_emb,
    N,
    HW,
    W,
    C,
    CB,  # blocks of channels
    PB,  # blocks of pixels, or of 2x2 pixels that are averaged
    SPLITS: tl.constexpr,
    UP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read what is resampled
):
    """The sum of a SplitConv, and its 2x2 means or itself upsampled."""
    POOLS: tl.constexpr = resampled_ptr is not None and not UP
    FROM: tl.constexpr = 4 if POOLS else 1  # pixels of y to a result, or
    TO: tl.constexpr = 4 if UP else 1  # results to a pixel
    begin_next()
    pid = tl.program_id(0)
    offs_c = pid % CB * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_p = pid // CB % PB * BLOCK_P + tl.arange(0, BLOCK_P)
    n = (pid // CB // PB).to(tl.int64)
    mask_c, mask_p = offs_c < C, offs_p < HW // FROM
    mask = mask_c[:, None] & mask_p[None, :]
    width = W // 2 if POOLS else W
    h, w = offs_p // width, offs_p % width
    await_inputs()
    terms = terms_of_parts(bias_ptr, extra_bias_ptr, emb_ptr, stride_emb, n, offs_c, mask_c)
    parts = ()
    for i in tl.static_range(FROM):
        pixel = (2 * h + i // 2) * W + 2 * w + i % 2 if POOLS else offs_p
        parts = parts + (
            load_parts(parts_ptr, residual_ptr, N, HW, C, n, offs_c, pixel, mask_c, mask_p, SPLITS),
        )
    total = tl.zeros([BLOCK_C, BLOCK_P], tl.float32)
    ys = ()
    for i in tl.static_range(FROM):
        ys = ys + (sum_of_parts(terms, parts[i], factor).to(y_ptr.dtype.element_ty),)
        total += ys[i].to(tl.float32)
    for i in tl.static_range(FROM):
        pixel = (2 * h + i // 2) * W + 2 * w + i % 2 if POOLS else offs_p
        tl.store(y_ptr + (n * HW + pixel)[None, :] * C + offs_c[:, None], ys[i], mask=mask)
    if resampled_ptr is not None:
        result = as_operand(total * (1.0 / FROM), y_ptr.dtype.element_ty, TF32)
        for i in tl.static_range(TO):
            pixel = (2 * h + i // 2) * (2 * W) + 2 * w + i % 2 if UP else offs_p
            place = (n * (HW * TO // FROM) + pixel)[None, :] * C + offs_c[:, None]
            tl.store(resampled_ptr + place, result, mask=mask)
    if partial_ptr is not None:
        _store_sums(partial_ptr, ys, pid // CB, C, offs_c, mask_c)


def sum_parts(split: SplitConv) -> tuple[Tensor, Tensor | None]:
    """The convolution that was in parts, [N, H, W, CO]; and its partials, float32 [N, K, 2, CO], if
    its pixels are whole tiles."""
    h, w = split.shape[1:3]
    y, _, partials = _launch(split, None, 1, min(triton.next_power_of_2(h * w), 64), 4, False)
    return y, partials


def resample_parts(
    split: SplitConv,
    up: bool,
    *,
    tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The convolution that was in parts, y [N, H, W, CO]; its nearest upsampling [N, 2H, 2W, CO] or
    its means over 2x2 pixels [N, H / 2, W / 2, CO], of which there is an even number of rows and
    columns; and the partials of y, float32 [N, K, 2, CO], if its pixels are whole tiles. With
    `tf32` what is resampled in float32 is rounded to TF32: products in that read it."""
    n, h, w, c = split.shape
    assert up or h % 2 == w % 2 == 0
    size = (2 * h, 2 * w) if up else (h // 2, w // 2)
    resampled = split.parts.new_empty((n, *size, c), dtype=split.dtype)
    return _launch(split, resampled, *((1, 64, 4) if up else (4, 16, 2)), tf32)


def _launch(
    split: SplitConv,
    resampled: Tensor | None,
    averaged: int,  # pixels of y that a lane has
    block_p: int,
    num_warps: int,
    tf32: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, what is given, and the partials of y if its pixels are whole tiles."""
    n, h, w, c = split.shape
    y = split.parts.new_empty(split.shape, dtype=split.dtype)
    pixels, block_c = h * w // averaged, 16
    blocks = triton.cdiv(c, block_c), triton.cdiv(pixels, block_p)
    partials = None
    if pixels % block_p == 0:
        partials = y.new_empty((n, blocks[1], 2, c), dtype=torch.float32)
    if n:
        parts, *terms = terms_of(split)
        up = resampled is not None and averaged == 1
        _sum_parts_kernel[(n * blocks[0] * blocks[1],)](
            parts, *terms, y, resampled, partials, row_stride(terms[2]), n, h * w, w, c, *blocks,
            parts.shape[0], up, block_c, block_p, tf32, num_warps=num_warps,
            **overlapping(y.device, n * h * w),
        )  # fmt: skip
    return y, resampled, partials
