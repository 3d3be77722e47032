"""A convolution and the norm behind it in one launch, for inference with small images.

    y = conv(x) + bias[co] + emb[n, co] + residual + 1x1 convolutions of other tensors
    a = act(norm(y)),   or of y beside x2, whose tiles are programs of their own

An image of 8x8 pixels and 64 channels of it are a tile, and 64 channels are whole groups where a
group has 2, 4, 8 or 16. So the epilogue has in its registers all that the norm of y needs, and the
launch that would read y again is spared; y itself is only written if somebody else reads it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import check_activation
from ..registry.choose import choose
from ..registry.spec import dtype_name
from ..runtime.device import describe
from ..runtime.layout import check_second
from .fused_spec import tiles_of
from .hopper import single_tile as once
from .hopper import tile_mma as gluon_tiles
from .hopper.operands import NormOfResult, Operands

_empty = torch.empty  # tests put a function here that returns NaNs

_MIN_PIXELS = 16  # of an image
_GROUPS = (1, 2, 4, 8, 16)  # channels of one: those of a warp, which sums them by shuffles
_TILE_CHANNELS = 64


class NextNorm(NamedTuple):
    """act(norm(y)), the first reader of a convolution's result."""

    weight: Tensor  # float32 [CO]
    bias: Tensor  # float32 [CO]
    num_groups: int
    eps: float
    activation: str
    keep: bool  # whether y has other readers
    stats: bool = False  # and whether they want its partials


def norms_in_conv(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S]
    num_groups: int,
    extra: Sequence[tuple[Tensor, Tensor]] = (),
    second: int = 0,  # channels beside those of the result
) -> bool:
    """Whether `conv_norm` can do this convolution and the norm of its result."""
    _, h, w, _ = x.shape
    channels = weight.shape[0] + second
    groups = channels % num_groups == 0 and channels // num_groups in _GROUPS
    whole = _MIN_PIXELS <= h * w <= once.PIXELS and once.PIXELS % (h * w) == 0
    if not groups or not whole or second % _TILE_CHANNELS:
        return False
    if weight.shape[2:] == (1, 1):
        return h * w == once.PIXELS and not extra and once.serves_once(x, weight)
    return bool(_configs(x, weight, extra))


def conv_norm(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [CO]
    norm: NextNorm,
    *,
    emb: Tensor | None = None,  # float32 [N, CO], rows any distance apart; of 3x3 filters
    residual: Tensor | None = None,  # [N, H, W, CO], dtype of x
    extra: Sequence[tuple[Tensor, Tensor]] = (),  # up to two: [N, H, W, C], [CO, C]; likewise
    extra_bias: Tensor | None = None,  # float32 [CO]; likewise
    x2: Tensor | None = None,  # [N, H, W, C2], dtype of x
    config: gluon_tiles.TileMma | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """y [N, H, W, CO], or None if it is not kept; its partials [N, 1, 2, CO] if they are wanted;
    a [N, H, W, CO + C2], of y beside x2. The norm is of y as it was rounded."""
    check_activation(norm.activation)
    n, h, w, ci = x.shape
    co = weight.shape[0]
    c = co + check_second(x2, n, h, w)
    assert norm.weight.shape == norm.bias.shape == (c,)
    assert norm.weight.is_contiguous() and norm.bias.is_contiguous()
    a = _empty((n, h, w, c), dtype=x.dtype, device=x.device)
    y = _empty((n, h, w, co), dtype=x.dtype, device=x.device) if norm.keep else None
    sums = _empty((n, 1, 2, co), dtype=torch.float32, device=x.device) if norm.stats else None
    normed = NormOfResult(
        a, *norm[:2], norm.eps, norm.activation, c // norm.num_groups, norm.keep, x2
    )
    if n == 0:
        return y, sums, a
    if weight.shape[2:] == (1, 1):
        assert emb is None and not extra and extra_bias is None
        once.launch(x, weight, bias, a if y is None else y, residual, sums, normed)
        return y, sums, a
    if config is None:
        terms = {"emb": emb, "residual": residual, "extra": extra, "extra_bias": extra_bias}
        terms["x2"] = x2
        config = choose(
            "conv_norm",
            n,
            {
                "h": h,
                "w": w,
                "k": ci,
                "c": co,
                "dtype": dtype_name(x.dtype),
                "residual": residual is not None,
                "extras": len(extra),
                "keep": norm.keep,
            },
            lambda: _configs(x, weight, extra),
            lambda: _default(x, weight, extra),
            lambda c: conv_norm(x, weight, bias, norm, **terms, config=c)[2],
            describe(x.device),
        )
    beside = () if residual is None else (residual,)
    out = a if y is None else y
    given = Operands(x, weight, out, bias, sums, beside, extra, extra_bias, emb)
    gluon_tiles.launch(config, given, normed)
    return y, sums, a


def _configs(
    x: Tensor, weight: Tensor, extra: Sequence[tuple[Tensor, Tensor]]
) -> list[gluon_tiles.TileMma]:
    """Tiles of whole images."""
    _, h, w, _ = x.shape
    found = tiles_of(x, weight, [other for other, _ in extra])
    return [tile for tile in found if gluon_tiles.cut(tile.block_m, h, w)[0] == h]


def _default(
    x: Tensor, weight: Tensor, extra: Sequence[tuple[Tensor, Tensor]]
) -> gluon_tiles.TileMma:
    """The smallest, with its filters beside it, or twice that if there are more of them than
    multiprocessors: what was faster without the norm."""
    n, h, w, _ = x.shape
    configs = sorted(
        _configs(x, weight, extra), key=lambda c: (c.block_m, not c.filters_with_pixels)
    )
    smallest = configs[0]
    tiles = n * h * w // smallest.block_m * (weight.shape[0] // _TILE_CHANNELS)
    if tiles <= describe(x.device).num_sms:
        return smallest
    larger = [c for c in configs if c.block_m > smallest.block_m]
    return larger[0] if larger else smallest
