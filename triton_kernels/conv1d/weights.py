"""The weights of a convolution in the order in which programs read them (`taps`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..registry.spec import dtype_name
from ..runtime.device import describe
from . import whole
from .stage_spec import StageSpec
from .taps import tile_widths


class Conv(NamedTuple):
    """A convolution with its weights as `pack_conv` lays them out."""

    weight: Tensor  # [slices, blocks, taps and skip, BM, CG], but taps of a tile side by side
    taps: int
    stride: int
    transposed: bool
    side: bool  # its last tile is a 1x1 convolution of the same input
    widest: int  # taps in a tile, at most: a power of two
    by_tap: Tensor | None = None  # the same as [taps and skip, rows, C], for `whole`

    @property
    def out_channels(self) -> int:
        _, blocks, _, bm, _ = self.weight.shape
        return blocks * bm // (2 if self.transposed else 1)

    def out_length(self, t: int) -> int:
        return 2 * t if self.transposed else (t - 1) // self.stride + 1


def pack_conv(
    weight: Tensor,  # [CO, CI, S]; transposed [CI, CO, 4]
    side: Tensor | None,  # [CO, CI, 1]
    dtype: torch.dtype,
    *,
    slice_channels: int,
    block: int,
    stride: int = 1,
    transposed: bool = False,
    widest: int = 4,
) -> Conv:
    """Weights in the order in which the programs read them: each has its own in one piece.

    A transposed convolution of 4 taps and stride 2 is two of 2 taps, for the even positions of its
    result and for the odd: y[2i] = W_1 x[i] + W_3 x[i - 1], y[2i + 1] = W_2 x[i] + W_0 x[i + 1].

    For many samples there may be a copy of them (`Conv.by_tap`).
    """
    if transposed:
        w = weight.permute(1, 2, 0)  # [CO, 4, CI]
        tiles = torch.cat((w[:, [1, 3]], w[:, [2, 0]]))  # [2CO, 2, CI]
    else:
        tiles = weight.permute(0, 2, 1)  # [CO, S, CI]
    taps = tiles.shape[1]
    if side is not None:
        if stride != 1 or transposed:
            raise ValueError("a 1x1 skip is beside a convolution that keeps the length")
        tiles = torch.cat((tiles, side.permute(0, 2, 1)), dim=1)
    rows, count, ci = tiles.shape
    if rows % block or ci % slice_channels or (transposed and rows // 2 % block):
        raise ValueError(f"{rows} x {ci} channels do not divide into {block} x {slice_channels}")
    by_tap = tiles.to(dtype).transpose(0, 1)
    spec = StageSpec(
        1, dtype_name(dtype), 1, rows, ci, taps, side is not None, 1 if transposed else stride,
        transposed, batched=True, by_tap=True,
    )  # fmt: skip
    copied = whole.refuse(spec, describe(weight.device)) is None
    by_tap = by_tap.contiguous() if copied else None
    tiles = tiles.reshape(rows // block, block, count, ci // slice_channels, slice_channels)
    tiles = tiles.permute(3, 0, 1, 2, 4).to(dtype)  # [slices, blocks, block, count, channels]
    widths = tile_widths(taps, count, widest)
    packed = torch.cat([part.flatten(2) for part in tiles.split(widths, dim=3)], dim=2)
    shape = (ci // slice_channels, rows // block, count, block, slice_channels)
    return Conv(packed.view(shape), taps, stride, transposed, side is not None, widest, by_tap)


def unpack_conv(conv: Conv) -> Tensor:  # [rows, tiles, C]
    """The weights as `pack_conv` found them: taps, and behind them the 1x1 skip."""
    slices, blocks, count, block, channels = conv.weight.shape
    widths = tile_widths(conv.taps, count, conv.widest)
    parts = conv.weight.flatten(2).split([w * block * channels for w in widths], dim=2)
    tiles = [part.unflatten(2, (block, w, channels)) for part, w in zip(parts, widths, strict=True)]
    return torch.cat(tiles, dim=3).permute(1, 2, 3, 0, 4).flatten(3).flatten(0, 1)
