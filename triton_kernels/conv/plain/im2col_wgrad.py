"""Weight gradient in float32 of filters over few channels, as the stem's: x in columns.

    dweight[co, (r, s, ci)] = sum_m dy[m, co] columns[m, (r, s, ci)]

The nine taps of three channels are 27 numbers a pixel, which lie scattered in x. Gathered in the
product's loop they go through registers and shared memory before they are split for three products
in TF32. A copy of x in columns, 28 numbers a pixel, is half as large as dy, and to
`conv.hopper.mma_wgrad` it is the x of a 1x1 filter.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...registry.kernel import configures
from ...registry.spec import ConvSpec
from ...runtime.device import Device
from ..configs import WgradOperands, split_kernel
from ..hopper.weight_grads import mma_wgrad
from ..refusals import Only

_FEWEST_PIXELS = 2**14  # which pay for a copy
_TILE = mma_wgrad.TILES[0]


@triton.jit(do_not_specialize=["H", "W", "P", "Q", "num_pixels"])
def _im2col_wgrad_kernel(
    x_ptr,  # [N, H, W, CI]
    out_ptr,  # [N * P * Q, WIDTH]
    H,
    W,
    P,
    Q,
    num_pixels,
    CI: tl.constexpr,
    S: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDE: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    WIDTH: tl.constexpr,  # TAPS * CI, and zeros up to 16 bytes
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_W)
    tap = column // CI
    n = offs_m // (P * Q)
    row = (offs_m // Q % P * STRIDE - PAD_H)[:, None] + (tap // S)[None, :]
    col = (offs_m % Q * STRIDE - PAD_W)[:, None] + (tap % S)[None, :]
    inside = (row >= 0) & (row < H) & (col >= 0) & (col < W) & (tap < TAPS)[None, :]
    inside &= (offs_m < num_pixels)[:, None]
    pixel = (n.to(tl.int64) * H * W)[:, None] + row * W + col
    x = tl.load(x_ptr + pixel * CI + (column % CI)[None, :], mask=inside, other=0.0)
    out_ptrs = out_ptr + offs_m.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out_ptrs, x, mask=(offs_m < num_pixels)[:, None] & (column < WIDTH)[None, :])


@configures("im2col_wgrad")
class Im2colWgrad(NamedTuple):
    """There is one tile, of `mma_wgrad`."""


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do a weight gradient, or a copy does not pay, or None."""
    if reason := Only(hopper=True, dtypes=("fp32",))(spec, gpu):
        return reason
    co, ci = spec.of_filters
    if ci >= 16 or spec.taps * ci > mma_wgrad.BLOCK:
        return f"{spec.r}x{spec.s} of {ci} channels are more than {mma_wgrad.BLOCK} columns"
    if co % 4 or co < 32 or not spec.aligned:
        return f"{co} channels of the result; it takes multiples of 4 from 32 on"
    if not _FEWEST_PIXELS <= math.prod(spec.pixels) < 2**31 // mma_wgrad.BLOCK:
        return f"a copy pays for {_FEWEST_PIXELS} pixels and more"
    return None


def _splits(spec: ConvSpec, gpu: Device, tile: Im2colWgrad) -> int:
    co, ci = spec.of_filters
    rows, columns = spec.size
    of_columns = ConvSpec(
        spec.n, spec.dtype, rows, columns, spec.taps * ci, co, 1, 1, filters=(co, spec.taps * ci)
    )
    return mma_wgrad.splits_of(of_columns, gpu, _TILE)


def _launch(tile: Im2colWgrad, splits: int, operands: WgradOperands) -> None:
    x, dy, weight, stride, padding, *_ = operands
    co, ci, r, s = weight.shape
    columns = to_columns(x, dy, weight, stride, padding)
    # filters of as many numbers, of which the sum has the shape
    as_pointwise = weight.new_empty((1,)).expand(co, r * s * ci, 1, 1)
    given = operands._replace(x=columns, weight=as_pointwise, padding=(0, 0), precision="ieee")
    mma_wgrad.launch_mma(_TILE, splits, given)


def to_columns(
    x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: tuple[int, int]
) -> Tensor:  # [N, P, Q, R * S * CI in multiples of 16 bytes]
    """What the filter sees of x at each pixel of dy."""
    _, h, w, ci = x.shape
    n, p, q, _ = dy.shape
    _, _, r, s = weight.shape
    width = triton.cdiv(r * s * ci, 4) * 4
    columns = x.new_empty((n, p, q, width))
    block_w = triton.next_power_of_2(width)
    block_m = 4096 // block_w
    _im2col_wgrad_kernel[(triton.cdiv(n * p * q, block_m),)](
        x, columns, h, w, p, q, n * p * q, CI=ci, S=s, TAPS=r * s, STRIDE=stride,
        PAD_H=padding[0], PAD_W=padding[1], WIDTH=width, BLOCK_W=block_w, BLOCK_M=block_m,
    )  # fmt: skip
    return columns


# no other that takes so few channels has tensor cores: its cost need not be right
WEIGHT_GRAD = split_kernel(
    Im2colWgrad, refuse, lambda spec, gpu: [Im2colWgrad()], _splits, _launch,
    lambda spec, gpu, tile: 1.0, around=False,
)  # fmt: skip
