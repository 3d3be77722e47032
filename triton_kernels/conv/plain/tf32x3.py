"""Forward and input gradient of `conv2d` in float32 on tensor cores, by three products in TF32.

x and the filters are split into two TF32 numbers each (`triton_kernels.tf32`), once, and the loop
of `conv.plain.tma` reads both parts of both:

    y = sum big x big  +  sum (small x big + big x small)

The products of a step are added up by themselves and then, with the rounding of float32, to the
sum: tensor cores round every addition towards zero, which over the 576 additions of 512 channels
and 9 taps would be 4e-5 of the result, thirty times the error of a sum of FMAs. The second sum is
small, so it can stay there. It is left out where it is no number: an infinity times zero, of a
filter whose second part is zero, is not in the float32 product.

1x1 filters see a number once, so that there it is split in registers, without a copy.

`multiply_split` is that loop, for the fused convolutions too (`conv.plain.fused_kernels`).
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...registry.cost import of_products
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import await_inputs, overlapping
from ...runtime.device import Device
from ...tf32 import split_to_tf32
from ..configs import ConvOperands
from .linear_tf32x3 import launch_linear
from .tma import tile_constants, tile_origin
from .tma_boxes import (
    as_one_row,
    count_boxes,
    in_boxes,
    is_pointwise,
    pixel_box,
    unaddressable,
    weight_in_boxes,
)
from .transpose_weights import split, transpose_weights


@configures("tf32x3")
class Config(NamedTuple):
    """What one program of the forward or of the input gradient computes."""

    block_c: int  # output channels
    block_m: int  # pixels
    block_k: int  # input channels a step
    num_warps: int
    num_stages: int
    in_registers: bool = False  # numbers are split there, without copies


@configures("linear_tf32x3")
class LinearConfig(NamedTuple):
    """Of `linear_tf32x3`: split in registers, in chunks of the sum side by side."""

    block_c: int
    block_m: int
    num_warps: int


_INSIDE = Config(64, 64, 32, 4, 4, True)
FWD_CONFIGS = [
    Config(64, 128, 32, 4, 2),
    Config(64, 64, 32, 4, 3),
    Config(64, 64, 32, 4, 2),  # from here on only where they were measured to be faster
    Config(64, 128, 32, 4, 4),
    Config(128, 128, 32, 8, 3),
    _INSIDE,
    Config(16, 32, 32, 4, 8, True),
]
LINEAR_CONFIGS = [LinearConfig(16, 16, 4)]
_MANY_PIXELS = 1024  # of a 1x1 convolution, whose copies would take longer than its products
_MOST_MEMORY = 2**32  # bytes of the copies


@triton.jit
def multiply_split(
    acc,  # float32 [BLOCK_C, BLOCK_M], of the products of first parts,
    acc_small,  # and of the others
    x_desc,  # [N, H, W, CI] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K], the first part,
    x_small_desc,  # and the second; None: x has not been split, and neither have the filters
    w_desc,  # [R * S, CO, CI] in boxes [1, BLOCK_C, BLOCK_K], likewise; DGRAD: they change places
    w_small_desc,
    n0,
    h0,
    w0,
    c0,
    CI,
    R: tl.constexpr,
    S: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DGRAD: tl.constexpr,  # of filters that have not been turned
    PRECISION: tl.constexpr,  # of each product
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Both sums with a tile of a convolution, or of its input gradient, added to them;
    `whole_sum` is their result."""
    k_blocks = tl.cdiv(CI, BLOCK_K)
    for step in range(R * S * k_blocks):
        tap = step // k_blocks
        k0 = (step - tap * k_blocks) * BLOCK_K
        if DGRAD:
            h = h0 - tap // S + PAD_H
            w = w0 - tap % S + PAD_W
        else:
            h = h0 + tap // S - PAD_H
            w = w0 + tap % S - PAD_W
        if x_small_desc is None:
            x = x_desc.load([n0, h, w, k0]).reshape(BLOCK_M, BLOCK_K)
            if DGRAD:
                f = tl.trans(w_desc.load([tap, k0, c0]).reshape(BLOCK_K, BLOCK_C))
            else:
                f = w_desc.load([tap, c0, k0]).reshape(BLOCK_C, BLOCK_K)
            x, x_small = split_to_tf32(x)
            f, f_small = split_to_tf32(f)
            x = tl.trans(x)
            x_small = tl.trans(x_small)
            acc_small = tl.dot(f_small, x, acc_small, input_precision=PRECISION)
        else:
            f_small = w_small_desc.load([tap, c0, k0]).reshape(BLOCK_C, BLOCK_K)
            x = tl.trans(x_desc.load([n0, h, w, k0]).reshape(BLOCK_M, BLOCK_K))
            acc_small = tl.dot(f_small, x, acc_small, input_precision=PRECISION)
            f = w_desc.load([tap, c0, k0]).reshape(BLOCK_C, BLOCK_K)
            x_small = tl.trans(x_small_desc.load([n0, h, w, k0]).reshape(BLOCK_M, BLOCK_K))
        acc_small = tl.dot(f, x_small, acc_small, input_precision=PRECISION)
        # with the last argument the compiler does not make the sum an operand of the product
        acc += tl.dot(f, x, input_precision=PRECISION, max_num_imprecise_acc=BLOCK_K)
    return acc, acc_small


