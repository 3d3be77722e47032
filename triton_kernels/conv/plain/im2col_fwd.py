"""Forward of `conv2d` for few output channels, as a head's three: all taps in one product.

    z[(co, r, s), m] = sum_ci x[m, ci] weight[co, r, s, ci]           m = (n, h, w), pixels of x
    y[n, p, q, co]   = bias[co] + sum_{r, s} z[(co, r, s), (n, p + r - pad, q + s - pad)]

Three channels are most of a tile's rows wasted, nine times, on nine fetches of x. But nine taps of
three channels are 27 rows, for which x is read once. In channels_last memory the filters are the
matrix [27, CI] as they are. z is small, 27 numbers for 64, and a second launch adds up the nine
that meet in a pixel; z has a plane of pixels for each row, so that these lie side by side.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import await_inputs, following, overlapping
from ...runtime.device import Device
from ...tf32 import round_to_tf32
from ..configs import ConvOperands
from ..refusals import Only, unfetchable
from .by_tma.tma_boxes import as_one_row, in_boxes
from .products import add_split_product, whole_sum

_MOST_COLUMNS = 64
_FEWEST_CHANNELS = 16  # of x; with fewer z would be larger than x


@triton.jit
def _im2col_fwd_kernel(
    x_desc,  # [M, CI] in boxes [BLOCK_M, BLOCK_K]
    w_desc,  # [CO * R * S, CI] in boxes [BLOCK_C, BLOCK_K]
    z_desc,  # float32 [CO * R * S, M in multiples of 16 bytes] in boxes [BLOCK_C, BLOCK_M]
    CI,
    PRODUCTS: tl.constexpr,  # float32: three of TF32, or one; 16 bits: 0
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    await_inputs()
    m0 = tl.program_id(0) * BLOCK_M
    acc = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    small = acc
    for k0 in range(0, CI, BLOCK_K):
        x = x_desc.load([m0, k0])
        w = w_desc.load([0, k0])
        if PRODUCTS == 3:
            acc, small = add_split_product(acc, small, w, x)
        else:
            if PRODUCTS == 1:
                x = round_to_tf32(x)
                w = round_to_tf32(w)
            acc = tl.dot(w, tl.trans(x), acc, input_precision="tf32")
    if PRODUCTS == 3:
        acc = whole_sum(acc, small)
    z_desc.store([0, m0], acc)


@triton.jit(do_not_specialize=["H", "W", "P", "Q", "num_pixels"])
def _sum_planes_kernel(
    z_ptr,  # float32 [CO, R, S, plane]
    bias_ptr,  # [CO] or None
    y_ptr,  # [N, P, Q, CO]
    H,
    W,
    P,
    Q,
    num_pixels,  # N * P * Q
    plane,
    CO: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    await_inputs()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = m // (P * Q)
    h = m // Q % P - PAD_H
    w = m % Q - PAD_W
    pixel = (n * H + h) * W + w
    y_ptrs = y_ptr + m.to(tl.int64) * CO
    for co in tl.static_range(CO):
        acc = tl.zeros([BLOCK_M], dtype=tl.float32)
        for r in tl.static_range(R):
            for s in tl.static_range(S):
                inside = (h + r >= 0) & (h + r < H) & (w + s >= 0) & (w + s < W)
                z_plane = z_ptr + ((co * R + r) * S + s) * plane
                mask = inside & (m < num_pixels)
                acc += tl.load(z_plane + (pixel + r * W + s), mask=mask, other=0.0)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + co).to(tl.float32)
        tl.store(y_ptrs + co, acc.to(y_ptr.dtype.element_ty), mask=m < num_pixels)


@configures("im2col_fwd")
class Im2colFwd(NamedTuple):
    """What one program of the product computes."""

    block_m: int  # pixels
    block_k: int  # channels of x a step
    num_warps: int
    num_stages: int


# By the products of TF32; 0: of 16 bits.
_TILES = {3: Im2colFwd(64, 32, 2, 3), 1: Im2colFwd(64, 32, 4, 3), 0: Im2colFwd(128, 64, 4, 1)}


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do a convolution, or does not pay, or None."""
    if reason := unfetchable(gpu, spec.itemsize) or Only(stride=1)(spec, gpu):
        return reason
    co, ci = spec.of_filters
    if spec.taps == 1 or co * spec.taps > _MOST_COLUMNS:
        return f"{spec.taps} taps of {co} channels; it takes 2 to {_MOST_COLUMNS} in all"
    if ci < _FEWEST_CHANNELS or ci * spec.itemsize % 16 or not spec.aligned:
        return f"{ci} channels; it takes {_FEWEST_CHANNELS} and more, in multiples of 16 bytes"
    pixels = max(math.prod(spec.size), spec.h * spec.w) * spec.n
    return None if pixels * _MOST_COLUMNS < 2**31 else "offsets would need more than 32 bits"


def configs(spec: ConvSpec, gpu: Device) -> list[Im2colFwd]:
    """One, by the products."""
    return [_TILES[0 if spec.itemsize == 2 else 3 if spec.precision == "ieee" else 1]]


def launch(tile: Im2colFwd, operands: ConvOperands) -> None:
    """y = conv(x, weight) + bias with stride 1."""
    x, weight, bias, y, _, padding, precision, *_ = operands
    _, h, w, ci = x.shape
    n, p, q, _ = y.shape
    co, _, r, s = weight.shape
    pixels = n * h * w
    products = 0 if x.itemsize == 2 else 3 if precision == "ieee" else 1
    block_m, block_k, num_warps, num_stages = tile
    columns = co * r * s
    block_c = max(16, triton.next_power_of_2(columns))
    plane = triton.cdiv(pixels, 4) * 4
    z = x.new_empty((columns, plane), dtype=torch.float32)
    filters = weight.permute(0, 2, 3, 1).view(columns, ci)
    _im2col_fwd_kernel[(triton.cdiv(pixels, block_m),)](
        in_boxes(as_one_row(x)[0, 0], [block_m, block_k]), in_boxes(filters, [block_c, block_k]),
        in_boxes(z, [block_c, block_m]), ci,
        PRODUCTS=products, BLOCK_C=block_c, BLOCK_M=block_m, BLOCK_K=block_k,
        num_warps=max(num_warps, block_c // 16), num_stages=num_stages, **overlapping(x.device),
    )  # fmt: skip
    block = 256
    _sum_planes_kernel[(triton.cdiv(n * p * q, block),)](
        z, bias, y, h, w, p, q, n * p * q, plane, CO=co, R=r, S=s, PAD_H=padding[0],
        PAD_W=padding[1], BLOCK_M=block, **following(x.device),
    )  # fmt: skip


# what else takes so few channels reads x once a tap: its cost need not be right
FORWARD = Kernel("im2col_fwd", Im2colFwd, refuse, configs, lambda spec, gpu, c: 0.5, launch)
