"""Layers: convolutions, products, norms, activations, attention, resampling, dropout."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..graph import Value
from ..norms_by_hand import channel_norm_attributes
from ..views import Dim, Piece, View, in_order, whole
from .arithmetic import arithmetic, two
from .resampled import resampled
from .shapes import memory_order
from .table import Lowering, each, lowers

ACTIVATIONS = ("relu", "silu", "gelu", "mish")


@lowers("convolution")
def _conv(low, x, weight, bias, stride, padding, dilation, transposed, more, groups):
    given = x, weight, bias, stride, padding, dilation, transposed, more, groups
    if len(x.dims) == 4 and groups == x.shape[1] and (y := resampled(low, *given)) is not None:
        return y
    if transposed and (y := _apart(low, *given)) is not None:
        return y
    if groups != 1 or set(dilation) != {1} or transposed and len(x.dims) == 5:
        return arithmetic(low, *given)  # PyTorch's, over images as the module has them
    if len(x.dims) == 5:
        y = _conv_of_frames(low, x, weight, bias, *(_tuple(n, 3) for n in (stride, padding)))
        return arithmetic(low, *given) if y is None else y
    if len(x.dims) not in (3, 4):
        return arithmetic(low, *given)
    one_row = len(x.dims) == 3  # of pixels, of which a stride over rows leaves one
    if one_row:
        x, weight = x.insert(2), weight.insert(2)
    strides = _tuple(stride, 1) * 2 if one_row else _tuple(stride, 2)
    zeros = (0, *_tuple(padding, 1)) if one_row else _tuple(padding, 2)
    of_images = _transposed_conv_of_images if transposed else _conv_of_images
    y = of_images(low, x.permute((0, 2, 3, 1)), weight, bias, strides, zeros)
    y = y.permute((0, 3, 1, 2))
    return y.drop(2) if one_row else y


def _apart(low, x, weight, bias, stride, padding, dilation, transposed, more, groups):
    """Transposed, where each pixel becomes a block of its own: a product of each pixel. None: it is
    something else."""
    (_, ci, *size), (_, co, *window) = x.shape, weight.shape
    plain = groups == 1 and set((*dilation, 1)) == {1} and set((*padding, *more, 0)) == {0}
    if not plain or list(_tuple(stride, len(size))) != window:
        return None
    d = len(size)
    filters = weight.permute((*range(2, 2 + d), 1, 0))  # [*window, CO, CI]
    rows = math.prod(window) * co
    b = None if bias is None else low.gather(bias.expand((*window, co)), (rows,))
    last = x.permute((0, *range(2, 2 + d), 1))
    y = _linear_of(low, last, low.gather(filters, (rows, ci)), b, False)
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
        return _linear_of(low, x, low.gather(weight, (co, ci)), low.gather(bias), False)
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


def _tuple(given: int | Sequence[int], count: int) -> tuple[int, ...]:
    given = (given,) if isinstance(given, int) else tuple(given)
    return given if len(given) == count else given * count


def _linear_of(
    low: Lowering, x: View, weight: Value, bias: Value | None, of_matrices: bool = True
) -> View:
    """x [..., CI] weight [CO, CI]^T + bias."""
    co = weight.shape[0]
    if len(weight.shape) != 2 or (bias is not None and bias.shape != (co,)):
        shapes = [list(v.shape) for v in (weight, bias) if v is not None]
        raise low.refuse(f"with weight and bias of {' and '.join(map(str, shapes))}")
    value = low.views.rows(x)
    inputs = low.cast_all({"x": value, "weight": weight, "bias": bias}, low.meta.dtype)
    y = low.make("linear", inputs, (*value.shape[:-1], co), low.meta.dtype)
    low.graph.nodes[-1].of_matrices = of_matrices
    return whole(y, (*x.shape[:-1], co))


@lowers("linear")
def _linear(low, x, weight, bias=None):
    return _linear_of(low, x, low.gather(weight), low.gather(bias))


@lowers("addmm")
def _addmm(low, bias, x, weight, *, beta=1, alpha=1):
    if (beta, alpha) != (1, 1) or bias.shape != weight.shape[1:]:
        return arithmetic(low, bias, x, weight, beta=beta, alpha=alpha)
    return _linear_of(low, x, low.gather(weight.permute((1, 0))), low.gather(bias))


def product_of_layer(low: Lowering, x: View, weight: View) -> View:
    """x [..., CI] weight [CI, CO]"""
    return _linear_of(low, x, low.gather(weight.permute((1, 0))), None)


@lowers("native_group_norm", known=("N", "C", "HxW"))
def _group_norm(low, x, weight, bias, groups, eps):
    order = (0, *range(2, len(x.dims)), 1)
    x = x.permute(order)
    value = low.views.rows(x)
    y = low.make(
        "group_norm",
        {"x": value, "weight": low.gather(weight), "bias": low.gather(bias)},
        value.shape,
        low.meta[0].dtype,
        groups=groups,
        eps=eps,
        activation="identity",
    )
    return in_order(y, x.shape, order)


@lowers("native_layer_norm")
def _layer_norm(low, x, over, weight, bias, eps):
    """Of several axes, one that is as long as all."""
    c = math.prod(over)
    rows = (*x.shape[: -len(over)], c)
    value = low.views.rows(x) if len(over) == 1 else low.gather(x, rows)
    affine = {"weight": low.gather(weight, (c,)), "bias": low.gather(bias, (c,))}
    how = channel_norm_attributes(eps, centred=True)
    y = low.make("channel_norm", {"x": value, **affine}, value.shape, low.meta[0].dtype, **how)
    return whole(y, x.shape)


@lowers(*ACTIVATIONS)
def _activation(low, x, *, approximate="none"):
    name = low.name.split(".")[-1]
    name = "gelu_tanh" if approximate == "tanh" else name
    return each(low, "act", x, activation=name)


@lowers("scaled_dot_product_attention")
def attention(low, q, k, v, mask=None, *, scale=None, is_causal=False, enable_gqa=False):
    fits = len(q.dims) == 4 and k.shape == v.shape and len(k.dims) == 4
    fits = fits and not enable_gqa and (*q.shape[:2], q.shape[3]) == (*k.shape[:2], k.shape[3])
    if not fits or is_causal or mask is not None and not _of_keys(mask):
        # no kernel here has it
        options = {"scale": scale, "is_causal": is_causal, "enable_gqa": enable_gqa}
        return arithmetic(low, q, k, v, mask, **options)
    n, heads, t, d = q.shape
    c, keys = heads * d, k.shape[2]
    scale = d**-0.5 if scale is None else scale
    attrs = {"heads": heads, "scale": scale}
    order = packed((q, k, v)) if mask is None else None
    if order is not None:
        value = of_samples(low, q.value, n)
        inputs = {"qkv": value}
        attrs["order"] = order
    else:
        value = _with_positions(low, _rows(low, _joined(q)))
        inputs = {"q": value, **_keys_and_values(low, value, k, v)}
    shape = (*value.shape[:-1], c)
    inputs = low.cast_all(inputs, low.meta.dtype)
    if mask is not None:
        inputs["mask"] = _mask_of_keys(low, mask, n, keys)
    y = low.make("attention", inputs, shape, low.meta.dtype, **attrs)
    return whole(y, (n, t, heads, d)).permute((0, 2, 1, 3))


def _rows(low: Lowering, x: View) -> Value:
    """x [N, T, C] as `Views.rows`, or of part of an image's channels an image, [N, H, W, C]."""
    (n, t, c), image = x.shape, x.value.shape[:-1]
    if len(image) == 3 and image[0] == n and image[1] * image[2] == t:
        return low.gather(x, (*image, c))
    return low.views.rows(x)


