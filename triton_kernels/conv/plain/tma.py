"""The fast path of `conv2d`: implicit GEMM whose tiles are fetched by TMA (Hopper and later).

x is a four-dimensional tensor to the TMA unit, and one box [TILE_N, TILE_H, TILE_W, BLOCK_K] of it,
moved by (r - pad, s - pad), is exactly what the tile of pixels needs for tap (r, s): coordinates
outside the tensor, negative ones included, come back as zeros, and that is the padding. There is no
index arithmetic and no mask. A small image simply takes several images a tile.

Needs stride 1 and channels that are multiples of 16 bytes; `conv.plain.gather` serves the rest. The
weight gradient is in `conv.plain.tma_wgrad`.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...registry.kernel import CLOCKS, Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import await_inputs, following, overlapping
from ...runtime.device import Device
from ..configs import ConvOperands, FwdTile
from .tma_boxes import (
    as_one_row,
    count_boxes,
    in_boxes,
    is_pointwise,
    pixel_box,
    tile_sizes,
    unaddressable,
    weight_in_boxes,
)
from .transpose_weights import transpose_weights


@configures("tma")
class Config(NamedTuple):
    """What one program of the forward or of the input gradient computes."""

    block_c: int  # output channels
    block_m: int  # pixels
    block_k: int  # input channels a step
    num_warps: int
    num_stages: int
    rows: int = 1  # pixel tiles one below the other, which share loads; see `multiply_rows`


# Tiles that keep both operands of wgmma in shared memory and spill no register. The cost model
# chooses from these,
_MODELLED = [
    Config(64, 16, 64, 4, 4),  # the linear layer over a handful of samples
    Config(64, 64, 64, 4, 4),
    Config(64, 128, 64, 4, 3),
    Config(64, 256, 64, 4, 4),
    Config(128, 128, 64, 4, 3),
    Config(128, 256, 64, 8, 3),
    Config(64, 64, 32, 4, 4),  # few input channels, and TF32: a row of a box is at most 128 bytes
    Config(128, 128, 32, 4, 4),
]
FWD_CONFIGS = [  # and rows name those that were measured to be faster
    *_MODELLED,
    Config(64, 128, 64, 4, 2),
    Config(64, 128, 64, 4, 4),
    Config(64, 256, 64, 4, 2),
    Config(64, 256, 64, 8, 3),
    Config(128, 64, 64, 4, 3),
    Config(128, 128, 64, 4, 2),
    Config(128, 128, 64, 8, 3),
    Config(128, 256, 64, 8, 4),
    Config(256, 64, 64, 8, 2),
    Config(256, 128, 64, 8, 2),
    Config(256, 128, 64, 8, 3),
    Config(64, 32, 32, 4, 4),
    Config(64, 64, 32, 4, 8),
    Config(64, 128, 32, 4, 2),
    Config(64, 128, 32, 4, 3),
    Config(64, 128, 32, 4, 4),
    Config(64, 128, 32, 4, 6),
    Config(64, 256, 32, 4, 4),
    Config(128, 128, 32, 4, 3),
    Config(16, 32, 32, 4, 8),
]
_TRANSPOSE_FROM = 1024  # pixels of a float32 input gradient, which pay for a copy of the filters


@triton.jit
def tile_origin(
    P,
    Q,
    CO,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """First image, row, column and channel of this program's tile of the output. Programs that
    share pixels are neighbours, so x comes from memory once and then from L2."""
    num_c = tl.cdiv(CO, BLOCK_C)
    tiles_h = tl.cdiv(P, TILE_H)
    tiles_w = tl.cdiv(Q, TILE_W)
    tile = tl.program_id(0) // num_c
    c0 = tl.program_id(0) % num_c * BLOCK_C
    w0 = tile % tiles_w * TILE_W
    h0 = tile // tiles_w % tiles_h * TILE_H
    n0 = tile // (tiles_w * tiles_h) * TILE_N
    return n0, h0, w0, c0


@triton.jit
def multiply(
    x_desc,  # [N, H, W, CI] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K]: x, or dy
    w_desc,  # [R * S, CO, CI] in boxes [1, BLOCK_C, BLOCK_K]; DGRAD: CO and CI change places
    n0,
    h0,
    w0,
    c0,
    CI,
    R: tl.constexpr,
    S: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DGRAD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of the convolution, or of its input gradient: float32 [BLOCK_C, BLOCK_M]."""
    acc = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    k_blocks = tl.cdiv(CI, BLOCK_K)
    for step in range(R * S * k_blocks):
        tap = step // k_blocks
        k0 = (step - tap * k_blocks) * BLOCK_K
        r = tap // S
        s = tap % S
        if DGRAD:
            x = x_desc.load([n0, h0 - r + PAD_H, w0 - s + PAD_W, k0])
            w = tl.trans(w_desc.load([tap, k0, c0]).reshape(BLOCK_K, BLOCK_C))
        else:
            x = x_desc.load([n0, h0 + r - PAD_H, w0 + s - PAD_W, k0])
            w = w_desc.load([tap, c0, k0]).reshape(BLOCK_C, BLOCK_K)
        x = x.reshape(BLOCK_M, BLOCK_K)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@triton.jit
