"""Weight gradient of `conv2d` in float32 or TF32, by products of float16 numbers
(`conv.plain.fp16_split`).

    dweight[co, r, s, ci] = sum_{n, h, w} dy[n, h, w, co] x[n, h + r - 1, w + s - 1, ci]

In 16 bits wgmma takes its operands with either index innermost, so nothing has to be turned, and it
has twice its rate in TF32, four times that of mma.sync. TF32 is one such product. float32 is three:
small x big + big x small + big x big.

3x3 filters over rows of 8, 16, 32 or 64 pixels, on Hopper.
"""

import triton
from torch import Tensor

from ...hopper.descriptors import SUPPORTED
from ...reductions.column_sum import num_splits
from ...reductions.long_sums import fewest_parts
from ...runtime.dependent_launch import following
from ...runtime.device import describe
from ..plain.fp16_split import in_halves
from .row_mma import images_of_row, in_rows

if SUPPORTED:
    from .fp16_split_wgrad_kernel import conv_half_wgrad_kernel

_PIXELS = 128  # of a tile
_WIDTHS = (8, 16, 32, 64)
_MOST_NUMBERS = 2**31 - 2**22  # offsets are of 32 bits, one step of `halves` further too


def applies(x: Tensor, dy: Tensor, weight: Tensor, padding: tuple[int, int]) -> bool:
    """Whether `launch_half` can do this weight gradient."""
    _, h, w, _ = x.shape
    return (
        SUPPORTED
        and describe(x.device).hopper
        and x.itemsize == 4
        and tuple(weight.shape[2:]) == (3, 3)
        and tuple(padding) == (1, 1)
        and all(c % 64 == 0 for c in weight.shape[:2])
        and w in _WIDTHS
        and h % _rows(w) == 0
        and max(x.numel(), dy.numel()) < _MOST_NUMBERS
    )


def half_splits(x: Tensor, weight: Tensor, precision: str) -> int:
    """Parts that the sum over pixels is best split into."""
    co, ci, _, _ = weight.shape
    tiles = _num_tiles(x)
    fewest = fewest_parts(tiles * _PIXELS, x.dtype, precision)
    return num_splits(co * ci // 64**2, tiles, describe(x.device).num_sms, fewest)


def launch_half(
    x: Tensor,  # float32 [N, H, W, CI]
    dy: Tensor,  # float32 [N, H, W, CO]
    weight: Tensor,  # [CO, CI, 3, 3], of which only the shape matters
    partial: Tensor,  # [splits, CO * 9 * CI], or one part alone, to be written
    products: int,  # TF32: 1; float32: 3
    splits: int,
) -> None:
    """The gradient of the filters, as `splits` parts that have to be added up."""
    co, ci, _, _ = weight.shape
    _, h, w, _ = x.shape
    parts = 1 if products == 1 else 2
    x_parts, dy_parts, factors = in_halves(x, dy, parts)
    images, rows = images_of_row(w), _rows(w)
    absent = [None] * (2 - parts)
    conv_half_wgrad_kernel[(co * ci // 64**2 * splits,)](
        *(in_rows(part, 1, images) for part in x_parts),
        *absent,
        *(in_rows(part, rows, images) for part in dy_parts),
        *absent,
        partial,
        factors,
        ci,
        co,
        _num_tiles(x),
        h // rows,
        W=w * images,
        IMAGES=images,
        STAGES=4 // parts,
        num_warps=4,
        maxnreg=128,
        **following(x.device),
    )


def _rows(w: int) -> int:
    """Of a tile."""
    return _PIXELS // (w * images_of_row(w))


def _num_tiles(x: Tensor) -> int:
    n, h, w, _ = x.shape
    return triton.cdiv(n, images_of_row(w)) * (h // _rows(w))
