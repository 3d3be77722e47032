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
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...registry.choose import choose
from ...registry.kernel import configures
from ...runtime.dependent_launch import await_inputs, overlapping
from ...runtime.device import describe
from ...tf32 import split_to_tf32
from . import gather
from .linear_tf32x3 import launch_linear
from .tma import tile_constants, tile_origin
from .tma_boxes import (
    addressable,
    aligned,
    as_one_row,
    count_boxes,
    in_boxes,
    is_pointwise,
    pixel_box,
    weight_in_boxes,
)
from .transpose_weights import split, turn_filters


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


_GATHER = gather.Config(64, 64, 32, 4, 3)  # whose products are FMAs
_GATHER_FEW = gather.Config(16, 16, 64, 4, 3)  # the linear layer over some samples: more programs
_INSIDE = Config(64, 64, 32, 4, 4, True)
FORWARD = (Config, LinearConfig)
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
_WORTH = 2**27  # multiplications that pay for the copies; fewer are left to `conv.plain.gather`,
_MOST_MEMORY = 2**32  # and so are copies of more bytes


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
    acc_small = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
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
    acc += tl.where(tl.abs(acc_small) < float("inf"), acc_small, 0.0)
    if bias_ptr is not None:
        offs_c = c0 + tl.arange(0, BLOCK_C)
        bias = tl.load(bias_ptr + offs_c, mask=offs_c < CO, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    y_desc.store([n0, h0, w0, c0], tl.trans(acc).reshape(TILE_N, TILE_H, TILE_W, BLOCK_C))


def launch_fwd(
    x: Tensor,  # float32 [N, H, W, CI], or dy
    weight: Tensor,  # float32 [CO, CI, R, S] in channels_last memory
    bias: Tensor | None,  # [CO]
    y: Tensor,  # float32 [N, P, Q, CO] to be written, or dx
    stride: int,
    padding: tuple[int, int],
    precision: str,
    *,
    dgrad: bool,
    config: Config | LinearConfig | gather.Config | None = None,
) -> None:
    """y = conv(x, weight) + bias; with `dgrad` x is the gradient of the output, y of the input."""
    assert stride == 1 and precision == "ieee"
    _, _, r, s = weight.shape
    if config is None:

        def run(c: Config) -> Tensor:
            out = torch.empty_like(y)
            launch_fwd(x, weight, bias, out, stride, padding, precision, dgrad=dgrad, config=c)
            return out

        config = choose(
            "conv2d_fp32_dgrad" if dgrad else "conv2d_fp32",
            x.shape[0],
            {
                "h": x.shape[1],
                "w": x.shape[2],
                "k": x.shape[3],
                "p": y.shape[1],
                "q": y.shape[2],
                "c": y.shape[3],
                "r": r,
                "s": s,
            },
            lambda: [
                *(c for c in FWD_CONFIGS if _fits(c, x, r * s)),
                *(LINEAR_CONFIGS if _is_linear(x, weight, padding) else ()),
                _GATHER,
                _GATHER_FEW,
            ],
            lambda: _pick(x, weight, y),
            run,
            describe(x.device),
            similar=True,
        )
    if isinstance(config, gather.Config):
        gather.launch_fwd(
            x, weight, bias, y, stride, padding, precision, dgrad=dgrad, config=config
        )
        return
    if isinstance(config, LinearConfig):
        launch_linear(
            x, weight, bias, y, dgrad=dgrad, block_c=config.block_c, block_m=config.block_m,
            num_warps=config.num_warps,
        )  # fmt: skip
        return
    if config.in_registers:
        parts, filters = (x, None), (weight, None)
    elif dgrad:
        parts, filters, dgrad = split(x), turn_filters(weight, 2), False
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


def serves_fwd(x: Tensor, weight: Tensor, y: Tensor, stride: int, precision: str) -> bool:
    """Whether `launch_fwd` can do this convolution, or this input gradient."""
    wide = min(weight.shape[:2]) >= 32  # few channels would leave most of a tile to nothing
    fits = 2 * x.nbytes <= _MOST_MEMORY
    served = stride == 1 and precision == "ieee" and wide and fits
    return served and addressable(x, y) and aligned(weight)


def _pick(x: Tensor, weight: Tensor, y: Tensor) -> Config | gather.Config:
    n, p, q, co = y.shape
    if weight.shape[2:].numel() == 1 and n * p * q >= _MANY_PIXELS:
        return _INSIDE
    if n * p * q * weight.numel() < _WORTH:
        return (
            _GATHER_FEW if 8 * n * p * q * co <= 64 * 64 * describe(x.device).num_sms else _GATHER
        )
    safe, small = FWD_CONFIGS[:2]
    programs = count_boxes(pixel_box(safe.block_m, n, p, q), n, p, q) * triton.cdiv(co, 64)
    return safe if programs >= 2 * describe(x.device).num_sms else small


def _is_linear(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> bool:
    """Whether it is a product over few pixels."""
    return is_pointwise(weight, padding) and x.numel() // x.shape[3] <= _MANY_PIXELS


def _fits(c: Config, x: Tensor, taps: int) -> bool:
    if c.in_registers and taps > 1:
        return False  # a copy costs less than to split a number once for every tap
    fetched = 2 * c.num_stages * (c.block_c + c.block_m) * c.block_k * 4
    return fetched + 1024 <= describe(x.device).shared_memory
