"""The general path of `conv2d`: implicit GEMM that gathers its operands through pointers.

Serves any stride, padding and number of channels on any GPU; `conv.plain.tma` is the fast path.
"""

import math
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from ...reductions.column_sum import num_splits
from ...registry.cost import Work, of_products, programs_at_a_time
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.device import Device
from ...tf32 import split_to_tf32
from ..configs import ConvOperands, FwdTile, WgradOperands, WgradTile, fewest_of, split_kernel
from .products import add_split_product, whole_sum


@configures("gather")
class Config(FwdTile):
    """What one program of the forward or of the input gradient computes."""

    __slots__ = ()


@configures("gather_wgrad")
class WgradConfig(WgradTile):
    """What one program of the weight gradient computes."""

    __slots__ = ()


FWD_CONFIGS = [
    Config(64, 64, 32, 4, 3),
    Config(64, 128, 32, 4, 3),
    Config(64, 16, 64, 4, 3),  # the linear layer over a handful of samples
    Config(16, 128, 32, 4, 3),  # the head: three output channels
    Config(16, 128, 64, 4, 3),  # these only where they were measured to be faster
    Config(16, 256, 64, 4, 3),
    Config(16, 64, 64, 4, 4),
    Config(64, 128, 32, 4, 2),
    Config(64, 64, 32, 4, 2),
    Config(16, 16, 64, 4, 3),
    Config(64, 64, 32, 4, 1),  # a stem's products are one step: a second stage is for nothing
]
_ONE_STEP = FWD_CONFIGS[-1]
_OF_FMAS, _OF_FEW_FMAS = FWD_CONFIGS[0], FWD_CONFIGS[-2]  # of wide layers in float32
WGRAD_CONFIGS = [
    WgradConfig(64, 64, 32, 4, 3),
    WgradConfig(64, 32, 64, 4, 3),  # stem and head: nine taps of three channels
    WgradConfig(16, 64, 64, 4, 3),  # few output channels, strided
    WgradConfig(64, 32, 128, 4, 3),  # these only where they were measured to be faster
    WgradConfig(64, 32, 64, 4, 4),
    WgradConfig(64, 64, 64, 4, 3),
]


# --- forward and input gradient ------------------------------------------------------------------


@triton.jit(do_not_specialize=["N", "H", "W", "P", "Q"])
def _conv2d_gather_kernel(
    x_ptr,  # [N, H, W, CI] what is read: x, or dy for the input gradient
    w_ptr,
    bias_ptr,  # [CO]
    add_ptr,  # [N, P, Q, CO] added to the result, or None
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
    SPLIT: tl.constexpr,  # float32: three products in TF32, whatever PRECISION says
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
    small = acc
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
        if SPLIT:
            acc, small = add_split_product(acc, small, w, x)
        else:
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    if SPLIT:
        acc = whole_sum(acc, small)

    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_c, mask=mask_c, other=0.0).to(tl.float32)[:, None]
    offs_y = ((n.to(tl.int64) * P + p) * Q + q)[None, :] * CO + offs_c[:, None]
    mask_y = mask_c[:, None] & mask_m[None, :]
    if add_ptr is not None:
        acc += tl.load(add_ptr + offs_y, mask=mask_y, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs_y, acc.to(y_ptr.dtype.element_ty), mask=mask_y)


