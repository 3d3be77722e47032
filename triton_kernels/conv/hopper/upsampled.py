"""3x3 convolutions after nearest upsampling, in Gluon for Hopper. The first channels of the image
were upsampled, and their products are computed on the small image.

In an upsampled image 2x2 pixels are equal, so a filter of 3x3 taps reads 2x2 different pixels. The
parity of the row and that of the column say which pixels, and which taps are added up:

    row 2 i        w[0] x[i - 1] + (w[1] + w[2]) x[i]
    row 2 i + 1                    (w[0] + w[1]) x[i] + w[2] x[i + 1]         columns likewise

So there are four filters of 2x2 taps, one for each pair of parities, with 4/9 of the products. In
the input gradient 4x4 pixels of the large image contribute to a small pixel, with the 16 filters.

A tile has 256 pixels (or 128, or 64): large pixels of one pair of parities, or in the input
gradient small pixels. A block of pixels has 64 channels of a tile and of one more row, moved by a
column. It serves two taps, whose filters are stored with it in the ring; otherwise the kernel works
as `tile_mma`. The other channels of the large image have nine taps, in blocks of pixels of one
parity too: the rows above and below a pixel have the other parity and are one block, its own row is
another.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...activations import rounded_grad
from ...hopper.descriptors import SUPPORTED, TensorDescriptor, in_boxes
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import overlapping
from ...runtime.device import Device, describe
from ...runtime.hardware import BESIDE_BUFFERS
from ..refusals import BITS_16, Only
from .operands import filters_in_boxes
from .tiles.tile_mma import cut, in_rows, registers

if SUPPORTED:
    from .upsampled_kernels import conv_parity_kernel

TILES = (256, 128, 64)  # pixels

_WIDTHS = (4, 8, 16, 32)  # pixels of a row of the small image
_MOST_IMAGES = 8  # of a tile; with 16 an input gradient's epilogue has too few registers
_MOST_BLOCKS = 6  # in shared memory


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why this kernel cannot compute it, or None; `spec` is of the large image."""
    if reason := Only(hopper=True, dtypes=BITS_16, multiple=64)(spec, gpu):
        return reason
    if spec.w // 2 not in _WIDTHS:
        return f"rows of {spec.w // 2} pixels; it takes {', '.join(map(str, _WIDTHS))}"
    size = f"images of {spec.h // 2}x{spec.w // 2}"
    return None if tiles(spec) else f"{size} are not cut into tiles of few images"


