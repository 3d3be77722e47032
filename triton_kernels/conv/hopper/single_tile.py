"""1x1 convolutions of inference for Hopper, written in Gluon: a program has one tile and asks for
all of it at once.

    y = factor (conv(x) + bias + residual),   and its partial sums

Filters are asked for before the program waits for the previous kernel, which does not write them;
behind the wait come all of its pixels and the residual, in one trip to memory. The public op's is
`unfused_single_tile`.
"""

from dataclasses import replace

from torch import Tensor

from ...hopper.descriptors import SUPPORTED, in_boxes, missing
from ...registry.cost import Work, resident
from ...registry.kernel import Kernel
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import overlapping
from ...runtime.device import Device
from ...runtime.hardware import WARP
from .operands import Operands

if SUPPORTED:
    from .single_tile_kernels import conv_single_tile_kernel

_MAX_CHANNELS = 512  # of x: 128 KiB of shared memory for a tile of 64 pixels
PIXELS = 64  # of a tile


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why it cannot do it: it has whole tiles of one image each."""
    if reason := missing(gpu, spec.itemsize):
        return reason
    if spec.taps > 1 or spec.k > _MAX_CHANNELS:
        return f"it does 1x1 convolutions of at most {_MAX_CHANNELS} channels"
    co, _ = spec.of_filters
    if spec.k % 64 or co % 64 or spec.h * spec.w % PIXELS or spec.c != co:
        return f"channels are no multiples of 64, or pixels of {PIXELS}"
    return None


def _work(spec: ConvSpec, gpu: Device, _: tuple) -> Work:
    """What its programs do; a residual comes in the same trip to memory as the pixels."""
    shared = (64 + PIXELS) * spec.k * spec.itemsize + PIXELS * 128  # also the result
    return Work(
        tiles=spec.n * spec.h * spec.w // PIXELS * (spec.c // 64),
        resident=resident(PIXELS * 64 // (4 * WARP), shared, 4, gpu),
        products=64 * PIXELS * spec.k,
        fetched=(64 + PIXELS) * spec.k * spec.itemsize,
        steps=1,
        written=64 * PIXELS,
        memory=replace(spec, residual=False).bytes,
    )


def _launch(_: tuple, operands: Operands) -> None:
    """The convolution, with a residual if there is one, and its partials."""
    x, weight = operands.x, operands.weight
    n, h, w, ci = x.shape
    co, m = weight.shape[0], n * h * w

    def in_tiles(t: Tensor) -> object:
        return in_boxes(t, [m, t.shape[3]], [PIXELS, 64])

    conv_single_tile_kernel[(m // PIXELS * (co // 64),)](
        in_tiles(x), in_boxes(weight, [co, ci], [64, 64]),
        in_tiles(operands.beside[0]) if operands.beside else None, in_tiles(operands.y),
        operands.vectors, operands.partials, operands.factor, co,
        PIXELS=PIXELS, K_BLOCKS=ci // 64, num_warps=4, **overlapping(x.device, m),
    )  # fmt: skip


KERNEL = Kernel(
    "single_tile",
    refuse=refuse,
    launch=_launch,
    work=_work,
    adds=("residual", "factor", "stats"),
)
