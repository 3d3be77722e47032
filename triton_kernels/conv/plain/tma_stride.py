"""Convolutions of stride 2 whose tiles are fetched by TMA: the tiles of `conv.plain.tma` that do
them, and the weight gradient, which reads x by parity (`conv.plain.products`)."""

import math
from functools import partial

import triton
import triton.language as tl

from ...registry.kernel import CLOCKS, Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.device import Device
from ..configs import FwdTile, WgradOperands, WgradTile, split_kernel
from .products import box_origin
from .tma import launch
from .tma_boxes import by_parity, in_boxes, unaddressable
from .tma_wgrad import num_parts, tile_arguments


@configures("tma_stride2")
class Config(FwdTile):
    """What one program of the forward or of the input gradient computes."""

    __slots__ = ()


@configures("tma_stride2_wgrad")
class WgradConfig(WgradTile):
    """What one program of the weight gradient computes, of one tap."""

    __slots__ = ()


# Of those of `conv.plain.tma` the ones that win most often there.
FWD_CONFIGS = [
    Config(64, 128, 64, 4, 3),
    Config(64, 64, 64, 4, 4),
    Config(64, 64, 32, 4, 4),  # TF32: a row of a box is at most 128 bytes; few input channels
    Config(32, 64, 32, 4, 4),  # few channels: a tile must not reach into the other parity
    Config(64, 256, 64, 4, 4),
    Config(128, 128, 64, 4, 3),
    Config(64, 128, 64, 4, 4),
    Config(64, 128, 32, 4, 4),
]
WGRAD_CONFIGS = [
    WgradConfig(64, 64, 64, 4, 4),
    WgradConfig(64, 32, 64, 4, 4),
    WgradConfig(64, 64, 128, 4, 4),
    WgradConfig(64, 128, 64, 4, 4),
    WgradConfig(128, 64, 64, 4, 4),
    WgradConfig(128, 128, 64, 4, 3),
]


# --- forward and input gradient -------------------------------------------------------------------


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do a forward pass, or None."""
    return _refuse(spec, gpu, spec.h, spec.w, spec.k)


def refuse_grad(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do an input gradient, or None."""
    return _refuse(spec, gpu, *spec.size, spec.c)


def _refuse(spec: ConvSpec, gpu: Device, h: int, w: int, channels: int) -> str | None:
    if spec.stride != 2:
        return f"it does stride 2, not {spec.stride}"
    if spec.dtype == "fp32":
        return "float32 that is not rounded to TF32"
    if reason := _refuse_parities(spec, h, w):
        return reason
    if channels % 32:
        return f"{channels} channels of the image are no multiple of 32"
    return unaddressable(spec, gpu)


def _refuse_parities(spec: ConvSpec, h: int, w: int) -> str | None:
    a_row = h == spec.r == 1 and spec.pads[0] == 0
    even = w % 2 == 0 and (h % 2 == 0 or a_row)
    return None if even else f"{h} x {w} pixels are not even"


def _fitting(spec: ConvSpec, gpu: Device, grad: bool) -> list[Config]:
    """Those whose blocks of channels stay within a parity, and whose pipeline in shared memory."""
    return [
        c
        for c in FWD_CONFIGS
        if (spec.c % c.block_c == 0 if grad else spec.k % c.block_k == 0)
        and c.block_k * spec.itemsize <= 128
        and c.num_stages * (c.block_c + c.block_m) * c.block_k * spec.itemsize + 1024
        <= gpu.shared_memory
    ]


def _cost(spec: ConvSpec, gpu: Device, c: Config, grad: bool) -> float:
    """The first that fits."""
    first = c == _fitting(spec, gpu, grad)[0]
    return 3 + spec.flops / (2048 * gpu.num_sms) / CLOCKS if first else math.inf


FORWARD = Kernel(
    "tma_stride2", Config, refuse, partial(_fitting, grad=False), partial(_cost, grad=False), launch
)
INPUT_GRAD = Kernel(
    "tma_stride2", Config, refuse_grad, partial(_fitting, grad=True), partial(_cost, grad=True),
    launch,
)  # fmt: skip


