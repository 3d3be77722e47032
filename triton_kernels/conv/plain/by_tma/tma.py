"""The fast path of `conv2d`: implicit GEMM whose tiles are fetched by TMA (Hopper and later). The
kernel is that of `conv.plain.fused_kernels`, with a bias at most.

It does stride 1 and 2, in every precision. Its rows in the registry are here for stride 1, in
`conv.plain.tma_stride` for stride 2, and in `conv.plain.tf32x3` for float32 that is not rounded to
TF32. Channels are multiples of 16 bytes; `conv.plain.gather` serves the rest. The weight gradient
is in `conv.plain.tma_wgrad`.
"""

import math
from typing import NamedTuple

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....registry.cost import HOPPER, step_of
from ....registry.kernel import CLOCKS, Kernel, configures
from ....registry.spec import ConvSpec
from ....runtime.dependent_launch import following, overlapping
from ....runtime.device import Device
from ...configs import ConvOperands, FwdTile
from ...refusals import ROUNDED, Only
from ..fused_kernels import conv_forward_kernel
from ..shared_sums import shared
from ..transpose_weights import split, transpose_weights
from .tma_boxes import (
    as_one_row,
    by_parity,
    count_boxes,
    is_pointwise,
    pixel_box,
    pixels_in_boxes,
    tile_sizes,
    weight_in_boxes,
)


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
    Config(128, 64, 64, 4, 3),
    Config(128, 128, 64, 4, 2),
    Config(64, 32, 32, 4, 4),
    Config(64, 64, 32, 4, 8),
    Config(64, 128, 32, 4, 2),
    Config(64, 128, 32, 4, 3),
    Config(128, 128, 32, 4, 3),
    Config(16, 32, 32, 4, 8),
]
_TRANSPOSE_FROM = 1024  # pixels of a float32 input gradient, which pay for a copy of the filters


def launch(
    config: FwdTile | Config,  # or that of `split_tiles`
    operands: ConvOperands,
    split_first: bool = False,  # float32 that is not rounded to TF32: by a pass of its own
) -> None:
    """y = conv(x, weight) + bias of stride 1 or 2; with `dgrad` x is the gradient of the output, y
    of the input, with stride 2 plus `add`."""
    x, weight, bias, y, stride, padding, precision, dgrad, add, follows = operands
    _, _, r, s = weight.shape
    exact = precision == "ieee"
    parts, filters = (split(x) if split_first else (x, None)), (weight, None)
    turned = dgrad and (split_first if exact else worth_transposing(y))
    if turned:
        filters = transpose_weights(weight, 2 if exact else 1)
        filters = filters if exact else (*filters, None)
    elif split_first:
        filters = split(weight)
    if turned and stride == 1:  # a forward pass of such filters
        padding, dgrad = (r - 1 - padding[0], s - 1 - padding[1]), False
    if stride == 1 and is_pointwise(weight, padding):
        parts = [None if part is None else as_one_row(part) for part in parts]
        y = as_one_row(y)
    block_co, block_ci = config.block_c, config.block_k
    if dgrad and not turned:
        block_co, block_ci = block_ci, block_co
    k, c = x.shape[3], y.shape[3]
    kinds = 1
    if stride == 2 and dgrad:
        assert c % config.block_c == 0, "a block of channels reaches into the other parity"
        y, add = by_parity(y), None if add is None else by_parity(add)
        kinds = 2 * y.shape[2]
    elif stride == 2:
        assert k % config.block_k == 0, "a block of channels reaches into the other parity"
        parts = [by_parity(x), None]
    assert add is None or kinds > 1
    n, p, q = y.shape[0], y.shape[1], y.shape[-2]
    box = pixel_box(config.block_m, n, p, q)

    def tiles(t: Tensor | None, channels: int) -> TensorDescriptor | None:
        return None if t is None else pixels_in_boxes(t, box, channels)

    x_desc, x_small_desc = (tiles(part, config.block_k) for part in parts)
    w_desc, w_small_desc = (
        None if part is None else weight_in_boxes(part, block_co, block_ci) for part in filters
    )
    programs = count_boxes(box, n, p, q) * triton.cdiv(c, config.block_c)
    sums = shared(config, programs, r * s, (k,), x)
    option = {}  # with stride 2 nothing begins before the previous kernel has ended
    if stride == 1 and (follows or (turned and not exact)):
        option = following(x.device)
    elif stride == 1:  # `following` the copies of `split_first` took 20 to 27 % longer: programs
        option = overlapping(x.device)  # crowd where those end first
    conv_forward_kernel[(programs, kinds) if kinds > 1 else sums.grid](
        x_desc, w_desc, bias, None, tiles(add, config.block_c), tiles(y, config.block_c),
        None, sums.parts, sums.counters, *[None] * 4, x_small_desc, w_small_desc, None, 0, 0, 0,
        sums.steps, None, n, k, p, q, c,
        R=r, S=s, PAD_H=padding[0], PAD_W=padding[1], STRIDE=stride, DGRAD=dgrad,
        TURNED=dgrad and turned, PRECISION=precision, ROWS=1, RAGGED=False, TF32=False,
        **tile_sizes(box, config), **option,
    )  # fmt: skip


def worth_transposing(dx: Tensor) -> bool:
    """Whether `transpose_weights` should precede this input gradient."""
    return dx.itemsize == 4 and dx.numel() >= _TRANSPOSE_FROM * dx.shape[3]


def _refuse_grad(spec: ConvSpec, gpu: Device) -> str | None:
    if reason := _ONLY(spec, gpu):
        return reason
    return "filters are transposed first" if transposes_first(spec) else None


def transposes_first(spec: ConvSpec) -> bool:
    """Whether the filters of an input gradient of stride 1 are transposed first."""
    return spec.dtype == "tf32" and math.prod(spec.pixels) >= _TRANSPOSE_FROM


def configs(spec: ConvSpec, gpu: Device) -> list[Config]:
    """The tiles that fit."""
    return [c for c in FWD_CONFIGS if _fits(c, spec, gpu)]


def cost(spec: ConvSpec, gpu: Device, c: Config) -> float:
    """Microseconds by a crude model: rounds of programs on the multiprocessors, times the work of
    one, which is multiplying plus fetching, or at least a chain of steps."""
    if c not in _MODELLED:
        return math.inf
    work = c.block_c * c.block_m + 32 * (c.block_c + c.block_m)
    clocks = triton.cdiv(_programs(c, spec), gpu.num_sms) * work * spec.k * spec.taps / 1024
    chain = step_of("tma", HOPPER) * spec.taps * triton.cdiv(spec.k, c.block_k)
    return 3 + max(clocks / CLOCKS, chain)


def best_cost(spec: ConvSpec, gpu: Device) -> float:
    """Of the best tile."""
    return min(cost(spec, gpu, c) for c in configs(spec, gpu))


def _programs(c: Config, spec: ConvSpec) -> int:
    boxes = count_boxes(pixel_box(c.block_m, *spec.pixels), *spec.pixels)
    return boxes * triton.cdiv(spec.c, c.block_c)


def _fits(c: Config, spec: ConvSpec, gpu: Device) -> bool:
    block_k = 64 if spec.itemsize == 2 and spec.k > 32 else 32
    fetched = c.num_stages * (c.block_c + c.block_m) * c.block_k * spec.itemsize
    return c.block_k == block_k and gpu.holds(fetched) > 0


_ONLY = Only(tma=True, dtypes=ROUNDED, stride=1)
FORWARD = Kernel("tma", Config, _ONLY, configs, cost, launch)
INPUT_GRAD = Kernel("tma", Config, _refuse_grad, configs, cost, launch)
