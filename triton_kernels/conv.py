"""Convolution over NHWC as an implicit GEMM: forward, input gradient, weight and bias gradient.

    y[n, p, q, co]   = bias[co] + sum_{r, s, ci} x[n, h, w, ci] weight[co, r, s, ci]
    dx[n, h, w, ci]  = sum_{r, s, co} dy[n, p, q, co] weight[co, r, s, ci]
    dweight[co, r, s, ci] = sum_{n, p, q} dy[n, p, q, co] x[n, h, w, ci]
    dbias[co]        = sum_{n, p, q} dy[n, p, q, co]

with h = p stride + r - pad and w = q stride + s - pad throughout; whatever lies outside an image is
zero. With a 1x1 filter over [N, 1, 1, C] this is the linear layer.

The GEMM is swapped: the filters are the left operand of tl.dot and the pixels, transposed, the
right one, so an accumulator is [channels, pixels]. On Hopper both operands then stay in shared
memory. (With pixels on the left Triton moves them through registers first; one such tile raced.)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import DTYPES, check_nhwc, check_shape


class Config(NamedTuple):
    """What one program of the forward or of the input gradient computes."""

    block_c: int  # output channels
    block_m: int  # pixels
    block_k: int  # input channels a step
    num_warps: int
    num_stages: int


class WgradConfig(NamedTuple):
    """What one program of the weight gradient computes."""

    block_co: int
    block_ci: int
    block_m: int  # pixels a step
    num_warps: int
    num_stages: int


_FWD_CONFIGS = [
    Config(64, 64, 32, 4, 3),
    Config(64, 128, 32, 4, 3),
    Config(64, 16, 64, 4, 3),  # the linear layer over a handful of samples
    Config(16, 128, 32, 4, 3),  # the head: three output channels
]
_WGRAD_CONFIGS = [
    WgradConfig(64, 64, 32, 4, 3),
    WgradConfig(64, 32, 64, 4, 3),  # the stem: nine taps of three channels
    WgradConfig(16, 64, 64, 4, 3),  # the head
]

_empty = torch.empty  # every output is allocated here; tests replace it to poison the memory


# --- forward and input gradient ------------------------------------------------------------------


@triton.jit
def _conv2d_fwd_kernel(
    x_ptr,  # [N, H, W, CI] what is read: x, or dy for the input gradient
    w_ptr,
    bias_ptr,  # [CO]
    y_ptr,  # [N, P, Q, CO] what is written: y, or dx
    N,
    H,
    W,
    CI,
    P,
    Q,
    CO,
    stride_wo,  # from one channel of y to the next in the filters,
    stride_wt,  # one tap,
    stride_wi,  # one channel of x
    R: tl.constexpr,
    S: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DGRAD: tl.constexpr,
    FLAT: tl.constexpr,  # few input channels: one loop over (tap, channel) pairs instead of two
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid = tl.program_id(0)
    num_c = tl.cdiv(CO, BLOCK_C)
    offs_c = pid % num_c * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_m = pid // num_c * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)

    # Tap (i, j) of pixel (p, q) reads row row0 + i * SIGN and column col0 + j * SIGN. In the input
    # gradient only taps with (p + PAD_H - r) % STRIDE == 0 count, which depends on the remainder of
    # p alone: program_id(1) enumerates the remainders, and r = r0 + i * STEP.
    if DGRAD:
        STEP: tl.constexpr = STRIDE
        SIGN: tl.constexpr = -1
        rem_p = tl.program_id(1) // STRIDE
        rem_q = tl.program_id(1) % STRIDE
        num_p = tl.maximum(tl.cdiv(P - rem_p, STRIDE), 1)  # none has the remainder: masked below
        num_q = tl.maximum(tl.cdiv(Q - rem_q, STRIDE), 1)
        r0 = (rem_p + PAD_H) % STRIDE
        s0 = (rem_q + PAD_W) % STRIDE
        n = offs_m // (num_p * num_q)
        p = offs_m // num_q % num_p * STRIDE + rem_p
        q = offs_m % num_q * STRIDE + rem_q
        row0 = (p + PAD_H - r0) // STRIDE
        col0 = (q + PAD_W - s0) // STRIDE
    else:
        STEP: tl.constexpr = 1
        SIGN: tl.constexpr = 1
        r0 = 0
        s0 = 0
        n = offs_m // (P * Q)
        p = offs_m // Q % P
        q = offs_m % Q
        row0 = p * STRIDE - PAD_H
        col0 = q * STRIDE - PAD_W
    mask_m = (n < N) & (p < P) & (q < Q)
    mask_c = offs_c < CO
    num_r = (R - r0 + STEP - 1) // STEP
    num_s = (S - s0 + STEP - 1) // STEP
    x_ptrs = x_ptr + n.to(tl.int64) * (H * W * CI)  # [BLOCK_M] the image of each pixel
    w_ptrs = w_ptr + offs_c.to(tl.int64) * stride_wo  # [BLOCK_C]

    acc = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    k_blocks = tl.cdiv(CI, BLOCK_K)
    steps = tl.cdiv(num_r * num_s * CI, BLOCK_K) if FLAT else num_r * num_s * k_blocks
    for step in range(steps):  # one loop, not three: only an innermost loop is pipelined
        if FLAT:
            k = step * BLOCK_K + offs_k
            tap = (k // CI)[None, :]
            c = k % CI
            mask_k = k < num_r * num_s * CI
        else:
            tap = step // k_blocks
            c = (step - tap * k_blocks) * BLOCK_K + offs_k
            mask_k = c < CI
        i = tap // num_s  # scalar, or [1, BLOCK_K]
        j = tap % num_s
        row = row0[:, None] + i * SIGN
        col = col0[:, None] + j * SIGN
        inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & mask_m[:, None]
        offs_x = (row * W + col) * CI + c[None, :]
        x = tl.load(
            x_ptrs[:, None] + offs_x, mask=inside & mask_k[None, :], other=0.0
        )  # [BLOCK_M, BLOCK_K]
        offs_w = ((r0 + i * STEP) * S + s0 + j * STEP) * stride_wt + c[None, :] * stride_wi
        w = tl.load(
            w_ptrs[:, None] + offs_w, mask=mask_c[:, None] & mask_k[None, :], other=0.0
        )  # [BLOCK_C, BLOCK_K]
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)

    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + ((n.to(tl.int64) * P + p) * Q + q)[None, :] * CO + offs_c[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_c[:, None] & mask_m[None, :])


# --- weight and bias gradient --------------------------------------------------------------------


@triton.jit
def _conv2d_wgrad_kernel(
    x_ptr,  # [N, H, W, CI]
    dy_ptr,  # [N, P, Q, CO]
    dw_ptr,  # [splits, CO, R * S * CI]
    H,
    W,
    CI,
    P,
    Q,
    CO,
    num_pixels,  # N * P * Q
    pixels_per_split,
    S: tl.constexpr,
    TAPS: tl.constexpr,  # R * S
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    FLAT: tl.constexpr,  # few input channels: a column is a (tap, channel) pair, not a channel
    PRECISION: tl.constexpr,
    BLOCK_CO: tl.constexpr,
    BLOCK_CI: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    split = tl.program_id(2)
    offs_co = tl.program_id(0) * BLOCK_CO + tl.arange(0, BLOCK_CO)
    mask_co = offs_co < CO
    if FLAT:
        column = tl.program_id(1) * BLOCK_CI + tl.arange(0, BLOCK_CI)
        mask_ci = column < TAPS * CI
        tap = (column // CI)[None, :]
        c = column % CI
    else:
        ci_blocks = tl.cdiv(CI, BLOCK_CI)
        tap = tl.program_id(1) // ci_blocks
        c = tl.program_id(1) % ci_blocks * BLOCK_CI + tl.arange(0, BLOCK_CI)
        mask_ci = c < CI
        column = tap * CI + c
    r = tap // S  # scalar, or [1, BLOCK_CI]
    s = tap % S

    acc = tl.zeros([BLOCK_CO, BLOCK_CI], dtype=tl.float32)
    start = split * pixels_per_split
    end = tl.minimum(start + pixels_per_split, num_pixels)
    for m in range(start, end, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M)
        mask_m = offs_m < end
        n = offs_m // (P * Q)
        row = (offs_m // Q % P * STRIDE - PAD_H)[:, None] + r
        col = (offs_m % Q * STRIDE - PAD_W)[:, None] + s
        inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & mask_m[:, None]
        pixel = (n.to(tl.int64) * H * W)[:, None] + row * W + col
        x = tl.load(
            x_ptr + (pixel * CI + c[None, :]), mask=inside & mask_ci[None, :], other=0.0
        )  # [BLOCK_M, BLOCK_CI]
        dy = tl.load(
            dy_ptr + offs_m.to(tl.int64)[:, None] * CO + offs_co[None, :],
            mask=mask_m[:, None] & mask_co[None, :],
            other=0.0,
        )  # [BLOCK_M, BLOCK_CO]
        acc = tl.dot(tl.trans(dy), x, acc, input_precision=PRECISION)

    row_w = split.to(tl.int64) * CO + offs_co
    tl.store(
        dw_ptr + row_w[:, None] * (TAPS * CI) + column[None, :],
        acc.to(dw_ptr.dtype.element_ty),
        mask=mask_co[:, None] & mask_ci[None, :],
    )


@triton.jit
def _column_sum_kernel(
    x_ptr,  # [M, C]
    out_ptr,  # [splits, C]
    M,
    C,
    rows_per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out[split] = the sum of rows split * rows_per_split and following, in a fixed order."""
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    split = tl.program_id(1)
    acc = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    start = split.to(tl.int64) * rows_per_split
    end = tl.minimum(start + rows_per_split, M)
    for m in range(0, rows_per_split, BLOCK_M):
        offs_m = start + m + tl.arange(0, BLOCK_M)
        mask = (offs_m < end)[:, None] & mask_c[None, :]
        x = tl.load(x_ptr + offs_m[:, None] * C + offs_c[None, :], mask=mask, other=0.0)
        acc += x.to(tl.float32)
    total = tl.sum(acc, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + split.to(tl.int64) * C + offs_c, total, mask=mask_c)