# --- weight gradient ------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["P", "Q", "num_tiles", "tiles_per_split"])
def _stride2_wgrad_kernel(
    x_desc,  # [N, H / 2, 2, W / 2, 2 CI] in boxes [TILE_N, TILE_H, 1, TILE_W, BLOCK_CI]
    dy_desc,  # [N, P, Q, CO] in boxes [1, 1, TILE_W, BLOCK_CO]; FLAT: [N * P * Q, CO]
    dw_ptr,  # [splits, CO, R * S, CI]
    CI,
    P,
    Q,
    CO,
    num_tiles,  # of pixels
    tiles_per_split,
    TAPS: tl.constexpr,  # R * S
    S: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    FLAT: tl.constexpr,  # a tile is BLOCK_M successive pixels of the batch: whole rows or images
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_CO: tl.constexpr,
    BLOCK_CI: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILE_N * TILE_H * TILE_W
    ci_blocks = tl.cdiv(CI, BLOCK_CI)
    co0 = tl.program_id(0) // ci_blocks * BLOCK_CO
    ci0 = tl.program_id(0) % ci_blocks * BLOCK_CI
    tap = tl.program_id(1)
    split = tl.program_id(2)
    row = tap // S - PAD_H
    col = tap % S - PAD_W
    tiles_h = tl.cdiv(P, TILE_H)
    tiles_w = tl.cdiv(Q, TILE_W)
    acc = tl.zeros([BLOCK_CO, BLOCK_CI], dtype=tl.float32)
    start = split * tiles_per_split
    for tile in range(start, tl.minimum(start + tiles_per_split, num_tiles)):
        n0, h0, w0 = box_origin(tile, tiles_h, tiles_w, TILE_N, TILE_H, TILE_W)
        if FLAT:
            dy = dy_desc.load([tile * BLOCK_M, co0])
        else:
            dy = dy_desc.load([n0, h0, w0, co0]).reshape(BLOCK_M, BLOCK_CO)
        x = x_desc.load([n0, h0 + (row >> 1), row & 1, w0 + (col >> 1), (col & 1) * CI + ci0])
        acc = tl.dot(tl.trans(dy), x.reshape(BLOCK_M, BLOCK_CI), acc)
    offs_co = co0 + tl.arange(0, BLOCK_CO)
    offs_ci = ci0 + tl.arange(0, BLOCK_CI)
    mask = (offs_co < CO)[:, None] & (offs_ci < CI)[None, :]
    rows = (split.to(tl.int64) * CO + offs_co) * (TAPS * CI) + tap * CI
    tl.store(dw_ptr + rows[:, None] + offs_ci[None, :], acc.to(dw_ptr.dtype.element_ty), mask=mask)


def launch_wgrad(config: WgradConfig, splits: int, operands: WgradOperands) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up."""
    x, dy, weight, partial, _, padding, *_ = operands
    co, ci, r, s = weight.shape
    _, p, q, _ = dy.shape
    dy_tiles, box, num_tiles, constants = tile_arguments(dy, s, padding, config)
    blocks = triton.cdiv(co, config.block_co) * triton.cdiv(ci, config.block_ci)
    _stride2_wgrad_kernel[(blocks, r * s, splits)](
        in_boxes(by_parity(x), [*box[:2], 1, box[2], config.block_ci]), dy_tiles, partial, ci, p, q,
        co, num_tiles, triton.cdiv(num_tiles, splits),
        TAPS=r * s, **constants,
    )  # fmt: skip


def refuse_wgrad(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do a weight gradient."""
    if spec.stride != 2:
        return f"it does stride 2, not {spec.stride}"
    if spec.itemsize != 2:
        return "numbers have 32 bits; it multiplies 16"
    return _refuse_parities(spec, spec.h, spec.w) or unaddressable(spec, gpu)


def cost_wgrad(spec: ConvSpec, gpu: Device, c: WgradConfig) -> float:
    """The first tile, or the one for few channels."""
    ci = spec.of_filters[1]
    taken = c == WGRAD_CONFIGS[0 if ci % 64 == 0 else 1]
    return spec.flops / (2048 * gpu.num_sms) / CLOCKS if taken else math.inf


WEIGHT_GRAD = split_kernel(
    WgradConfig, refuse_wgrad, lambda spec, gpu: WGRAD_CONFIGS, num_parts, launch_wgrad, cost_wgrad
)
