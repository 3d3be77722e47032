"""A convolution and the norm behind it in one launch, where tiles of an image exchange sums.

    y = conv(x) + bias[co] + emb[n, co] + residual + 1x1 convolutions of other tensors
    a = act(norm(y))

`conv_norm` does it where a tile has whole images and whole groups of channels. Here an image is
several tiles, or groups lie across blocks of 64 channels: every tile leaves its sums and waits for
those of the others (`conv.hopper.epilogue_grid_sync`, where it is shown that they come).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..registry.choose import expected
from ..registry.cost import fitted_to, of_passes
from ..registry.kernel import Kernel, Op
from ..registry.spec import FORWARD_TERMS, ConvSpec
from ..runtime.device import Device
from .conv_norm import NextNorm, conv_norm, new_zeros
from .fused import FORWARD
from .hopper import tile_mma

_MOST_WORDS = 16  # that a thread waits for at a time
_LEAST_LANES = 4  # of threads, which have a channel's accumulators among them


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    if spec.n == 0 or spec.c % spec.groups or spec.c // spec.groups > tile_mma.CHANNELS:
        return f"{spec.n} images of {spec.c} channels in {spec.groups} groups"
    if reason := tile_mma.refuse(spec, gpu, ragged=False):
        return reason
    return None if _configs(spec, gpu) else "tiles of an image are too many to be under way at once"


def _configs(spec: ConvSpec, gpu: Device) -> list[tile_mma.TileMma]:
    """Tiles of one image, all of which can be under way at once."""
    blocks, group = spec.c // tile_mma.CHANNELS, spec.c // spec.groups
    lanes = max(_LEAST_LANES, 1 << (group - 1).bit_length())
    found = []
    for tile in tile_mma.configs(spec, gpu):
        images, rows, width = tile_mma.box_of(tile, spec.h, spec.w)
        words = lanes * (spec.h // rows) * tile_mma.CHANNELS // 128
        together = spec.h // rows * blocks <= gpu.num_sms
        if images == 1 and width == spec.w and words <= _MOST_WORDS and together:
            found.append(tile)
    return found


class _GridSync(NamedTuple):
    """What makes the choices those that were measured to be fastest at 8 to 64 images on an H200:
    of 105 layers all, with 1.5 to 2 microseconds."""

    wave: float  # microseconds of a tile's epilogue, which nothing hides: sums are exchanged in it


def _model(spec: ConvSpec, gpu: Device, config: tile_mma.TileMma) -> float | None:
    """Microseconds: those of the convolution, and of an exchange in each wave of tiles."""
    us = tile_mma.KERNEL.model(spec, gpu, config)
    waves = -(-tile_mma.work(spec, gpu, config).tiles // gpu.num_sms)
    return None if us is None else us + waves * fitted_to("conv_norm_grid_sync", _GridSync).wave


def _apart(spec: ConvSpec, gpu: Device) -> str | None:
    """Tiles of one image may be so much slower than others that the norm's launch costs less."""
    us = expected(CONV_NORM_GRID_SYNC, spec, gpu)
    conv = expected(FORWARD, replace(spec, groups=None, tiles=(), stats=True), gpu)
    if us is None or conv is None:
        return None
    norm = of_passes(2 * spec.n * spec.h * spec.w * spec.c * spec.itemsize, launches=1)
    found = f"{us:.1f} us in tiles of one image, {conv + norm:.1f} with a launch for the norm"
    return found if us > conv + norm else None


CONV_NORM_GRID_SYNC = Op(
    "conv_norm_grid_sync",
    ("h", "w", "k", "c", "dtype", "residual", "extras", "keep"),
    (Kernel("tile_mma", tile_mma.TileMma, _refuse, _configs, adds=FORWARD_TERMS, alike=_model),),
    similar=False,
    apart=_apart,
)


def conv_norm_grid_sync(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, 3, 3] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [CO]
    norm: NextNorm,
    *,
    zeros: Callable[[int, torch.device], Tensor] | None = None,  # so many int64; None: new ones
    **terms: Any,  # of `conv_norm`, but for x2
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """As `conv_norm`."""
    given = {"op": CONV_NORM_GRID_SYNC, "zeros": zeros or new_zeros}
    return conv_norm(x, weight, bias, norm, **terms, **given)
