"""Forward and input gradient of `conv2d` in float32 on tensor cores, by three products in TF32.

x and the filters are split into two TF32 numbers each (`triton_kernels.tf32`), once, and the kernel
of `conv.plain.tma` reads both parts of both (`conv.plain.products`). 1x1 filters see a number once,
so that there it is split in registers, without a copy.
"""

import math
from typing import NamedTuple

import triton
from torch import Tensor

from ...registry.cost import of_products
from ...registry.kernel import Kernel, configures
from ...registry.spec import ConvSpec
from ...runtime.device import Device
from ..configs import ConvOperands
from ..refusals import refuse_wide_float32
from .by_tma import tma
from .by_tma.tma_boxes import count_boxes, pixel_box


@configures("tf32x3")
class Config(NamedTuple):
    """What one program of the forward or of the input gradient computes."""

    block_c: int  # output channels
    block_m: int  # pixels
    block_k: int  # input channels a step
    num_warps: int
    num_stages: int
    in_registers: bool = False  # numbers are split there, without copies


_INSIDE = Config(64, 64, 32, 4, 4, True)
FWD_CONFIGS = [
    Config(64, 128, 32, 4, 2),
    Config(64, 64, 32, 4, 3),
    Config(64, 64, 32, 4, 2),  # from here on only where they were measured to be faster
    Config(64, 128, 32, 4, 4),
    _INSIDE,
]
MANY_PIXELS = 1024  # of a 1x1 convolution, whose copies would take longer than its products
_MOST_MEMORY = 2**32  # bytes of the copies


def is_split_before(x: Tensor, weight: Tensor) -> bool:
    """Whether both are split by a pass of their own: of several taps a copy costs less than to
    split a number once for each of them, if there is memory for it."""
    taps = weight.shape[2] * weight.shape[3]
    return taps > 1 and 2 * x.nbytes <= _MOST_MEMORY


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do a convolution, or an input gradient, or None."""
    if spec.dtype != "fp32":
        return "it does float32 that is not rounded to TF32"
    if 2 * spec.n * spec.h * spec.w * spec.k * 4 > _MOST_MEMORY:
        return "copies would take too much memory"
    return refuse_wide_float32(spec, gpu)


def configs(spec: ConvSpec, gpu: Device) -> list[Config]:
    """Those that fit into shared memory. Of several taps a copy costs less than to split a number
    once for each of them."""
    return [
        c
        for c in FWD_CONFIGS
        if not (c.in_registers and spec.taps > 1)
        and gpu.holds(2 * c.num_stages * (c.block_c + c.block_m) * c.block_k * 4)
    ]


def _cost(spec: ConvSpec, gpu: Device, c: Config) -> float:
    """A rule of thumb. It pays from 2^27 multiplications on an H100 on, and for 1x1 filters over
    many pixels always."""
    n, p, q = spec.n, *spec.size
    safe, small = FWD_CONFIGS[:2]
    if spec.taps == 1 and n * p * q >= MANY_PIXELS:
        best, rule = _INSIDE, "tf32x3 points"
    else:
        programs = count_boxes(pixel_box(safe.block_m, n, p, q), n, p, q) * triton.cdiv(spec.c, 64)
        best, rule = (safe if programs >= 2 * gpu.num_sms else small), "tf32x3"
    flops = 2 * math.prod(spec.pixels) * math.prod(spec.of_filters) * spec.taps
    return of_products(rule, flops, gpu) if c == best else math.inf


def _launch(config: Config, operands: ConvOperands) -> None:
    tma.launch(config, operands, split_first=not config.in_registers)


FORWARD = INPUT_GRAD = Kernel("tf32x3", Config, refuse, configs, _cost, _launch)
