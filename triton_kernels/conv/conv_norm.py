"""A convolution and the norm behind it in one launch, for inference with small images.

    y = factor (conv(x) + bias[co] + emb[n, co] + residual + 1x1 convolutions of other tensors)
    a = act(norm(y)),   or of y beside x2, whose tiles are programs of their own

An image of 8x8 pixels and 64 channels of it are a tile, and 64 channels are whole groups where a
group has 2, 4, 8 or 16. So the epilogue has in its registers all that the norm of y needs, and the
launch that would read y again is spared; y itself is only written if somebody else reads it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activations import check_activation
from ..registry.choose import select
from ..registry.kernel import Kernel, Op
from ..registry.spec import FORWARD_TERMS, ConvSpec
from ..runtime.device import Device, describe
from ..runtime.layout import check_second
from .fused_spec import Terms, forward_spec
from .hopper.operands import NormOfResult, Operands
from .hopper.tiles import tile_mma
from .refusals import BITS_16, Only

_MIN_PIXELS, _MOST_PIXELS = 16, 64  # of an image
_GROUPS = (1, 2, 4, 8, 16)  # channels of one: those of a warp, which sums them by shuffles


class NextNorm(NamedTuple):
    """act(norm(y)), the first reader of a convolution's result."""

    weight: Tensor  # float32 [CO]
    bias: Tensor  # float32 [CO]
    num_groups: int
    eps: float
    activation: str
    keep: bool  # whether y has other readers
    stats: bool = False  # and whether they want its partials


def _refuse_norm(spec: ConvSpec) -> str | None:
    """Why tiles do not have whole groups, or whole images."""
    c, pixels = spec.c + spec.beside, spec.h * spec.w
    if c % spec.groups or c // spec.groups not in _GROUPS or spec.beside % tile_mma.CHANNELS:
        return f"{c} channels in {spec.groups} groups; a group has {', '.join(map(str, _GROUPS))}"
    if spec.n == 0 or pixels < _MIN_PIXELS or _MOST_PIXELS % pixels:
        return f"{spec.n} images of {pixels} pixels; tiles have {_MOST_PIXELS}"
    return None


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    whole = Only(dtypes=BITS_16, multiple=tile_mma.CHANNELS)
    if reason := _refuse_norm(spec) or whole(spec, gpu) or tile_mma.refuse(spec, gpu):
        return reason
    return None if _whole_images(spec, gpu) else f"no tile has whole images of {spec.h}x{spec.w}"


def _whole_images(spec: ConvSpec, gpu: Device) -> list[tile_mma.TileMma]:
    """Tiles of them, the smallest first, with its filters beside it."""
    size, found = (spec.h, spec.w), tile_mma.configs(spec, gpu)
    whole = [tile for tile in found if tile_mma.box_of(tile, *size)[1:] == size]
    return sorted(whole, key=lambda c: (c.block_m, not c.filters_with_pixels))


def _configs(spec: ConvSpec, gpu: Device) -> list[tile_mma.TileMma]:
    """The smallest first, or twice that if there are more of them than multiprocessors: what was
    faster without the norm."""
    configs = _whole_images(spec, gpu)
    smallest = configs[0]
    tiles = spec.n * spec.h * spec.w // smallest.block_m * (spec.c // tile_mma.CHANNELS)
    if tiles <= gpu.num_sms:
        return configs
    larger = [c for c in configs if c.block_m > smallest.block_m]
    return [*larger[:1], *configs]


CONV_NORM = Op(
    "conv_norm",
    ("h", "w", "k", "c", "dtype", "residual", "extras", "keep"),
    (Kernel("tile_mma", tile_mma.TileMma, _refuse, _configs, adds=FORWARD_TERMS),),
    similar=False,
)


def conv_norm(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [CO]
    norm: NextNorm,
    *,
    x2: Tensor | None = None,  # [N, H, W, C2], dtype of x
    config: tile_mma.TileMma | None = None,
    **terms: Any,  # of `Terms`
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """y [N, H, W, CO], or None if it is not kept; its partials [N, K, 2, CO] if they are wanted;
    a [N, H, W, CO + C2], of y beside x2. The norm is of y as it was rounded."""
    check_activation(norm.activation)
    n, h, w, ci = x.shape
    co = weight.shape[0]
    c = co + check_second(x2, n, h, w)
    assert norm.weight.shape == norm.bias.shape == (c,)
    assert norm.weight.is_contiguous() and norm.bias.is_contiguous()
    added = Terms(**terms)
    if config is None and n:

        def run(c: tile_mma.TileMma) -> Tensor:
            return conv_norm(x, weight, bias, norm, x2=x2, config=c, **terms)[2]

        asked = {"groups": norm.num_groups, "beside": c - co, "keep": norm.keep}
        spec = forward_spec(x, weight, **added.asked, **asked)
        config = select(CONV_NORM, spec, describe(x.device), run).config
    a = x.new_empty((n, h, w, c))
    y = x.new_empty((n, h, w, co)) if norm.keep else None
    sums = x.new_empty((n, 1, 2, co), dtype=torch.float32) if norm.stats else None
    if n == 0:
        return y, sums, a
    group = c // norm.num_groups
    normed = NormOfResult(a, *norm[:2], norm.eps, norm.activation, group, norm.keep, x2)
    given = Operands(x, weight, a if y is None else y, bias, sums, *added.operands)
    tile_mma.launch(config, given, normed)
    return y, sums, a
