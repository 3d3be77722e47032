"""Of images: convolutions, resampling, and zeros around them."""

import math

from ..views import Dim, Piece, View, in_order, whole
from .arithmetic import arithmetic, two
from .layers import linear_of
from .resampled import mirrored, resampled, to_tuple
from .shapes import memory_order
from .table import Lowering, lowers


@lowers("convolution")
def _conv(low, x, weight, bias, stride, padding, dilation, transposed, more, groups):
    given = x, weight, bias, stride, padding, dilation, transposed, more, groups
    if len(x.dims) == 4 and (y := resampled(low, *given)) is not None:
        return y
    if transposed and (y := _apart(low, *given)) is not None:
        return y
    if groups != 1 or set(dilation) != {1} or transposed and len(x.dims) == 5:
        return arithmetic(low, *given)  # PyTorch's, over images as the module has them
    if len(x.dims) == 5:
        y = _conv_of_frames(low, x, weight, bias, *(to_tuple(n, 3) for n in (stride, padding)))
        return arithmetic(low, *given) if y is None else y
    if len(x.dims) not in (3, 4):
        return arithmetic(low, *given)
    one_row = len(x.dims) == 3  # of pixels, of which a stride over rows leaves one
    if one_row:
        x, weight = x.insert(2), weight.insert(2)
    strides = to_tuple(stride, 1) * 2 if one_row else to_tuple(stride, 2)
    zeros = (0, *to_tuple(padding, 1)) if one_row else to_tuple(padding, 2)
    of_images = _transposed_conv_of_images if transposed else _conv_of_images
    y = of_images(low, x.permute((0, 2, 3, 1)), weight, bias, strides, zeros)
    y = y.permute((0, 3, 1, 2))
    return y.drop(2) if one_row else y


def _apart(low, x, weight, bias, stride, padding, dilation, transposed, more, groups):
    """Transposed, where each pixel becomes a block of its own: a product of each pixel. None: it is
    something else."""
    (_, ci, *size), (_, co, *window) = x.shape, weight.shape
    plain = groups == 1 and set((*dilation, 1)) == {1} and set((*padding, *more, 0)) == {0}
    if not plain or list(to_tuple(stride, len(size))) != window:
        return None
    d = len(size)
    filters = weight.permute((*range(2, 2 + d), 1, 0))  # [*window, CO, CI]
    rows = math.prod(window) * co
    b = None if bias is None else low.gather(bias.expand((*window, co)), (rows,))
    last = x.permute((0, *range(2, 2 + d), 1))
    y = linear_of(low, last, low.gather(filters, (rows, ci)), b, False)
    y = whole(low.views.owned(y).value, (x.shape[0], *size, *window, co))
    pixels = (
        i for pair in zip(range(1, 1 + d), range(1 + d, 1 + 2 * d), strict=True) for i in pair
    )
    return y.permute((0, 1 + 2 * d, *pixels)).reshape(tuple(low.meta.shape))


