"""A convolution and the norm behind it in one launch, where tiles of an image meet, for inference.

    y = conv(x) + bias[co] + emb[n, co] + residual + 1x1 convolutions of other tensors
    a = act(norm(y))

`conv_norm` does it where a tile has whole images and whole groups of channels. Here an image is
several tiles, or groups lie across blocks of 64 channels: every tile leaves its sums and waits for
those of the others (`conv.gluon.tile_meeting`, where it is shown that they come). Images of rows of
64 pixels and 64 channels have a kernel of their own (`conv.gluon.rows_meeting`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..activations import check_activation
from ..conv.gluon import rows_meeting
from ..conv.gluon import tiles as gluon_tiles
from ..conv.gluon.operands import NormOfResult, Operands, SecondNorm
from ..conv.tma import Config
from ..device import describe
from ..tuning import choose
from .conv_norm import NextNorm

_empty = torch.empty  # tests put a function here that returns NaNs

_TILE_CHANNELS = 64
_MOST_CHANNELS = 16  # of a group of a second norm
_MOST_WORDS = 16  # that a thread waits for at a time
_MEETING = 96  # pixels of a tile that take as long as the epilogue that nothing hides
_LEAST_LANES = 4  # of threads, which have a channel's accumulators among them


def meets(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S]
    num_groups: int,
    extra: Sequence[tuple[Tensor, Tensor]] = (),
    residual: bool = False,  # whether one is added
) -> bool:
    """Whether `conv_meeting` can do this convolution and the norm of its result."""
    return bool(_configs(x, weight, num_groups, extra, residual))


def meets_twice(
    x: Tensor, weight: Tensor, num_groups: int, second: int, residual: bool = False
) -> bool:
    """Whether it can do, without 1x1 terms, a second norm of so many groups as well."""
    co = weight.shape[0]
    configs = _configs(x, weight, num_groups, (), residual)
    fits = co % second == 0 and (co // second) % (co // num_groups) == 0
    return fits and co // second <= _MOST_CHANNELS and any(map(rows_meeting.serves, configs))


def conv_meeting(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, 3, 3] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [CO]
    norm: NextNorm,
    *,
    emb: Tensor | None = None,  # float32 [N, CO], rows any distance apart
    residual: Tensor | None = None,  # [N, H, W, CO], dtype of x
    extra: Sequence[tuple[Tensor, Tensor]] = (),  # up to two: [N, H, W, C] or half of H, W; [CO, C]
    extra_bias: Tensor | None = None,  # float32 [CO]
    into: Tensor | None = None,  # a is written there, pixels any distance apart
    also: SecondNorm | None = None,  # what `meets_twice` says
    zeros: Callable[[int, torch.device], Tensor] | None = None,  # so many int64
    config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:  # [N, H, W, CO], [N, K, 2, CO], [N, H, W, CO]
    """y, its partials, and a, as of `conv_norm`. Terms of half of H and W are upsampled there, in
    `rows_meeting` alone."""
    check_activation(norm.activation)
    n, h, w, ci = x.shape
    co = weight.shape[0]
    assert norm.weight.shape == norm.bias.shape == (co,)
    assert norm.weight.is_contiguous() and norm.bias.is_contiguous()
    shape = n, h, w, co
    a = _empty(shape, dtype=x.dtype, device=x.device) if into is None else into
    assert a.shape == shape and a.stride(3) == 1
    if config is None:
        terms = {"emb": emb, "residual": residual, "extra": extra, "extra_bias": extra_bias}
        configs = _configs(x, weight, norm.num_groups, extra, residual is not None)
        config = choose(
            "conv_meeting",
            (n, h, w, ci, co, x.dtype, residual is not None, len(extra), norm.keep),
            lambda: configs,
            lambda: _default(a, configs),
            lambda c: conv_meeting(x, weight, bias, norm, **terms, into=into, config=c)[2],
        )
    rows, _ = gluon_tiles.cut(config[1], h, w)
    tiles = h // rows
    y = _empty(shape, dtype=x.dtype, device=x.device) if norm.keep else None
    partials = None
    if norm.stats:
        partials = _empty((n, tiles, 2, co), dtype=torch.float32, device=x.device)
    if n == 0:
        return y, partials, a
    slots = (zeros or _zeros)(n * co * tiles, x.device).view(n, co, tiles)
    then = norm.eps, norm.activation, co // norm.num_groups, norm.keep
    normed = NormOfResult(a, *norm[:2], *then, slots=slots, also=also)
    beside = () if residual is None else (residual,)
    out = a if y is None else y
    given = Operands(x, weight, out, bias, partials, beside, extra, extra_bias, emb)
    if rows_meeting.serves(config):
        rows_meeting.launch(given, normed)
    else:
        gluon_tiles.launch(config, given, normed)
    return y, partials, a


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)


def _configs(
    x: Tensor,
    weight: Tensor,
    num_groups: int,
    extra: Sequence[tuple[Tensor, Tensor]],
    residual: bool,
) -> list[Config]:
    """Tiles of one image, all of which can be under way at once."""
    _, h, w, _ = x.shape
    co = weight.shape[0]
    if co % num_groups or co // num_groups > _TILE_CHANNELS:
        return []
    others = [other for other, _ in extra]
    if large := rows_meeting.tiles(x, weight, co // num_groups, others, residual):
        return [Config(*tile) for tile in large]
    if any(other.shape[:3] != x.shape[:3] for other in others):
        return []
    lanes = max(_LEAST_LANES, 1 << (co // num_groups - 1).bit_length())
    found = []
    for tile in gluon_tiles.tiles(x, x, weight, extra=others):
        rows, images = gluon_tiles.cut(tile[1], h, w)
        count = h // rows
        words = lanes * count * _TILE_CHANNELS // 128
        together = count * (co // _TILE_CHANNELS) <= describe(x.device).num_sms
        if images == 1 and count & (count - 1) == 0 and words <= _MOST_WORDS and together:
            found.append(Config(*tile))
    return found


def _default(y: Tensor, configs: list[Config]) -> Config:
    """That with the shortest rounds, whose meeting takes as long as so many pixels, by what was
    measured at 8 to 64 images; with the filters beside the pixels."""
    sms = describe(y.device).num_sms

    def time(config: Config) -> int:
        tiles = y.numel() // (config.block_m * _TILE_CHANNELS)
        return -(-tiles // sms) * (config.block_m + _MEETING)

    return min(configs, key=lambda c: (time(c), -c.num_stages))