def _with_positions(low: Lowering, value: Value) -> Value:
    """[N, T, C] of rows [N, C], which are of one position each."""
    n, *between, c = value.shape
    return value if between else low.gather(whole(value), (n, 1, c))


def of_samples(low: Lowering, value: Value, n: int) -> Value:
    """A value [N, ..., C] of n samples, which may be several axes of it, such as videos and pixels
    where attention is over frames."""
    c = value.shape[-1]
    if value.shape[0] == n and len(value.shape) > 2:
        return value
    return low.gather(whole(value), (n, value.numel // (n * c), c))


def _keys_and_values(low: Lowering, q: Value, k: View, v: View) -> dict[str, Value]:
    """Side by side as they are, or else two values; of as many positions as queries, in the same
    shape."""
    if packed((k, v)) == "qkv_heads":
        return {"kv": of_samples(low, k.value, k.shape[0])}
    parts = [_with_positions(low, _rows(low, _joined(view))) for view in (k, v)]
    shape = q.shape if parts[0].numel == q.numel else parts[0].shape
    parts = [p if p.shape == shape else low.gather(whole(p), shape) for p in parts]
    return dict(zip("kv", parts, strict=True))


def _of_keys(mask: View) -> bool:
    """Whether it says of keys alone which are seen."""
    dims = ((),) * (4 - len(mask.dims)) + mask.dims
    return mask.value.dtype == torch.bool and not any(step for dim in dims[1:3] for _, step in dim)


def _mask_of_keys(low: Lowering, mask: View, n: int, keys: int) -> Value:
    """bool [N, L] of a mask that is the same for all heads and queries."""
    dims = ((),) * (4 - len(mask.dims)) + mask.dims
    return low.gather(View(mask.value, (dims[0], dims[3]), mask.offset).expand((n, keys)))


def _joined(view: View) -> View:
    """[N, heads, T, d] as [N, T, C]"""
    n, heads, t, d = view.shape
    joined = view.permute((0, 2, 1, 3)).reshape((n, t, heads * d))
    assert joined is not None
    return joined


def packed(parts: tuple[View, ...]) -> str | None:
    """How q, k and v, or k and v, lie side by side in one value [N, ..., 3C] or [N, ..., 2C], or
    None if they do not."""
    first = parts[0]
    n, heads, t, d = first.shape
    value, count, c = first.value, len(parts), heads * d
    if any(part.value is not value or part.dims != first.dims for part in parts):
        return None
    row = count * c
    if value.shape[-1] != row or value.numel != n * t * row:
        return None
    apart = {"qkv_heads": (c, d), "heads_qkv": (d, count * d)}  # part from part, head from head
    for order, (next_part, next_head) in apart.items():
        sizes, steps = (n, heads, t, d), (t * row, next_head, row, 1)
        dims = tuple(((m, s),) if m > 1 else () for m, s in zip(sizes, steps, strict=True))
        offsets = [part.offset for part in parts]
        if first.dims == dims and offsets == [i * next_part for i in range(count)]:
            return order
    return None


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
    size, step = _tuple(window, 2), _tuple(stride or window, 2)
    plain = len(x.dims) == 4 and step == size and not any(_tuple(padding, 2))
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


@lowers("embedding")
def _embedding(low, weight, index, unchanged=-1):
    inputs = {"weight": low.gather(weight), "index": low.gather(index)}
    y = low.make("embedding", inputs, low.meta.shape, low.meta.dtype, unchanged=unchanged)
    return whole(y)


@lowers("dropout")
def _dropout(low, x, p, train):
    if not train or p == 0:
        return x
    if p == 1 or len(low.views.owned(x).value.shape) < 2:
        return _dropped(low, x, p, {}, mask=True)
    return _dropped(low, x, p, {"rng": low.rng()}, layer=low.layer(), first=0)


@lowers("triton_kernels.dropout")
def _keyed_dropout(low, x, p, rng, layer, first):
    if not x.is_all or whole(x.value, x.shape) != x:
        raise low.refuse("of a tensor in another order")  # elements are counted in memory
    return _dropped(low, x, p, {"rng": low.gather(rng)}, layer=layer, first=first)


def _dropped(low: Lowering, x: View, p: float, more: dict[str, Value], **attrs: Any) -> View:
    x = low.views.owned(x)
    value = x.value
    mask = {"mask": (value.shape, value.dtype)} if attrs.pop("mask", False) else {}
    node = low.graph.node(
        "dropout", {"x": value, **more}, {"y": (value.shape, value.dtype), **mask}, p=p, **attrs
    )
    return View(node.out, x.dims)