def tiles(spec: ConvSpec) -> list[int]:
    """Pixels of the tiles that `forward` and `input_grad` can use."""
    cuts = {pixels: cut(pixels, spec.h // 2, spec.w // 2) for pixels in TILES}
    return [pixels for pixels, found in cuts.items() if found and found[1] <= _MOST_IMAGES]


def blocks_of(pixels: int, width: int, shared_memory: int) -> int:
    """Blocks, each with two filters, that fit shared memory with two tiles of the result. The rows
    of a tile have `width` pixels."""
    left = shared_memory - BESIDE_BUFFERS - 2 * pixels * 128
    return min(_MOST_BLOCKS, left // ((pixels + width + 2 * 64) * 128))


def forward(
    pixels: int,
    a: Tensor,  # [N, 2 H, 2 W, K1 + K2], of which the first K1 channels were upsampled
    summed: Tensor,  # [16, CO, K1]: filters of the parity of rows, of columns, tap of rows, ...
    others: Tensor | None,  # [CO, K2, 3, 3] in channels_last memory; None: a is [N, H, W, K1]
    bias: Tensor,  # float32 [CO]
    emb: Tensor | None,  # float32 [N, CO], rows any distance apart
) -> tuple[Tensor, Tensor]:
    """The convolution + bias + emb [N, 2 H, 2 W, CO], and its sums, float32
    [N, 4 H W / `pixels`, 2, CO], or a row an image."""
    n, h, w, k = a.shape
    _, co, k1 = summed.shape
    if others is not None:
        h, w = h // 2, w // 2
    rows, images = cut(pixels, h, w)
    y = a.new_empty((n, 2 * h, 2 * w, co))
    partials = a.new_empty((n, 4 * (h // rows), 2, co), dtype=torch.float32)
    boxes = _of_one_kind if others is None else _by_parity
    pair = boxes(a, rows, images), boxes(a, 1, images)
    whole = () if others is None else (*pair, filters_in_boxes(others))
    channels, result = (k1, k - k1, k1, k), _by_parity(y, rows, images)
    shape = n, h, w, co
    _launch(pixels, shape, summed, pair, whole, channels, None, result, bias, emb, partials)
    return y, partials


def input_grad(
    pixels: int,
    dy: Tensor,  # [N, 2 H, 2 W, CO]
    summed: Tensor,  # [16, CO, C], as above
    # x [N, H, W, C], before it was upsampled; float32 [N, 4, .], whose first C count: mean, rstd,
    # g, b; and the activation behind it
    norm: tuple[Tensor, Tensor, str] | None,
) -> tuple[Tensor, Tensor | None]:
    """dz [N, H, W, C], the sums over 2x2 pixels of the input gradient. With a norm it is times the
    activation's derivative, and beside it are the sums of dz and of dz xhat, float32
    [N, H W / `pixels`, 2, C], or a row an image."""
    n, h, w, co = dy.shape
    dz = dy.new_empty((n, h // 2, w // 2, summed.shape[2]))
    rows, images = cut(pixels, *dz.shape[1:3])
    tile = partial(in_rows, rows=rows, images=images)
    pair = _by_parity(dy, rows, images), _by_parity(dy, 1, images)
    x, table, activation = (None, None, "identity") if norm is None else norm
    beside = partials = None
    if norm is not None:
        beside = tile(x)
        partials = dy.new_empty((n, h // 2 // rows, 2, dz.shape[3]), dtype=torch.float32)
    channels, slope = (co, 0, 0, co), rounded_grad(activation, dy.dtype)
    _launch(
        pixels, dz.shape, summed, pair, (), channels, beside, tile(dz), table, None, partials, slope
    )
    return dz, partials


def _launch(
    pixels: int,
    shape: Sequence[int],  # of the small image, and channels of the result
    summed: Tensor,
    pair: Sequence[TensorDescriptor],  # what is convolved with them, and its single rows
    whole: Sequence[TensorDescriptor],  # other channels: the same two and their filters, or none
    channels: Sequence[int],  # of both, where those of `whole` begin, of a pixel of the image
    beside: TensorDescriptor | None,  # x of an input gradient
    result: TensorDescriptor,
    vectors: Tensor | None,  # the bias, or the table of an input gradient
    emb: Tensor | None,
    partials: Tensor | None,
    slope: str | None = None,  # of an input gradient
) -> None:
    n, h, w, c = shape
    device = summed.device
    rows, images = cut(pixels, h, w)
    count = -(-n // images) * (h // rows) * (c // 64) * (4 if slope is None else 1)
    known = describe(device)
    overlap = overlapping(device, 0)
    conv_parity_kernel[(min(count, known.num_sms),)](
        *pair, in_boxes(summed, list(summed.shape), [1, 64, 64]), *(whole or (None, None, None)),
        beside, result, vectors, emb, partials, *channels, 0 if emb is None else emb.stride(0),
        0 if slope is None or vectors is None else vectors.stride(1), n, h, c,
        ROWS=rows, IMAGES=images, W=w, DGRAD=slope is not None, ACT=slope,
        BLOCKS=blocks_of(pixels, images * w, known.shared_memory), **registers(pixels, images),
        OVERLAP=bool(overlap), num_warps=4, **overlap,
    )  # fmt: skip


def _by_parity(x: Tensor, rows: int, images: int) -> TensorDescriptor:
    """[N, H, W, C] as [H / 2, 2, N, W / 2, 2 C]."""
    n, h, w, c = x.shape
    strides = [2 * w * c, w * c, h * w * c, 2 * c, 1]
    return in_boxes(x, [h // 2, 2, n, w // 2, 2 * c], [rows, 1, images, w // 2, 64], strides)


def _of_one_kind(x: Tensor, rows: int, images: int) -> TensorDescriptor:
    """[N, H, W, C] as [H, 1, N, W, C]."""
    n, h, w, c = x.shape
    strides = [w * c, w * c, h * w * c, c, 1]
    return in_boxes(x, [h, 1, n, w, c], [rows, 1, images, w, 64], strides)
