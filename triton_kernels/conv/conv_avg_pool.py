"""A convolution and the means of its result over 2x2 pixels in one launch, for inference.

    y = conv(x) + bias[co] + emb[n, co] + residual + 1x1 convolutions of other tensors
    m = avg_pool(y)

with the partials of both: what comes before the images become smaller. The means have the bits
that `avg_pool` of y has (`conv.hopper.epilogue_avg_pool`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..registry.choose import select
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import FORWARD_TERMS, ConvSpec
from ..runtime.device import Device, describe
from .fused_spec import forward_spec
from .hopper import single_tile, tile_mma
from .hopper.operands import Means, Operands

_empty = torch.empty  # tests put a function here that returns NaNs

_PIXELS = 128  # of a tile of 3x3 filters


@configures("single_tile")
class SingleTile(NamedTuple):
    """Tiles of `single_tile.PIXELS`."""


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    if spec.n == 0:
        return "there are no images"
    if reason := tile_mma.refuse(spec, gpu, ragged=False):
        return reason
    return None if _tiles(spec, gpu) else f"no tile of {spec.h}x{spec.w} has whole pairs of rows"


def _tiles(spec: ConvSpec, gpu: Device) -> list[tile_mma.TileMma]:
    """First those of 128 pixels, or nearly, with the filters beside the pixels: as was fastest of
    16 and of 64 images of 32x32."""
    found = [
        tile for tile in tile_mma.configs(spec, gpu) if tile_mma.makes_means(tile, spec.h, spec.w)
    ]
    return sorted(found, key=lambda c: (abs(c.block_m - _PIXELS), not c.filters_with_pixels))


def _refuse_1x1(spec: ConvSpec, gpu: Device) -> str | None:
    if spec.n == 0 or spec.w not in tile_mma.WIDTHS_OF_MEANS:
        return f"{spec.n} images whose rows have {spec.w} pixels"
    return single_tile.refuse(spec, gpu)


CONV_MEANS = Op(
    "conv_means",
    ("h", "w", "k", "c", "dtype", "residual", "extras"),
    (
        Kernel("tile_mma", tile_mma.TileMma, _refuse, _tiles, adds=FORWARD_TERMS),
        Kernel(
            "single_tile",
            SingleTile,
            _refuse_1x1,
            lambda *_: [SingleTile()],
            untimed=lambda spec, gpu: single_tile.untimed(spec, gpu, gpu.busy),
            adds=("residual",),
        ),
    ),
    similar=False,
)


def conv_means(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [CO]
    *,
    emb: Tensor | None = None,  # float32 [N, CO], rows any distance apart; of 3x3 filters
    residual: Tensor | None = None,  # [N, H, W, CO], dtype of x
    extra: Sequence[tuple[Tensor, Tensor]] = (),  # up to two: [N, H, W, C], [CO, C]; likewise
    extra_bias: Tensor | None = None,  # float32 [CO]; likewise
    config: tile_mma.TileMma | SingleTile | None = None,
) -> tuple[Tensor, Tensor, Means]:  # [N, H, W, CO]; float32 [N, K, 2, CO]; means, their partials
    """y, its partials, and its means."""
    n, h, w, ci = x.shape
    co = weight.shape[0]
    y = _empty((n, h, w, co), dtype=x.dtype, device=x.device)
    if config is None:
        terms = {"emb": emb, "residual": residual, "extra": extra, "extra_bias": extra_bias}

        def run(c: tuple) -> Tensor:
            return conv_means(x, weight, bias, **terms, config=c)[0]

        added = {"emb": emb is not None, "residual": residual is not None}
        spec = forward_spec(x, weight, extra=[other for other, _ in extra], **added)
        config = select(CONV_MEANS, spec, describe(x.device), run).config
    linear = isinstance(config, SingleTile)
    tiles = h * w // (single_tile.PIXELS if linear else config.block_m)
    partials = _empty((n, tiles, 2, co), dtype=torch.float32, device=x.device)
    means = empty_means(y, tiles, _empty)
    if linear:
        assert emb is None and not extra and extra_bias is None
        single_tile.launch(x, weight, bias, y, residual, partials, None, means)
        return y, partials, means
    beside = () if residual is None else (residual,)
    given = Operands(x, weight, y, bias, partials, beside, extra, extra_bias, emb, means=means)
    tile_mma.launch(config, given)
    return y, partials, means


def empty_means(y: Tensor, tiles: int, empty=torch.empty) -> Means:
    """Room for those of y, an image of which is so many tiles."""
    n, h, w, c = y.shape
    values = empty((n, h // 2, w // 2, c), dtype=y.dtype, device=y.device)
    return Means(values, empty((n, tiles, 2, c), dtype=torch.float32, device=y.device))
