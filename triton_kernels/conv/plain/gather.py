"""The general path of `conv2d`: implicit GEMM that gathers its operands through pointers, forward
and input gradient. The weight gradient is in `conv.plain.gather_wgrad`.

Serves any stride, padding and number of channels on any GPU; `conv.plain.tma` is the fast path.
"""

import math
from functools import partial

import triton
import triton.language as tl

from ...registry.cost import of_products
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.device import Device
from ..configs import ConvOperands, FwdTile
from .products import add_split_product, whole_sum


@configures("gather")
class Config(FwdTile):
    """What one program of the forward or of the input gradient computes."""

    __slots__ = ()


FWD_CONFIGS = [
    Config(64, 64, 32, 4, 3),
    Config(64, 128, 32, 4, 3),
    Config(64, 16, 64, 4, 3),  # the linear layer over a handful of samples
    Config(16, 128, 32, 4, 3),  # the head: three output channels
    Config(64, 64, 32, 4, 2),  # these only where they were measured to be faster
    Config(16, 16, 64, 4, 3),
    Config(64, 64, 32, 4, 1),  # a stem's products are one step: a second stage is for nothing
]
_ONE_STEP = FWD_CONFIGS[-1]
_OF_FMAS, _OF_FEW_FMAS = FWD_CONFIGS[0], FWD_CONFIGS[-2]  # of wide layers in float32


@triton.jit(do_not_specialize=["N", "H", "W", "P", "Q"])
def _conv2d_gather_kernel(
    x_ptr,  # [N, H, W, CI] what is read: x, or dy for the input gradient
    w_ptr,
    bias_ptr,  # [CO] or None
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

    if bias_ptr is not None:
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
    # few channels of x: tiles are so small that splitting them costs less than FMAs
    splits = precision == "ieee" and x.itemsize == 4 and ci < 16 and config.block_c >= 64
    _conv2d_gather_kernel[(tiles, step * step)](
        x, weight, bias, add, y, n, h, w, ci, p, q, co, stride_wo, weight_ci, stride_wi,
        R=r, S=s, STRIDE=stride, PAD_H=padding[0], PAD_W=padding[1], DGRAD=dgrad, FLAT=ci < 16,
        PRECISION=precision, SPLIT=splits, BLOCK_C=config.block_c, BLOCK_M=config.block_m,
        BLOCK_K=config.block_k, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


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
        few = 8 * math.prod(spec.pixels) * channels <= 64 * 64 * gpu.num_sms
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
    flops = 2 * math.prod(spec.pixels) * co * ci * spec.taps
    # in 16 bits and in TF32 other kernels come first, if they can do it
    return of_products("gather fp32" if spec.dtype == "fp32" else "gather", flops, gpu)


FORWARD, INPUT_GRAD = (
    Kernel(
        "gather",
        Config,
        configs=partial(_fitting, grad=grad),
        cost=partial(_cost, grad=grad),
        launch=launch,
    )
    for grad in (False, True)
)