@triton.jit
def whole_sum(acc, acc_small):
    """Of the two sums of `multiply_split`, the second where it is a number."""
    return acc + tl.where(tl.abs(acc_small) < float("inf"), acc_small, 0.0)


@triton.jit(do_not_specialize=["P", "Q"])
def _conv2d_tf32x3_kernel(
    x_desc,  # [N, H, W, CI] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K], the first part,
    x_small_desc,  # and the second; None: x has not been split, and neither have the filters
    w_desc,  # [R * S, CO, CI] in boxes [1, BLOCK_C, BLOCK_K], likewise; DGRAD: they change places
    w_small_desc,
    bias_ptr,  # [CO] or None
    y_desc,  # [N, P, Q, CO] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_C]
    CI,
    P,
    Q,
    CO,
    R: tl.constexpr,
    S: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DGRAD: tl.constexpr,  # of filters that have not been turned
    PRECISION: tl.constexpr,  # of each product
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    await_inputs()
    BLOCK_M: tl.constexpr = TILE_N * TILE_H * TILE_W
    n0, h0, w0, c0 = tile_origin(P, Q, CO, TILE_N, TILE_H, TILE_W, BLOCK_C)
    acc = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    acc, acc_small = multiply_split(
        acc, acc, x_desc, x_small_desc, w_desc, w_small_desc, n0, h0, w0, c0, CI,
        R, S, PAD_H, PAD_W, DGRAD, PRECISION, BLOCK_M, BLOCK_C, BLOCK_K,
    )  # fmt: skip
    acc = whole_sum(acc, acc_small)
    if bias_ptr is not None:
        offs_c = c0 + tl.arange(0, BLOCK_C)
        bias = tl.load(bias_ptr + offs_c, mask=offs_c < CO, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    y_desc.store([n0, h0, w0, c0], tl.trans(acc).reshape(TILE_N, TILE_H, TILE_W, BLOCK_C))


def is_split_before(x: Tensor, weight: Tensor) -> bool:
    """Whether both are split by a pass of their own: of several taps a copy costs less than to
    split a number once for each of them, if there is memory for it."""
    taps = weight.shape[2] * weight.shape[3]
    return taps > 1 and 2 * x.nbytes <= _MOST_MEMORY


def launch(config: Config, operands: ConvOperands) -> None:
    """y = conv(x, weight) + bias; with `dgrad` x is the gradient of the output, y of the input."""
    x, weight, bias, y, _, padding, _, dgrad, *_ = operands
    _, _, r, s = weight.shape
    if config.in_registers:
        parts, filters = (x, None), (weight, None)
    elif dgrad:
        parts, filters, dgrad = split(x), transpose_weights(weight, 2), False
        padding = (r - 1 - padding[0], s - 1 - padding[1])
    else:
        parts, filters = split(x), split(weight)
    if is_pointwise(weight, padding):
        parts = [None if part is None else as_one_row(part) for part in parts]
        y = as_one_row(y)
    n, p, q, co = y.shape
    box = pixel_box(config.block_m, n, p, q)
    programs = count_boxes(box, n, p, q) * triton.cdiv(co, config.block_c)
    block_co, block_ci = config.block_c, config.block_k
    if dgrad:
        block_co, block_ci = block_ci, block_co
    _conv2d_tf32x3_kernel[(programs,)](
        *(None if part is None else in_boxes(part, [*box, config.block_k]) for part in parts),
        *(None if part is None else weight_in_boxes(part, block_co, block_ci) for part in filters),
        bias,
        in_boxes(y, [*box, config.block_c]),
        x.shape[3],
        p,
        q,
        co,
        DGRAD=dgrad,
        **tile_constants((r, s), padding, "tf32", box, config),
        # not `following`: 128 programs, which probably crowd where those of the copies end first,
        # took 20 to 27 % longer
        **overlapping(x.device),
    )


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do a convolution, or an input gradient, or None."""
    if spec.stride != 1:
        return f"it does stride 1, not {spec.stride}"
    if spec.dtype != "fp32":
        return "it does float32 that is not rounded to TF32"
    if (few := min(spec.of_filters)) < 32:
        return f"{few} channels would leave most of a tile to nothing"
    if 2 * spec.n * spec.h * spec.w * spec.k * 4 > _MOST_MEMORY:
        return "copies would take too much memory"
    return unaddressable(spec, gpu)


def configs(spec: ConvSpec, gpu: Device) -> list[Config]:
    """Those that fit into shared memory. Of several taps a copy costs less than to split a number
    once for each of them."""
    return [
        c
        for c in FWD_CONFIGS
        if not (c.in_registers and spec.taps > 1)
        and 2 * c.num_stages * (c.block_c + c.block_m) * c.block_k * 4 + 1024 <= gpu.shared_memory
    ]


def _cost(spec: ConvSpec, gpu: Device, c: Config) -> float:
    """A rule of thumb. It pays from 2^27 multiplications on an H100 on, and for 1x1 filters over
    many pixels always."""
    n, p, q = spec.n, *spec.size
    safe, small = FWD_CONFIGS[:2]
    if spec.taps == 1 and n * p * q >= _MANY_PIXELS:
        best, rule = _INSIDE, "tf32x3 points"
    else:
        programs = count_boxes(pixel_box(safe.block_m, n, p, q), n, p, q) * triton.cdiv(spec.c, 64)
        best, rule = (safe if programs >= 2 * gpu.num_sms else small), "tf32x3"
    return of_products(rule, _flops(spec), gpu) if c == best else math.inf


def _flops(spec: ConvSpec) -> int:
    co, ci = spec.of_filters
    return 2 * math.prod(spec.size) * spec.n * co * ci * spec.taps


FORWARD = INPUT_GRAD = Kernel("tf32x3", Config, refuse, configs, _cost, launch)


def _refuse_linear(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := refuse(spec, gpu):
        return reason
    if spec.taps > 1 or spec.pads != (0, 0):
        return f"it does 1x1 filters without padding, not {spec.r}x{spec.s}"
    pixels = spec.n * spec.h * spec.w
    return f"{pixels} pixels; it takes up to {_MANY_PIXELS}" if pixels > _MANY_PIXELS else None


LINEAR = Kernel(
    "linear_tf32x3",
    LinearConfig,
    _refuse_linear,
    lambda spec, gpu: LINEAR_CONFIGS,
    launch=lambda c, o: launch_linear(o.x, o.weight, o.bias, o.y, dgrad=o.dgrad, **c._asdict()),
)
