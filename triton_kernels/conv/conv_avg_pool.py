"""A convolution and the means of its result over 2x2 pixels in one launch, for inference.

    y = conv(x) + bias[co] + emb[n, co] + residual + 1x1 convolutions of other tensors
    m = avg_pool(y)

with the partials of both: what comes before the images become smaller. The means have the bits
that `avg_pool` of y has (`conv.hopper.epilogue_avg_pool`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..registry.choose import choose
from ..registry.spec import dtype_name
from ..runtime.device import describe
from .fused_spec import tiles_of
from .hopper import single_tile as once
from .hopper import tile_mma as gluon_tiles
from .hopper.operands import Means, Operands

_empty = torch.empty  # tests put a function here that returns NaNs

_MOST_TILES = 1024  # of 1x1 filters
_PIXELS = 128  # of a tile of others


def serves_conv_means(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S]
    extra: Sequence[tuple[Tensor, Tensor]] = (),
) -> bool:
    """Whether `conv_means` can do it."""
    if x.shape[0] == 0:
        return False
    if tuple(weight.shape[2:]) == (1, 1):
        even = x.shape[2] in gluon_tiles.WIDTHS_OF_MEANS
        return even and not extra and once.serves_once(x, weight, _MOST_TILES)
    return bool(_configs(x, weight, extra))


def conv_means(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [CO]
    *,
    emb: Tensor | None = None,  # float32 [N, CO], rows any distance apart; of 3x3 filters
    residual: Tensor | None = None,  # [N, H, W, CO], dtype of x
    extra: Sequence[tuple[Tensor, Tensor]] = (),  # up to two: [N, H, W, C], [CO, C]; likewise
    extra_bias: Tensor | None = None,  # float32 [CO]; likewise
    config: gluon_tiles.TileMma | None = None,
) -> tuple[Tensor, Tensor, Means]:  # [N, H, W, CO]; float32 [N, K, 2, CO]; means, their partials
    """y, its partials, and its means. `serves_conv_means` has to say that it can be done."""
    n, h, w, ci = x.shape
    co = weight.shape[0]
    y = _empty((n, h, w, co), dtype=x.dtype, device=x.device)
    linear = tuple(weight.shape[2:]) == (1, 1)
    if config is None and not linear:
        terms = {"emb": emb, "residual": residual, "extra": extra, "extra_bias": extra_bias}
        configs = _configs(x, weight, extra)
        config = choose(
            "conv_means",
            n,
            {
                "h": h,
                "w": w,
                "k": ci,
                "c": co,
                "dtype": dtype_name(x.dtype),
                "residual": residual is not None,
                "extras": len(extra),
            },
            lambda: configs,
            lambda: _default(configs),
            lambda c: conv_means(x, weight, bias, **terms, config=c)[0],
            describe(x.device),
        )
    tiles = h * w // (once.PIXELS if linear else config.block_m)
    partials = _empty((n, tiles, 2, co), dtype=torch.float32, device=x.device)
    means = empty_means(y, tiles, _empty)
    if linear:
        assert emb is None and not extra and extra_bias is None
        once.launch(x, weight, bias, y, residual, partials, None, means)
        return y, partials, means
    beside = () if residual is None else (residual,)
    given = Operands(x, weight, y, bias, partials, beside, extra, extra_bias, emb, means=means)
    gluon_tiles.launch(config, given)
    return y, partials, means


def empty_means(y: Tensor, tiles: int, empty=torch.empty) -> Means:
    """Room for those of y, an image of which is so many tiles."""
    n, h, w, c = y.shape
    values = empty((n, h // 2, w // 2, c), dtype=y.dtype, device=y.device)
    return Means(values, empty((n, tiles, 2, c), dtype=torch.float32, device=y.device))


def _configs(
    x: Tensor, weight: Tensor, extra: Sequence[tuple[Tensor, Tensor]]
) -> list[gluon_tiles.TileMma]:
    _, h, w, _ = x.shape
    others = [other for other, _ in extra]
    found = tiles_of(x, weight, others)
    return [tile for tile in found if gluon_tiles.makes_means(tile, h, w)]


def _default(configs: Sequence[gluon_tiles.TileMma]) -> gluon_tiles.TileMma:
    """Of 128 pixels, or nearly, with the filters beside the pixels: as was fastest of 16 and of 64
    images of 32x32."""
    return min(configs, key=lambda c: (abs(c.block_m - _PIXELS), not c.filters_with_pixels))