@triton.jit
def _cast_kernel(x_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    x = tl.load(x_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x.to(out_ptr.dtype.element_ty), mask=mask)


# --- choosing tiles ------------------------------------------------------------------------------


def _num_sms(device: torch.device) -> int:
    """Programs that run side by side; the interpreter pretends to have four."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4


def _pick_fwd(pixels: int, channels: int, wide_loads: bool, sms: int) -> Config:
    safe, large, few_pixels, few_channels = _FWD_CONFIGS
    if channels <= 16:
        return few_channels
    if pixels <= 16:
        return few_pixels
    # element-by-element loads keep a pointer an element: more than 64x64 spills registers
    programs = triton.cdiv(pixels, large.block_m) * triton.cdiv(channels, large.block_c)
    return large if wide_loads and programs >= 2 * sms else safe


def _pick_wgrad(co: int, columns: int) -> WgradConfig:
    safe, few_columns, few_channels = _WGRAD_CONFIGS
    if co <= 16:
        return few_channels
    return few_columns if columns <= 32 else safe


def _num_splits(programs: int, steps: int, sms: int) -> int:
    """Parts of the sum over pixels: two programs a multiprocessor, but at least four steps each."""
    return max(1, min(2 * sms // programs, steps // 4))


# --- launchers -----------------------------------------------------------------------------------


def _precision(dtype: torch.dtype, allow_tf32: bool) -> str:
    return "ieee" if dtype == torch.float32 and not allow_tf32 else "tf32"


def _out_size(size: int, taps: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - taps) // stride + 1


def _conv2d_fwd(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    bias: Tensor | None,  # [CO], any dtype
    stride: int,
    padding: tuple[int, int],
    allow_tf32: bool,
    config: Config | None = None,
) -> Tensor:  # [N, P, Q, CO]
    n, h, w, ci = x.shape
    co, _, r, s = weight.shape
    p, q = _out_size(h, r, stride, padding[0]), _out_size(w, s, stride, padding[1])
    y = _empty((n, p, q, co), dtype=x.dtype, device=x.device)
    _launch_fwd(x, weight, bias, y, stride, padding, allow_tf32, config, dgrad=False)
    return y


def _conv2d_dgrad(
    dy: Tensor,  # [N, P, Q, CO]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of dy
    size: tuple[int, int],  # H, W
    stride: int,
    padding: tuple[int, int],
    allow_tf32: bool,
    config: Config | None = None,
) -> Tensor:  # [N, H, W, CI]
    dx = _empty((dy.shape[0], *size, weight.shape[1]), dtype=dy.dtype, device=dy.device)
    _launch_fwd(dy, weight, None, dx, stride, padding, allow_tf32, config, dgrad=True)
    return dx


def _launch_fwd(x, weight, bias, y, stride, padding, allow_tf32, config, dgrad):
    n, h, w, ci = x.shape
    _, p, q, co = y.shape
    _, weight_ci, r, s = weight.shape
    if y.numel() == 0:
        return
    # of the input gradient one program sees the pixels of one remainder modulo the stride
    classes = stride * stride if dgrad else 1
    pixels = n * triton.cdiv(p, stride) * triton.cdiv(q, stride) if dgrad else n * p * q
    precision = _precision(x.dtype, allow_tf32)
    wide_loads = ci % 8 == 0 and precision != "ieee"
    config = config or _pick_fwd(pixels, co, wide_loads, _num_sms(x.device))
    stride_wo, stride_wi = (1, r * s * weight_ci) if dgrad else (r * s * weight_ci, 1)
    grid = (triton.cdiv(pixels, config.block_m) * triton.cdiv(co, config.block_c), classes)
    _conv2d_fwd_kernel[grid](
        x,
        weight,
        bias,
        y,
        n,
        h,
        w,
        ci,
        p,
        q,
        co,
        stride_wo,
        weight_ci,
        stride_wi,
        R=r,
        S=s,
        STRIDE=stride,
        PAD_H=padding[0],
        PAD_W=padding[1],
        DGRAD=dgrad,
        FLAT=ci < 16,
        HAS_BIAS=bias is not None,
        PRECISION=precision,
        BLOCK_C=config.block_c,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _conv2d_wgrad(
    x: Tensor,  # [N, H, W, CI]
    dy: Tensor,  # [N, P, Q, CO]
    weight: Tensor,  # [CO, CI, R, S]: the shape, strides and dtype that are wanted
    stride: int,
    padding: tuple[int, int],
    allow_tf32: bool,
    config: WgradConfig | None = None,
) -> Tensor:  # like weight
    n, h, w, ci = x.shape
    _, p, q, co = dy.shape
    _, _, r, s = weight.shape
    dweight = _empty(weight.numel(), dtype=weight.dtype, device=x.device)
    flat = ci < 16
    columns = r * s * ci if flat else ci
    config = config or _pick_wgrad(co, columns)
    pixels = n * p * q
    co_blocks = triton.cdiv(co, config.block_co)
    column_blocks = triton.cdiv(columns, config.block_ci) * (1 if flat else r * s)
    steps = triton.cdiv(pixels, config.block_m)
    splits = _num_splits(co_blocks * column_blocks, steps, _num_sms(x.device))
    partial = _partials(dweight, splits)
    _conv2d_wgrad_kernel[(co_blocks, column_blocks, splits)](
        x,
        dy,
        partial,
        h,
        w,
        ci,
        p,
        q,
        co,
        pixels,
        triton.cdiv(steps, splits) * config.block_m,
        S=s,
        TAPS=r * s,
        STRIDE=stride,
        PAD_H=padding[0],
        PAD_W=padding[1],
        FLAT=flat,
        PRECISION=_precision(x.dtype, allow_tf32),
        BLOCK_CO=config.block_co,
        BLOCK_CI=config.block_ci,
        BLOCK_M=config.block_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    _sum_partials(partial, dweight)
    return dweight.as_strided(weight.shape, weight.stride())


def _conv2d_bgrad(dy: Tensor, bias: Tensor) -> Tensor:  # [N, P, Q, CO] -> like bias
    dbias = _empty(bias.shape, dtype=bias.dtype, device=dy.device)
    co = bias.numel()
    pixels = dy.numel() // co
    splits = _num_splits(triton.cdiv(co, 64), triton.cdiv(pixels, 64), _num_sms(dy.device))
    partial = _partials(dbias, splits)
    _column_sum(dy, partial, pixels)
    _sum_partials(partial, dbias)
    return dbias


def _partials(out: Tensor, splits: int) -> Tensor:
    """`out` itself if nothing is to be added up afterwards, else float32 [splits, numel]."""
    if splits == 1:
        return out
    return _empty((splits, out.numel()), dtype=torch.float32, device=out.device)


def _sum_partials(partial: Tensor, out: Tensor) -> None:
    if partial is not out:
        _column_sum(partial, out, partial.shape[0])


def _column_sum(x: Tensor, out: Tensor, rows: int) -> None:
    """x, seen as [rows, C], summed into the rows of out, seen as [splits, C]."""
    splits = out.shape[0] if out.ndim == 2 else 1
    c = out.numel() // splits
    block_m, block_c = (32, 64)
    rows_per_split = triton.cdiv(rows, splits)
    _column_sum_kernel[(triton.cdiv(c, block_c), splits)](
        x, out, rows, c, rows_per_split, BLOCK_M=block_m, BLOCK_C=block_c
    )


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory order in another dtype."""
    if weight.dtype == dtype:
        return weight
    out = _empty(weight.numel(), dtype=dtype, device=weight.device)
    grid = (triton.cdiv(weight.numel(), 1024),)
    _cast_kernel[grid](weight, out, weight.numel(), BLOCK=1024)
    return out.as_strided(weight.shape, weight.stride())


# --- the op --------------------------------------------------------------------------------------


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, stride, padding, allow_tf32):
        low = _cast(weight, x.dtype)  # kept for the backward pass, so it is made once
        ctx.save_for_backward(x, low, weight, bias)
        ctx.options = (stride, padding, allow_tf32)
        return _conv2d_fwd(x, low, bias, *ctx.options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, low, weight, bias = ctx.saved_tensors
        dy = dy.contiguous()  # autograd hands over expanded tensors, e.g. from y.sum()
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        dx = _conv2d_dgrad(dy, low, x.shape[1:3], *ctx.options) if need_dx else None
        dw = _conv2d_wgrad(x, dy, weight, *ctx.options) if need_dw else None
        db = _conv2d_bgrad(dy, bias) if need_db else None
        return dx, dw, db, None, None, None


def conv2d(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S], channels_last in memory
    bias: Tensor | None = None,  # [CO]
    *,
    stride: int = 1,
    padding: int | tuple[int, int] | None = None,  # None: (R // 2, S // 2)
    allow_tf32: bool = False,  # float32 only: multiply in TF32
) -> Tensor:  # [N, P, Q, CO], dtype of x
    """Cross-correlation in x.dtype with float32 accumulation; bias is added to the accumulator.

    `weight` and `bias` may be float32 while x is bfloat16 or float16: weight is rounded to x.dtype
    for the arithmetic, and the gradients keep the parameter's dtype, straight from accumulators.

    Raises ValueError if x is not contiguous NHWC, weight not channels_last, or shapes do not match.
    """
    check_nhwc("x", x)
    if weight.ndim != 4 or weight.shape[1] != x.shape[3]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; expected [CO, {x.shape[3]}, R, S] "
            f"for x of shape {tuple(x.shape)}"
        )
    # is_contiguous(memory_format=channels_last) of a 1x1 weight says yes to more strides than this
    if not weight.permute(0, 2, 3, 1).is_contiguous():
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} has strides {weight.stride()}; expected "
            "channels_last: weight.to(memory_format=torch.channels_last); nn.Module.to does it too"
        )
    check_shape("bias", bias, weight.shape[0])
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.dtype not in DTYPES:
            raise ValueError(f"{name} is {p.dtype}; expected float32, float16 or bfloat16")
        if p is not None and p.device != x.device:
            raise ValueError(f"{name} is on {p.device}; expected {x.device}, where x is")
    if bias is not None and not bias.is_contiguous():
        raise ValueError(f"bias has stride {bias.stride()}; expected contiguous")
    _, _, r, s = weight.shape
    if padding is None:
        padding = (r // 2, s // 2)
    elif isinstance(padding, int):
        padding = (padding, padding)
    if stride < 1 or min(padding) < 0:
        raise ValueError(f"stride={stride}, padding={padding}; expected stride >= 1, padding >= 0")
    size = [_out_size(x.shape[1 + i], (r, s)[i], stride, padding[i]) for i in range(2)]
    if min(size) < 1:
        raise ValueError(
            f"x of shape {tuple(x.shape)} is smaller than the {r}x{s} filter with padding {padding}"
        )
    pixels = max(x.shape[1] * x.shape[2], size[0] * size[1])
    if max(x.shape[0], x.shape[3], weight.shape[0]) * pixels >= 2**31:
        raise ValueError(
            f"x of shape {tuple(x.shape)}: the pixels of the batch, and the elements of one image, "
            "have to be fewer than 2^31"
        )
    return _Conv2d.apply(x, weight, bias, stride, tuple(padding), allow_tf32)
