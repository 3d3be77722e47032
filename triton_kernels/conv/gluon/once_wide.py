"""1x1 convolutions of inference to 192 channels for Hopper, written in Gluon: a program has all
channels of a tile of pixels, so that these are fetched once.

    y = conv(x) + bias + residual,   and its partial sums

As in `once`, filters are asked for before the program waits for the launch in front, and pixels and
residual behind the wait in one trip to memory.
"""

import torch
from torch import Tensor

from ...dependent_launch import overlapping
from ...device import describe
from ...gluon.descriptors import SUPPORTED, in_boxes, takes

if SUPPORTED:
    from .once_wide_kernels import conv_once_wide_kernel

_empty = torch.empty  # tests put a function here that returns NaNs

_CHANNELS = 192  # of y: 64 for each of three warpgroups
_MAX_CHANNELS = 192  # of x: with its filters 165 KiB of shared memory
_PIXELS = (64, 128)  # of a tile


def serves_once_wide(x: Tensor, weight: Tensor) -> bool:
    """Whether `conv_once_wide` can do it, and should: whole tiles of one image each."""
    n, h, w, ci = x.shape
    co, _, r, s = weight.shape
    return (
        takes(x)
        and r == s == 1
        and co == _CHANNELS
        and ci % 64 == h * w % _PIXELS[-1] == 0
        and ci <= _MAX_CHANNELS
    )


def _tile(x: Tensor) -> int:
    """The fewest pixels of which all tiles run at once."""
    n, h, w, _ = x.shape
    tiles = (pixels for pixels in _PIXELS if n * h * w // pixels <= describe(x.device).num_sms)
    return next(tiles, _PIXELS[-1])


def conv_once_wide(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [192, CI, 1, 1] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [192]
    *,
    residual: Tensor | None = None,  # [N, H, W, 192]
    stats: bool = False,
    pixels: int | None = None,  # of a tile
) -> tuple[Tensor, Tensor | None]:
    """As `fused.conv.conv_forward`."""
    n, h, w, ci = x.shape
    pixels = pixels or _tile(x)
    co, m = weight.shape[0], n * h * w
    assert weight.permute(0, 2, 3, 1).is_contiguous() and weight.data_ptr() % 16 == 0
    y = _empty((n, h, w, co), dtype=x.dtype, device=x.device)
    partials = None
    if stats:
        shape = (n, h * w // pixels, 2, co)
        partials = _empty(shape, dtype=torch.float32, device=x.device)

    def in_tiles(t: Tensor) -> object:
        c = t.shape[3]
        assert t.is_contiguous()
        return in_boxes(t, [m, c], [c, 1], [pixels, 64])

    if n > 0:
        conv_once_wide_kernel[(m // pixels,)](
            in_tiles(x),
            in_boxes(weight, [co, ci], [ci, 1], [64, 64]),
            None if residual is None else in_tiles(residual),
            in_tiles(y),
            bias,
            partials,
            PIXELS=pixels,
            K_BLOCKS=ci // 64,
            num_warps=4,
            maxnreg=168,
            **overlapping(x.device, m),
        )
    return y, partials
