"""Layers: products, norms, activations, attention, embeddings, dropout."""

import math
from typing import Any

import torch

from ..canonical.norms_by_hand import channel_norm_attributes
from ..graph import Value
from ..views import View, in_order, whole
from .arithmetic import arithmetic
from .table import Lowering, each, lowers

ACTIVATIONS = ("relu", "silu", "gelu", "mish")


def linear_of(
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
    return linear_of(low, x, low.gather(weight), low.gather(bias))


@lowers("addmm")
def _addmm(low, bias, x, weight, *, beta=1, alpha=1):
    if (beta, alpha) != (1, 1) or bias.shape != weight.shape[1:]:
        return arithmetic(low, bias, x, weight, beta=beta, alpha=alpha)
    return linear_of(low, x, low.gather(weight.permute((1, 0))), low.gather(bias))


def product_of_layer(low: Lowering, x: View, weight: View) -> View:
    """x [..., CI] weight [CI, CO]"""
    return linear_of(low, x, low.gather(weight.permute((1, 0))), None)


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