def multiply_rows(
    x_desc,  # [N, H, W, CI] in boxes [TILE_N, 1, TILE_W, BLOCK_K]: x, or dy
    w_desc,  # as in `multiply`
    n0,
    h0,
    w0,
    c0,
    CI,
    S: tl.constexpr,
    PAD_W: tl.constexpr,
    DGRAD: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,  # 2 or 4
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Tiles at rows h0, h0 + 1, ... of a convolution with filters of 3 rows and padding 1: four
    float32 [BLOCK_C, BLOCK_M], of which the first ROWS count.

    A row of x serves the three rows of y around it from one load. Where there are few output
    channels the time goes into fetching x from L2 once for every tap: 9 times with `multiply`, 4.5
    times with four rows.
    """
    acc0 = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    acc1 = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    acc2 = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)  # these two cost nothing if ROWS == 2
    acc3 = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    k_blocks = tl.cdiv(CI, BLOCK_K)
    for step in range(S * k_blocks):
        s = step // k_blocks
        k0 = (step - s * k_blocks) * BLOCK_K
        if DGRAD:  # the filter upside down, so that y at h0 + j reads x_j, x_j+1, x_j+2 as well
            col = w0 - s + PAD_W
            fa = tl.trans(w_desc.load([2 * S + s, k0, c0]).reshape(BLOCK_K, BLOCK_C))
            fb = tl.trans(w_desc.load([S + s, k0, c0]).reshape(BLOCK_K, BLOCK_C))
            fc = tl.trans(w_desc.load([s, k0, c0]).reshape(BLOCK_K, BLOCK_C))
        else:
            col = w0 + s - PAD_W
            fa = w_desc.load([s, c0, k0]).reshape(BLOCK_C, BLOCK_K)
            fb = w_desc.load([S + s, c0, k0]).reshape(BLOCK_C, BLOCK_K)
            fc = w_desc.load([2 * S + s, c0, k0]).reshape(BLOCK_C, BLOCK_K)
        x0 = tl.trans(x_desc.load([n0, h0 - 1, col, k0]).reshape(BLOCK_M, BLOCK_K))
        x1 = tl.trans(x_desc.load([n0, h0, col, k0]).reshape(BLOCK_M, BLOCK_K))
        x2 = tl.trans(x_desc.load([n0, h0 + 1, col, k0]).reshape(BLOCK_M, BLOCK_K))
        x3 = tl.trans(x_desc.load([n0, h0 + 2, col, k0]).reshape(BLOCK_M, BLOCK_K))
        acc0 = tl.dot(fa, x0, acc0, input_precision=PRECISION)
        acc0 = tl.dot(fb, x1, acc0, input_precision=PRECISION)
        acc0 = tl.dot(fc, x2, acc0, input_precision=PRECISION)
        acc1 = tl.dot(fa, x1, acc1, input_precision=PRECISION)
        acc1 = tl.dot(fb, x2, acc1, input_precision=PRECISION)
        acc1 = tl.dot(fc, x3, acc1, input_precision=PRECISION)
        if ROWS == 4:
            x4 = tl.trans(x_desc.load([n0, h0 + 3, col, k0]).reshape(BLOCK_M, BLOCK_K))
            x5 = tl.trans(x_desc.load([n0, h0 + 4, col, k0]).reshape(BLOCK_M, BLOCK_K))
            acc2 = tl.dot(fa, x2, acc2, input_precision=PRECISION)
            acc2 = tl.dot(fb, x3, acc2, input_precision=PRECISION)
            acc2 = tl.dot(fc, x4, acc2, input_precision=PRECISION)
            acc3 = tl.dot(fa, x3, acc3, input_precision=PRECISION)
            acc3 = tl.dot(fb, x4, acc3, input_precision=PRECISION)
            acc3 = tl.dot(fc, x5, acc3, input_precision=PRECISION)
    return acc0, acc1, acc2, acc3


@triton.jit(do_not_specialize=["P", "Q"])
def _conv2d_tma_kernel(
    x_desc,  # [N, H, W, CI] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K]: x, or dy
    w_desc,  # [R * S, CO, CI] in boxes [1, BLOCK_C, BLOCK_K]; DGRAD: CO and CI change places
    bias_ptr,  # [CO]
    y_desc,  # [N, P, Q, CO] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_C]: y, or dx
    CI,
    P,
    Q,
    CO,
    R: tl.constexpr,
    S: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DGRAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    await_inputs()
    n0, h0, w0, c0 = tile_origin(P, Q, CO, TILE_N, TILE_H, TILE_W, BLOCK_C)
    acc = multiply(
        x_desc, w_desc, n0, h0, w0, c0, CI, R, S, PAD_H, PAD_W, DGRAD, PRECISION,
        TILE_N * TILE_H * TILE_W, BLOCK_C, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        offs_c = c0 + tl.arange(0, BLOCK_C)
        bias = tl.load(bias_ptr + offs_c, mask=offs_c < CO, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    y = tl.trans(acc.to(y_desc.dtype))
    y_desc.store([n0, h0, w0, c0], y.reshape(TILE_N, TILE_H, TILE_W, BLOCK_C))


def launch(config: Config, operands: ConvOperands) -> None:
    """y = conv(x, weight) + bias; with `dgrad` x is the gradient of the output, y of the input."""
    x, weight, bias, y, _, padding, precision, dgrad, _, follows = operands
    _, _, r, s = weight.shape
    launch_option = following(x.device) if follows else overlapping(x.device)
    if dgrad and worth_transposing(y):
        padding = (r - 1 - padding[0], s - 1 - padding[1])
        weight, dgrad = transpose_weights(weight, 1)[0], False
        launch_option = following(x.device)
    if is_pointwise(weight, padding):
        x, y = as_one_row(x), as_one_row(y)
    ci = x.shape[3]
    n, p, q, co = y.shape
    box = pixel_box(config.block_m, n, p, q)
    block_co, block_ci = config.block_c, config.block_k
    if dgrad:
        block_co, block_ci = block_ci, block_co
    programs = count_boxes(box, n, p, q) * triton.cdiv(co, config.block_c)
    _conv2d_tma_kernel[(programs,)](
        in_boxes(x, [*box, config.block_k]),
        weight_in_boxes(weight, block_co, block_ci),
        bias,
        in_boxes(y, [*box, config.block_c]),
        ci,
        p,
        q,
        co,
        DGRAD=dgrad,
        HAS_BIAS=bias is not None,
        **tile_constants((r, s), padding, precision, box, config),
        **launch_option,
    )


def worth_transposing(dx: Tensor) -> bool:
    """Whether `transpose_weights` should precede this input gradient."""
    return dx.itemsize == 4 and dx.numel() >= _TRANSPOSE_FROM * dx.shape[3]


def tile_constants(
    filter_size: tuple[int, int],  # R, S
    padding: tuple[int, int],
    precision: str,
    box: tuple[int, int, int],
    config: FwdTile | Config,
) -> dict[str, int | str]:
    """What a kernel has to know when it is compiled, and how; of stride 2 as well."""
    return {
        "R": filter_size[0],
        "S": filter_size[1],
        "PAD_H": padding[0],
        "PAD_W": padding[1],
        "PRECISION": precision,
        **tile_sizes(box, config),
    }


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do a forward pass, or None."""
    if spec.stride != 1:
        return f"it does stride 1, not {spec.stride}"
    if spec.dtype == "fp32":
        return "float32 that is not rounded to TF32"
    return unaddressable(spec, gpu)


def refuse_grad(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do an input gradient, or None."""
    if reason := refuse(spec, gpu):
        return reason
    return "filters are transposed first" if transposes_first(spec) else None


def transposes_first(spec: ConvSpec) -> bool:
    """Whether the filters of an input gradient of stride 1 are transposed first."""
    rows, columns = spec.size
    return spec.dtype == "tf32" and spec.n * rows * columns >= _TRANSPOSE_FROM


def configs(spec: ConvSpec, gpu: Device) -> list[Config]:
    """The tiles that fit."""
    return [c for c in FWD_CONFIGS if _fits(c, spec, gpu)]


def cost(spec: ConvSpec, gpu: Device, c: Config) -> float:
    """Microseconds by a crude model: rounds of programs on the multiprocessors, times the work of
    one, which is multiplying plus fetching."""
    if c not in _MODELLED:
        return math.inf
    work = c.block_c * c.block_m + 32 * (c.block_c + c.block_m)
    clocks = triton.cdiv(_programs(c, spec), gpu.num_sms) * work * spec.k * spec.taps / 1024
    return 3 + clocks / CLOCKS


def best_cost(spec: ConvSpec, gpu: Device) -> float:
    """Of the best tile."""
    return min(cost(spec, gpu, c) for c in configs(spec, gpu))


def _programs(c: Config, spec: ConvSpec) -> int:
    boxes = count_boxes(pixel_box(c.block_m, *spec.pixels), *spec.pixels)
    return boxes * triton.cdiv(spec.c, c.block_c)


def _fits(c: Config, spec: ConvSpec, gpu: Device) -> bool:
    block_k = 64 if spec.itemsize == 2 and spec.k > 32 else 32
    fetched = c.num_stages * (c.block_c + c.block_m) * c.block_k * spec.itemsize
    return c.block_k == block_k and fetched + 1024 <= gpu.shared_memory


FORWARD = Kernel("tma", Config, refuse, configs, cost, launch)
INPUT_GRAD = Kernel("tma", Config, refuse_grad, configs, cost, launch)