def launch(config: Config, operands: ConvOperands) -> None:
    """y = conv(x, weight) + bias + add; with `dgrad` x is the gradient of the output, y of the
    input."""
    x, weight, bias, y, stride, padding, precision, dgrad, add, _ = operands
    n, h, w, ci = x.shape
    _, p, q, co = y.shape
    _, weight_ci, r, s = weight.shape
    # a program of the input gradient sees the pixels of one remainder modulo the stride
    step = stride if dgrad else 1
    pixels = n * triton.cdiv(p, step) * triton.cdiv(q, step)
    stride_wo, stride_wi = (1, r * s * weight_ci) if dgrad else (r * s * weight_ci, 1)
    tiles = triton.cdiv(pixels, config.block_m) * triton.cdiv(co, config.block_c)
    _conv2d_gather_kernel[(tiles, step * step)](
        x,
        weight,
        bias,
        add,
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
        # few channels of x: tiles are so small that splitting them costs less than FMAs
        SPLIT=precision == "ieee" and x.itemsize == 4 and ci < 16 and config.block_c >= 64,
        BLOCK_C=config.block_c,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _fitting(spec: ConvSpec, gpu: Device, grad: bool) -> list[Config]:
    """In float32 that for few channels, those whose products are FMAs, and the one that is picked.
    Loads of single elements keep a pointer for each; with more than 64x64 registers spill."""
    picked = _pick(spec, gpu, grad)
    if spec.itemsize == 2:
        wide_loads = spec.k % 8 == 0
        found = [c for c in FWD_CONFIGS if wide_loads or c.block_m <= 64]
    elif spec.k < 16:
        found = [_ONE_STEP]
    else:
        found = [_OF_FMAS, _OF_FEW_FMAS] if spec.dtype == "fp32" else []
    return found if picked in found else [*found, picked]


def _pixels(spec: ConvSpec, grad: bool) -> int:
    """That a program of some kind sees: of the input gradient those of one remainder modulo the
    stride."""
    step = spec.stride if grad else 1
    rows, columns = spec.size
    return spec.n * triton.cdiv(rows, step) * triton.cdiv(columns, step)


def _pick(spec: ConvSpec, gpu: Device, grad: bool) -> Config:
    pixels, channels = _pixels(spec, grad), spec.c
    if spec.dtype == "fp32" and spec.stride == 1 and min(spec.of_filters) >= 32 and gpu.tma:
        few = 8 * spec.n * math.prod(spec.size) * channels <= 64 * 64 * gpu.num_sms
        return _OF_FEW_FMAS if few else _OF_FMAS
    safe, large, few_pixels, few_channels = FWD_CONFIGS[:4]
    if channels <= 16:
        return few_channels
    if pixels <= 16:
        return few_pixels
    if spec.itemsize == 4 and spec.k < 16:
        return _ONE_STEP
    wide_loads = spec.k % 8 == 0 and spec.dtype != "fp32"
    programs = triton.cdiv(pixels, large.block_m) * triton.cdiv(channels, large.block_c)
    return large if wide_loads and programs >= 2 * gpu.num_sms else safe


def _cost(spec: ConvSpec, gpu: Device, c: Config, grad: bool) -> float:
    """Of the tile for so many channels and pixels: FMAs in float32, else products of what was
    fetched number by number."""
    if c != _pick(spec, gpu, grad):
        return math.inf
    co, ci = spec.of_filters
    rows, columns = spec.size
    flops = 2 * spec.n * rows * columns * co * ci * spec.taps
    # in 16 bits and in TF32 other kernels come first, if they can do it
    return of_products("gather fp32" if spec.dtype == "fp32" else "gather", flops, gpu)


_FORWARD, _GRAD = {"grad": False}, {"grad": True}
FORWARD, INPUT_GRAD = (
    Kernel(
        "gather",
        Config,
        lambda spec, gpu: None,
        partial(_fitting, **which),
        partial(_cost, **which),
        launch,
    )
    for which in (_FORWARD, _GRAD)
)


# --- weight gradient -----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["H", "W", "P", "Q", "num_pixels", "pixels_per_split"])
def _conv2d_wgrad_gather_kernel(
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
    SWAPPED: tl.constexpr,  # x is dy and dy is x, and the taps count backwards; see `_swapped`
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,  # float32: three products in TF32, whatever PRECISION says
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
        if SPLIT:  # as in `pointwise_wgrad`
            x, x_small = split_to_tf32(x)
            dy, dy_small = split_to_tf32(dy)
            part = tl.dot(tl.trans(dy_small), x, input_precision="tf32")
            part = tl.dot(tl.trans(dy), x_small, part, input_precision="tf32")
            acc += tl.dot(tl.trans(dy), x, part, input_precision="tf32")
        else:
            acc = tl.dot(tl.trans(dy), x, acc, input_precision=PRECISION)

    dw_ptr += split.to(tl.int64) * (CO * TAPS * CI)
    if SWAPPED:  # [CI, TAPS, CO] in the names of this kernel
        offs_w = (c * TAPS + (TAPS - 1 - tap)) * CO + offs_co[:, None]
    else:
        offs_w = offs_co[:, None] * (TAPS * CI) + column[None, :]
    tl.store(
        dw_ptr + offs_w,
        acc.to(dw_ptr.dtype.element_ty),
        mask=mask_co[:, None] & mask_ci[None, :],
    )


def launch_wgrad(config: WgradConfig, splits: int, operands: WgradOperands) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up."""
    x, dy, weight, partial, stride, padding, precision, *_ = operands
    _, _, r, s = weight.shape
    if swapped := _swapped(weight, padding, x, dy):
        x, dy, stride = dy, x, 1
        padding = (r - 1 - padding[0], s - 1 - padding[1])
    _, h, w, ci = x.shape
    n, p, q, co = dy.shape
    _conv2d_wgrad_gather_kernel[(*_wgrad_blocks(co, ci, r * s, config), splits)](
        x, dy, partial, h, w, ci, p, q, co, n * p * q,
        triton.cdiv(triton.cdiv(n * p * q, config.block_m), splits) * config.block_m,
        S=s, TAPS=r * s, STRIDE=stride, PAD_H=padding[0], PAD_W=padding[1], FLAT=ci < 16,
        SWAPPED=swapped, PRECISION=precision,
        SPLIT=precision == "ieee" and x.itemsize == 4 and ci < 16, BLOCK_CO=config.block_co,
        BLOCK_CI=config.block_ci, BLOCK_M=config.block_m, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def _swapped(weight: Tensor, padding: tuple[int, int], x: Tensor, dy: Tensor) -> bool:
    (p, q), (r, s) = dy.shape[1:3], weight.shape[2:]
    same = (p, q) == (x.shape[1] + 2 * padding[0] - r + 1, x.shape[2] + 2 * padding[1] - s + 1)
    return same and _few_of_result(*weight.shape[:2])


def _few_of_result(co: int, ci: int) -> bool:
    """Whether to gather dy instead of x: where the output channels are the few, as in the head.

        dweight[co, r, s, ci] = sum_{n, h, w} x[n, h, w, ci] dy[n, h + pad - r, w + pad - s, co]

    is a weight gradient again, whose taps count backwards. Then x, the large one, is read once and
    not once a tap. With a stride most of the pixels of x would see no dy at all.
    """
    return co < 16 <= ci


def _of_wgrad(spec: ConvSpec) -> tuple[int, int, int]:
    """Channels of the operand that is read once and of the one that is gathered, and pixels."""
    co, ci = spec.of_filters
    (p, q), (pad_h, pad_w) = spec.size, spec.pads
    same = (p, q) == (spec.h + 2 * pad_h - spec.r + 1, spec.w + 2 * pad_w - spec.s + 1)
    if same and _few_of_result(co, ci):
        return ci, co, spec.n * spec.h * spec.w
    return co, ci, spec.n * p * q


def _wgrad_blocks(co: int, ci: int, taps: int, config: WgradConfig) -> tuple[int, int]:
    if ci < 16:
        columns = triton.cdiv(taps * ci, config.block_ci)
    else:
        columns = taps * triton.cdiv(ci, config.block_ci)
    return triton.cdiv(co, config.block_co), columns


def _wgrad_splits(spec: ConvSpec, gpu: Device, c: WgradConfig) -> int:
    co, ci, pixels = _of_wgrad(spec)
    blocks = math.prod(_wgrad_blocks(co, ci, spec.taps, c))
    fewest = fewest_of(spec, pixels)
    return num_splits(blocks, triton.cdiv(pixels, c.block_m), 2 * gpu.num_sms, fewest)


def _wgrad_tiles(spec: ConvSpec, gpu: Device) -> list[WgradConfig]:
    """In float32 products of wide layers are unrolled into FMAs: a small tile, which is the
    first."""
    co, ci, _ = _of_wgrad(spec)
    unrolled = spec.precision == "ieee" and min(co, ci) >= 16
    return [_pick_wgrad(spec)] if unrolled else WGRAD_CONFIGS


def _pick_wgrad(spec: ConvSpec) -> WgradConfig:
    co, ci, _ = _of_wgrad(spec)
    safe, few_columns, few_channels = WGRAD_CONFIGS[:3]
    if co <= 16:
        return few_channels
    return few_columns if (spec.taps * ci if ci < 16 else ci) <= 32 else safe


def _cost_wgrad(spec: ConvSpec, gpu: Device, c: WgradConfig) -> float:
    """Of the tile for so many channels: FMAs in float32, else products of what was fetched number
    by number."""
    if c != _pick_wgrad(spec):
        return math.inf
    co, ci, pixels = _of_wgrad(spec)
    flops = 2 * pixels * co * ci * spec.taps
    return of_products("gather fp32" if spec.itemsize == 4 else "gather", flops, gpu)


def _wgrad_work(spec: ConvSpec, gpu: Device, c: tuple) -> Work | None:
    """What its programs do; None for few channels, which are other code."""
    co, ci, pixels = _of_wgrad(spec)
    if min(co, ci) < 16:
        return None
    steps = triton.cdiv(triton.cdiv(pixels, c.block_m), c.splits)
    fetched = c.block_m * (c.block_co + c.block_ci) * spec.itemsize  # of a step
    return Work(
        tiles=math.prod(_wgrad_blocks(co, ci, spec.taps, c)) * c.splits,
        resident=max(1, programs_at_a_time(c.num_stages * fetched + 1024, c.num_warps, gpu)),
        products=c.block_co * c.block_ci * c.block_m * steps,
        fetched=fetched * steps,
        steps=steps,
        written=0,
        memory=pixels * (spec.k + spec.c) * spec.itemsize,
        parts=c.splits * co * ci * spec.taps * 4,
        splits=c.splits,
    )


WEIGHT_GRAD = split_kernel(
    WgradConfig,
    lambda spec, gpu: None,
    _wgrad_tiles,
    _wgrad_splits,
    launch_wgrad,
    _cost_wgrad,
    work=_wgrad_work,
    alone=lambda spec, c: _of_wgrad(spec)[2] <= 32 * c.block_m,
)
