"""A second path of `fused.conv` for Hopper, written in Gluon: 3x3 convolutions in 16 bits whose
products are of 64 channels with a whole tile of pixels, both from shared memory.

A tile is 256 pixels (or 128), whole rows of an image. Its box has a row more above and below, and
it is fetched three times, moved by a column each time: outside the image TMA writes zeros, which
are the padding. The three taps of a column of the filter are that box from another row on. So
pixels are fetched 3.75 times where a box a tap fetches them 9 times (rows of 32, 256 pixels).

Of images smaller than that a tile takes several, side by side: to TMA the rows are the outermost
dimension, so that row 0 of all of them comes before row 1, and a tap is still one address.

Programs stay on their multiprocessor; one warp loads, and two warpgroups multiply, a tile each, so
that the epilogue of one is beside the products of the other. `rows` does the same with pixels that
are fetched once, for which its products are of one row: better where rows are long.

Used where `rows` is: with versions it was tried with, where it was measured to be faster.
"""

from collections.abc import Sequence

from torch import Tensor

from ...device import describe
from .rows import _SUPPORTED, _in_boxes, pointwise_terms

if _SUPPORTED:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .tiles_kernels import conv_tiles_kernel

_WARPS = 9  # two warpgroups that multiply, and a warp that loads

# `Config`s of `conv.tma`. The warps say that they belong here.
TILES = ((64, 256, 64, _WARPS, 3), (64, 128, 64, _WARPS, 4))

_WIDTHS = (8, 16, 32, 64)  # pixels of a row
_RESERVED = 1024  # bytes of shared memory for barriers, and what the compiler wants


def serves(config: tuple) -> bool:
    """Whether a `Config` is one of this path."""
    return config.num_warps == _WARPS


def applies(
    tile: tuple,  # one of TILES
    x: Tensor,  # [N, H, W, K], what is convolved: x, or dy
    y: Tensor,  # [N, H, W, C], the result
    weight: Tensor,  # [CO, CI, R, S]
    others: Sequence[Tensor] = (),  # [N, H, W, .], of which 1x1 convolutions are added, or inputs
) -> bool:
    """Whether `forward` or `input_grad` can do it with this tile."""
    _, h, w, _ = x.shape
    channels = [x.shape[3], y.shape[3], *weight.shape[:2], *(o.shape[3] for o in others)]
    return (
        _SUPPORTED
        and describe(x.device).hopper
        and x.itemsize == 2
        and tuple(weight.shape[2:]) == (3, 3)
        and all(c % 64 == 0 for c in channels)
        and w in _WIDTHS
        and _cut(tile[1], h, w) is not None
    )


def forward(
    config: tuple,  # one of TILES
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, 3, 3] in channels_last memory
    bias: Tensor,  # float32 [CO]
    y: Tensor,  # [N, H, W, CO] to be written
    partials: Tensor | None,  # float32 [N, tiles of an image, 2, CO] to be written
    *,
    emb: Tensor | None,  # float32 [N, CO]
    residual: Tensor | None,  # [N, H, W, CO]
    extra: Sequence[tuple[Tensor, Tensor]],  # up to two: [N, H, W, C], [CO, C]
    extra_bias: Tensor | None,  # float32 [CO]
) -> None:
    """What `fused.conv.conv_forward` does."""
    _, images = _cut(config[1], *x.shape[1:3])
    _launch(
        config, x, weight, [] if residual is None else [residual], y, bias, partials,
        *pointwise_terms(extra, lambda other: _in_rows(other, 2, images)), extra_bias, emb, None,
    )  # fmt: skip


def input_grad(
    config: tuple,  # one of TILES
    dy: Tensor,  # [N, H, W, CO]
    weight: Tensor,  # [CO, CI, 3, 3] in channels_last memory
    dz: Tensor,  # [N, H, W, CI] to be written
    partials: Tensor,  # float32 [N, tiles of an image, 2, CI] to be written
    *,
    inputs: Sequence[Tensor],  # x [N, H, W, CI], or the two that it concatenates
    table: Tensor,  # float32 [N, 4, CI]: mean, rstd, g, b
    activation: str,
) -> None:
    """What `fused.conv.conv_input_grad` does."""
    absent = [None] * 4
    _launch(config, dy, weight, inputs, dz, table, partials, absent, [0, 0], None, None, activation)


def _launch(
    config: tuple,
    x: Tensor,
    weight: Tensor,
    beside: Sequence[Tensor],  # read in the epilogue, where y is written
    y: Tensor,
    vectors: Tensor,
    partials: Tensor | None,
    extra: list,
    extra_channels: list[int],
    extra_bias: Tensor | None,
    emb: Tensor | None,
    activation: str | None,  # of an input gradient
) -> None:
    n, h, w, k = x.shape
    co, ci, _, _ = weight.shape
    c = y.shape[3]
    rows, images = _cut(config[1], h, w)
    tiles = -(-n // images) * (h // rows) * (c // 64)
    blocks, steps = rings(config[1], images * w, describe(x.device).shared_memory)
    assert partials is None or partials.shape[1] == h // rows
    conv_tiles_kernel[(min(tiles, describe(x.device).num_sms),)](
        _in_rows(x, 2, images),
        _in_boxes(weight, [9, co, ci], [ci, 9 * ci, 1], [1, 64, 64]),
        _in_rows(beside[0], rows, images) if beside else None,
        _in_rows(beside[1], rows, images) if len(beside) == 2 else None,
        _in_rows(y, rows, images),
        *extra,
        vectors,
        extra_bias,
        emb,
        partials,
        *extra_channels,
        beside[0].shape[3] if beside else 0,
        0 if emb is None else emb.stride(0),
        n,
        h,
        k,
        c,
        ROWS=rows,
        IMAGES=images,
        W=w,
        DGRAD=activation is not None,
        ACT=activation,
        BLOCKS=blocks,
        STEPS=steps,
        num_warps=4,
        maxnreg=168,
    )


def rings(pixels: int, width: int, shared_memory: int) -> tuple[int, int]:
    """Blocks of pixels, and filters of one tap, that shared memory holds beside two tiles of the
    result. A block is needed for three filters, and neither ring should wait for the other."""
    left = shared_memory - _RESERVED - 2 * pixels * 128
    block, tap = (pixels + 2 * width) * 128, 64 * 128

    def ahead(blocks: int) -> int:
        return min(3 * (blocks - 1), (left - blocks * block) // tap)

    blocks = max((b for b in range(2, 5) if left - b * block >= 2 * tap), key=ahead)
    return blocks, min(8, (left - blocks * block) // tap)


def _cut(pixels: int, h: int, w: int) -> tuple[int, int] | None:
    """Rows and images of a tile: rows that divide those of an image, or several whole images."""
    if h * w < pixels:
        return (h, pixels // (h * w)) if pixels % (h * w) == 0 and h % 2 == 0 else None
    rows = pixels // w
    return (rows, 1) if h % rows == 0 else None


def _in_rows(x: Tensor, rows: int, images: int) -> "TensorDescriptor":
    """[N, H, W, C] as [H, N, W, C]."""
    n, h, w, c = x.shape
    return _in_boxes(x, [h, n, w, c], [w * c, h * w * c, c, 1], [rows, images, w, 64])
