"""Depthwise convolution over NHWC: each channel has a filter of its own.

    y[p, q]  = sum over i, j of x[p + i dy - top, q + j dx - left] w[i, j] + b       (d: dilation)
    dw[i, j] = sum over images and p, q of dy[p, q] x[p + i dy - top, q + j dx - left]

The input gradient is the same sum of dy, with the filter turned round and `turned_start` zeros in
front. Memory bounds 3x3 filters, arithmetic those of 7x7: no tensor core multiplies channels that
are not summed. A program makes BLOCK_P pixels, of any rows and images, of BLOCK_C channels; what
its taps share it reads from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reductions.column_sum import num_splits, partials, sum_partials
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.device import describe

MOST_TAPS = 64  # each is a load in the kernel's code
_TILE = 2048  # numbers of a program: 16 a thread of four warps
_MOST_CHANNELS = 128
_SUMS = 8192  # of dw, in the registers of four warps
Pair = tuple[int, int]


@triton.jit
def _pixel(offs, P, Q):
    """Image, row and column of pixels that are numbered through."""
    return offs // (P * Q), offs // Q % P, offs % Q


@triton.jit
def _depthwise_kernel(
    x_ptr,  # [N, H, W, C]
    w_ptr,  # [R S, C]
    bias_ptr,  # [C] or None
    y_ptr,  # [N, P, Q, C]
    M,  # N P Q
    H,
    W,
    C,
    P,
    Q,
    top,
    left,
    CB,
    R: tl.constexpr,
    S: tl.constexpr,
    DILATION_Y: tl.constexpr,
    DILATION_X: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    offs_m = tl.program_id(0) // CB * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_c = tl.program_id(0) % CB * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    n, p, q = _pixel(offs_m, P, Q)
    acc = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(R):
        row = p + i * DILATION_Y - top
        for j in tl.static_range(S):
            column = q + j * DILATION_X - left
            there = (offs_m < M) & (row >= 0) & (row < H) & (column >= 0) & (column < W)
            at = ((n * H + row) * W + column).to(tl.int64) * C
            mask = there[:, None] & mask_c[None, :]
            x = tl.load(x_ptr + at[:, None] + offs_c[None, :], mask=mask, other=0.0)
            tap = R * S - 1 - (i * S + j) if TURNED else i * S + j
            w = tl.load(w_ptr + tap * C + offs_c, mask=mask_c, other=0.0)
            acc += x.to(tl.float32) * w.to(tl.float32)[None, :]
    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * C + offs_c[None, :]
    mask = (offs_m < M)[:, None] & mask_c[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _depthwise_wgrad_kernel(
    x_ptr,  # [N, H, W, C]
    dy_ptr,  # [N, P, Q, C]
    dw_ptr,  # [splits, R, S, C]
    M,  # N P Q
    H,
    W,
    C,
    P,
    Q,
    top,
    left,
    pixels_per_split,
    R,
    S,
    DILATION_Y: tl.constexpr,
    DILATION_X: tl.constexpr,
    TAPS: tl.constexpr,  # S as a power of two
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # a row of the filter
    await_inputs()
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    i, split = tl.program_id(1), tl.program_id(2)
    j = tl.arange(0, TAPS)
    mask_c = offs_c < C
    sums = tl.zeros([TAPS, BLOCK_P, BLOCK_C], tl.float32)
    start = split * pixels_per_split
    end = tl.minimum(start + pixels_per_split, M)
    for m in range(0, pixels_per_split, BLOCK_P):
        offs_m = start + m + tl.arange(0, BLOCK_P)
        n, p, q = _pixel(offs_m, P, Q)
        row, column = p + i * DILATION_Y - top, q[None, :] + (j * DILATION_X)[:, None] - left
        there = ((offs_m < end) & (row >= 0) & (row < H))[None, :] & (j < S)[:, None]
        there = there & (column >= 0) & (column < W)
        at = ((n * H + row)[None, :] * W + column).to(tl.int64) * C
        mask = there[:, :, None] & mask_c[None, None, :]
        x = tl.load(x_ptr + at[:, :, None] + offs_c[None, None, :], mask=mask, other=0.0)
        dy_ptrs = dy_ptr + offs_m.to(tl.int64)[:, None] * C + offs_c[None, :]
        dy = tl.load(dy_ptrs, mask=(offs_m < end)[:, None] & mask_c[None, :], other=0.0)
        sums += x.to(tl.float32) * dy.to(tl.float32)[None, :, :]
    dw_ptrs = dw_ptr + ((split.to(tl.int64) * R + i) * S + j)[:, None] * C + offs_c[None, :]
    dw = tl.sum(sums, axis=1).to(dw_ptr.dtype.element_ty)
    tl.store(dw_ptrs, dw, mask=(j < S)[:, None] & mask_c[None, :])


def depthwise(
    x: Tensor,  # [N, H, W, C]
    weight: Tensor,  # [C, 1, R, S]
    bias: Tensor | None,  # [C]
    start: Pair,  # zeros above and left of the image
    dilation: Pair,
    size: Pair,  # P, Q; below and right are as many zeros as that needs
    turned: bool = False,  # the filters are turned round
) -> Tensor:  # [N, P, Q, C], as x
    """Each channel convolved with its filter, summed in float32."""
    (n, h, w, c), (p, q), (r, s) = x.shape, size, weight.shape[2:]
    y = x.new_empty((n, p, q, c))
    if y.numel() == 0:
        return y
    taps = weight.reshape(c, r * s).t().contiguous()
    block_c = min(triton.next_power_of_2(c), _MOST_CHANNELS)
    block_p, cb = _TILE // block_c, triton.cdiv(c, block_c)
    _depthwise_kernel[(triton.cdiv(n * p * q, block_p) * cb,)](
        x, taps, bias, y, n * p * q, h, w, c, p, q, *start, cb,
        R=r, S=s, DILATION_Y=dilation[0], DILATION_X=dilation[1], TURNED=turned,
        BLOCK_P=block_p, BLOCK_C=block_c, **overlapping(x.device),
    )  # fmt: skip
    return y


def depthwise_weight_grad(
    x: Tensor,  # [N, H, W, C]
    dy: Tensor,  # [N, P, Q, C]
    window: Pair,  # R, S
    start: Pair,
    dilation: Pair,
    dtype: torch.dtype,
) -> Tensor:  # [C, 1, R, S]
    """The gradient of the filters; the same bits at every run."""
    (n, h, w, c), (p, q), (r, s) = x.shape, dy.shape[1:3], window
    dw, m = x.new_empty((r * s, c), dtype=dtype), n * p * q
    if m == 0:
        return dw.zero_().t().reshape(c, 1, r, s)
    taps = triton.next_power_of_2(s)
    block_c = min(triton.next_power_of_2(c), _MOST_CHANNELS // 2)
    block_p, blocks = max(1, _SUMS // (taps * block_c)), triton.cdiv(c, block_c)
    splits = num_splits(blocks * r, triton.cdiv(m, block_p), describe(x.device).loops)
    partial = partials(dw, splits)
    _depthwise_wgrad_kernel[(blocks, r, splits)](
        x, dy, partial, m, h, w, c, p, q, *start, triton.cdiv(m, splits), r, s,
        DILATION_Y=dilation[0], DILATION_X=dilation[1], TAPS=taps,
        BLOCK_P=block_p, BLOCK_C=block_c, **overlapping(x.device),
    )  # fmt: skip
    sum_partials(partial, dw, follows=True)
    return dw.t().reshape(c, 1, r, s)


def turned_start(window: Pair, start: Pair, dilation: Pair) -> Pair:
    """Of the input gradient: the zeros above and left of dy."""
    (r, s), (top, left), (dy, dx) = window, start, dilation
    return (r - 1) * dy - top, (s - 1) * dx - left
