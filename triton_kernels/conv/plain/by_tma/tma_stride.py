"""Convolutions of stride 2 whose tiles are fetched by TMA: the tiles of `conv.plain.tma` and of
`conv.plain.tma_wgrad` that do them. x is read by parity (`conv.plain.products`)."""

import math
from functools import partial

from ....registry.kernel import CLOCKS, Kernel, configures
from ....registry.spec import ConvSpec
from ....runtime.device import Device
from ...configs import FwdTile, WgradTile, split_kernel
from ...refusals import BITS_16, ROUNDED, Only, odd_channels
from .tma import launch
from .tma_wgrad import launch_wgrad, num_parts


@configures("tma_stride2")
class Config(FwdTile):
    """What one program of the forward or of the input gradient computes."""

    __slots__ = ()


@configures("tma_stride2_wgrad")
class WgradConfig(WgradTile):
    """What one program of the weight gradient computes."""

    __slots__ = ()
    taps = 1


# Of those of `conv.plain.tma` the ones that win most often there.
FWD_CONFIGS = [
    Config(64, 128, 64, 4, 3),
    Config(64, 64, 64, 4, 4),
    Config(64, 64, 32, 4, 4),  # TF32: a row of a box is at most 128 bytes; few input channels
    Config(32, 64, 32, 4, 4),  # few channels: a tile must not reach into the other parity
    Config(128, 128, 64, 4, 3),
    Config(64, 128, 64, 4, 4),
]
WGRAD_CONFIGS = [
    WgradConfig(64, 64, 64, 4, 4),
    WgradConfig(64, 32, 64, 4, 4),
    WgradConfig(64, 64, 128, 4, 4),
    WgradConfig(64, 128, 64, 4, 4),
    WgradConfig(128, 64, 64, 4, 4),
    WgradConfig(128, 128, 64, 4, 3),
]


_ONLY = Only(tma=True, dtypes=ROUNDED, stride=2)
_ONLY_WGRAD = Only(tma=True, dtypes=BITS_16, stride=2)


# --- forward and input gradient -------------------------------------------------------------------


def _refuse(spec: ConvSpec, gpu: Device, grad: bool) -> str | None:
    rows, columns, channels = (*spec.size, spec.c) if grad else (spec.h, spec.w, spec.k)
    if reason := _ONLY(spec, gpu) or _refuse_parities(spec, rows, columns):
        return reason
    return odd_channels(32, [channels])


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
        and gpu.holds(c.num_stages * (c.block_c + c.block_m) * c.block_k * spec.itemsize)
    ]


def _cost(spec: ConvSpec, gpu: Device, c: Config, grad: bool) -> float:
    """The first that fits."""
    first = c == _fitting(spec, gpu, grad)[0]
    return 3 + spec.flops / (2048 * gpu.num_sms) / CLOCKS if first else math.inf


FORWARD, INPUT_GRAD = (
    Kernel(
        "tma_stride2",
        Config,
        partial(_refuse, grad=grad),
        partial(_fitting, grad=grad),
        partial(_cost, grad=grad),
        launch,
    )
    for grad in (False, True)
)


# --- weight gradient ------------------------------------------------------------------------------


def _refuse_wgrad(spec: ConvSpec, gpu: Device) -> str | None:
    return _ONLY_WGRAD(spec, gpu) or _refuse_parities(spec, spec.h, spec.w)


def _cost_wgrad(spec: ConvSpec, gpu: Device, c: WgradConfig) -> float:
    """The first tile, or the one for few channels."""
    ci = spec.of_filters[1]
    taken = c == WGRAD_CONFIGS[0 if ci % 64 == 0 else 1]
    return spec.flops / (2048 * gpu.num_sms) / CLOCKS if taken else math.inf


WEIGHT_GRAD = split_kernel(
    WgradConfig,
    _refuse_wgrad,
    lambda spec, gpu: WGRAD_CONFIGS,
    num_parts,
    launch_wgrad,
    _cost_wgrad,
)