def _conv_of_images(
    low: Lowering,
    x: View,  # [N, H, W, CI]
    weight: View,
    bias: View | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> View:  # [N, P, Q, CO]
    co, ci, r, s = weight.shape
    (n, h, w, _), (sy, sx), (py, px) = x.shape, stride, padding
    dtype = low.meta.dtype
    if (r, s, sy, sx, py, px) == (1, 1, 1, 1, 0, 0):
        return linear_of(low, x, low.gather(weight, (co, ci)), low.gather(bias), False)
    inputs = {"x": low.gather(x), "weight": low.gather(weight), "bias": low.gather(bias)}
    p, q = (h + 2 * py - r) // sy + 1, (w + 2 * px - s) // sx + 1
    how = {"stride": (sy, sx), "padding": (py, py, px, px)}
    return whole(low.make("conv", low.cast_all(inputs, dtype), (n, p, q, co), dtype, **how))


def _transposed_conv_of_images(
    low: Lowering,
    x: View,  # [N, P, Q, CI]
    weight: View,  # [CI, CO, R, S]
    bias: View | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> View:  # [N, H, W, CO]
    """The input gradient of the convolution from CO to CI channels."""
    (n, co, *size), dtype = low.meta.shape, low.meta.dtype
    shape = n, *((1, *size) if len(size) == 1 else size), co
    (sy, sx), (py, px) = stride, padding
    inputs = low.cast_all({"dy": low.gather(x), "weight": low.gather(weight)}, dtype)
    how = {"stride": (sy, sx), "padding": (py, py, px, px)}
    y = whole(low.make("conv_dx", inputs, shape, dtype, **how))
    return y if bias is None else two(low, "add", y, bias, dtype, shape)


def _conv_of_frames(
    low: Lowering,
    x: View,  # [N, CI, F, H, W]
    weight: View,
    bias: View | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
) -> View | None:
    """By filters of one frame, a convolution of N F images; by those of one pixel, of N images
    whose rows are frames. None: the filters are neither."""
    (n, ci, f, h, w), (_, _, t, r, s) = x.shape, weight.shape
    channels_last = x.permute((0, 2, 3, 4, 1))
    if (t, stride[0], padding[0]) == (1, 1, 0):
        images, weight, cut = (n * f, h, w, ci), weight.drop(2), slice(1, 3)
    elif (r, s, *stride, *padding[1:]) == (1, 1, 1, 1, 1, 0, 0):
        images, weight, cut = (n, f, h * w, ci), weight.drop(4), slice(0, 2)
    else:
        return None
    image = whole(low.gather(channels_last, images))
    y = _conv_of_images(low, image, weight, bias, stride[cut], padding[cut])
    (_, co, *size), value = low.meta.shape, low.views.owned(y).value
    return whole(value, (n, *size, co)).permute((0, 4, 1, 2, 3))


@lowers("upsample_nearest2d", "_upsample_nearest_exact2d")
def _upsample(low, x, *args, **options):
    n, _, h, w = x.shape
    _, c, p, q = low.meta.shape
    factor, said = (p // h, q // w), args[1:]
    said = said[0] if said and isinstance(said[0], list | tuple) else said
    fits = all(scale in (None, n) for scale, n in zip(said, factor, strict=False))
    if not fits or p % h or q % w:
        return arithmetic(low, x, *args, **options)
    value = low.gather(x.permute((0, 2, 3, 1)))
    y = low.make("upsample", {"x": value}, (n, p, q, c), value.dtype, factor=factor)
    return whole(y).permute((0, 3, 1, 2))


@lowers("avg_pool2d")
def _avg_pool(low, x, window, stride=(), padding=0, ceil=False, counts=True, divisor=None):
    size, step = to_tuple(window, 2), to_tuple(stride or window, 2)
    plain = len(x.dims) == 4 and step == size and not any(to_tuple(padding, 2))
    if not plain or ceil or divisor is not None:
        return arithmetic(low, x, window, stride, padding, ceil, counts, divisor)
    return _means_of_blocks(low, x, size)


@lowers("_adaptive_avg_pool2d")
def _adaptive_avg_pool(low, x, size):
    (p, q), (h, w) = size, x.shape[-2:]
    if len(x.dims) != 4 or h % p or w % q:
        return arithmetic(low, x, size)
    return _means_of_blocks(low, x, (h // p, w // q))


def _means_of_blocks(low: Lowering, x: View, window: tuple[int, int]) -> View:
    value = low.gather(x.permute((0, 2, 3, 1)))
    n, c, p, q = low.meta.shape
    y = low.make("avg_pool", {"x": value}, (n, p, q, c), value.dtype, window=window)
    return whole(y).permute((0, 3, 1, 2))


@lowers("constant_pad_nd")
def _pad(low, x, amounts, value=0):
    if value != 0 or min(amounts) < 0:
        return arithmetic(low, x, amounts, value)
    pads = [(0, 0)] * len(x.dims)
    for i in range(len(amounts) // 2):
        pads[-1 - i] = tuple(amounts[2 * i : 2 * i + 2])
    if not any(amounts):
        return x
    if any(len(dim) > 1 for dim in x.dims) and (y := _pad_in_pieces(low, x, pads)) is not None:
        return y
    order = memory_order(low.views.owned(x))
    value = low.gather(x.permute(order))
    pads = tuple(pads[i] for i in order)
    shape = [n + sum(pad) for n, pad in zip(value.shape, pads, strict=True)]
    y = low.make("pad", {"x": value}, shape, value.dtype, pads=pads)
    return in_order(y, shape, order)


@lowers("reflection_pad2d")
def _mirrored(low, x, amounts):
    if len(x.dims) != 4 or min(amounts) < 0 or not low.meta.dtype.is_floating_point:
        return arithmetic(low, x, amounts)
    left, _, top, _ = amounts
    value = low.gather(x.permute((0, 2, 3, 1)))
    return whole(mirrored(low, value, (top, left), low.meta.shape[2:])).permute((0, 3, 1, 2))


def _pad_in_pieces(low: Lowering, x: View, pads: list[tuple[int, int]]) -> View | None:
    """Where the pieces of dimensions lie, such as those of images and channels that are one
    dimension. None: a dimension with zeros around it has several."""
    x = low.views.owned(x)
    axes: list[tuple[int, Piece, tuple[int, int]]] = []  # of which dimension each is, and its zeros
    for at, (dim, pad) in enumerate(zip(x.dims, pads, strict=True)):
        if pad != (0, 0) and len(dim) > 1:
            return None
        before = axes[-1][1][1] if axes else 0  # one of length 1 goes behind the one before it
        axes += [(at, piece, pad) for piece in (dim if dim or pad == (0, 0) else ((1, before),))]
    order = sorted(range(len(axes)), key=lambda i: -axes[i][1][1])
    pieces = [axes[i][1] for i in order]
    dims = tuple((piece,) if piece[0] != 1 else () for piece in pieces)
    value, pads = low.gather(View(x.value, dims, x.offset)), tuple(axes[i][2] for i in order)
    shape = [n + sum(pad) for n, pad in zip(value.shape, pads, strict=True)]
    y = whole(low.make("pad", {"x": value}, shape, value.dtype, pads=pads))
    made: list[Dim] = [()] * len(x.dims)
    for i, dim in sorted(zip(order, y.dims, strict=True)):
        made[axes[i][0]] += dim
    return View(y.value, tuple(made))
