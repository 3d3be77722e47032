"""Linear attention that a module writes itself, as two products behind two softmaxes, is one op.

    softmax_d(q) (softmax_s(k)^T v)         d: channels of a head, s: positions

PyTorch would write both softmaxes, and turn each of the three around its product. Of keys and
values the first may be a memory that all samples share, as denoising-diffusion-pytorch has it. What
is multiplied with a number on the way counts in the op's scale.
"""

import math
from dataclasses import dataclass

from triton_kernels.attention.linear import MOST_MEMORY, MOST_WIDE

from ..graph import Makers, Value
from ..views import View, merged, strides, turned, whole
from .layers import of_samples, packed
from .sources import source
from .table import Lowering


@dataclass(frozen=True)
class _Part:
    """A tensor [N, heads, T, d] of the image, and in front of its positions a memory."""

    image: View
    memory: Value | None  # [M, C]


def linear_attention(low: Lowering, a: View, b: View) -> View | None:
    """a b [..., T, d] [..., d, e], if it is what linear attention ends with; None: it is not."""
    lead = a.shape[:-2]
    if not low.softmaxes or not lead or b.shape[:-2] != lead:
        return None
    makers = low.graph.producers()
    # softmax(q) context, or both turned
    for q, context, ahead in ((a, b, True), (turned(b), turned(a), False)):
        flat = _flat(q), _flat(context)
        y = None if None in flat else _of_context(low, *flat, makers)
        y = None if y is None else y.reshape((*lead, *y.shape[1:]))
        if y is not None:
            return y if ahead else turned(y)
    return None


def _flat(x: View) -> View | None:
    """[..., T, d] as [B, T, d], as it lies."""
    return x.reshape((math.prod(x.shape[:-2]), *x.shape[-2:]))


def _of_context(low: Lowering, q: View, context: View, makers: Makers) -> View | None:
    value, number = _multiplied(context.value, makers)
    if value not in low.products or number <= 0:
        return None
    *both, alpha = low.products[value]
    k, v = map(_flat, both)
    if k is None or v is None or k.shape[0] != q.shape[0]:
        return None
    square = whole(value, (k.shape[0], k.shape[1], v.shape[2]))
    if context.dims == square.dims:  # k^T [B, d, S] v [B, S, e]
        k = turned(k)
    elif context.dims == turned(square).dims:  # v^T [B, e, S] k [B, S, d]
        k, v = v, turned(k)
    else:
        return None
    if context.offset or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        return None
    found = [_normalised(low, x, along, makers) for x, along in ((q, 2), (k, 1))]
    if None in found:
        return None
    (q, of_q), (k, of_k) = found
    value, of_v = _multiplied(v.value, makers)
    v, scale = View(value, v.dims, v.offset), number * alpha * of_q * of_k * of_v
    parts = [_part(low, x, q.shape[1], makers) for x in (q, k, v)]
    if None in parts or not 0 < scale < math.inf or parts[0].memory is not None:
        return None
    return _made(low, parts, scale, q.shape)


def _made(low: Lowering, parts: list[_Part], scale: float, shape: tuple) -> View | None:
    """[B, T, d]"""
    images, memory = [p.image for p in parts], [p.memory for p in parts[1:]]
    n, heads, t, d = images[0].shape
    dtype = low.meta.dtype
    alike = all(x.shape == images[0].shape and x.value.dtype == dtype for x in images)
    if not alike or d > MOST_WIDE or (memory[0] is None) != (memory[1] is None):
        return None
    if memory[0] is not None:
        if memory[0].shape != memory[1].shape or memory[0].shape[0] > MOST_MEMORY:
            return None
    order = packed(tuple(images))
    if order is None:
        joined = (x.permute((0, 2, 1, 3)).reshape((n, t, heads * d)) for x in images)
        inputs = {role: low.gather(x) for role, x in zip("qkv", joined, strict=True)}
        lead = (n, t)
    else:
        value = of_samples(low, images[0].value, n)
        inputs, lead = {"qkv": value}, value.shape[:-1]
    inputs |= {"memory_k": memory[0], "memory_v": memory[1]}
    attrs = {"heads": heads, "scale": scale} | ({} if order is None else {"order": order})
    y = low.make("linear_attention", inputs, (*lead, heads * d), dtype, **attrs)
    return whole(y, (n, t, heads, d)).permute((0, 2, 1, 3)).reshape(shape)


def _normalised(low: Lowering, x: View, along: int, makers: Makers) -> tuple[View, float] | None:
    """Of which tensor x [B, ..., ...] is a softmax along this dimension, times a number."""
    value, number = _multiplied(x.value, makers)
    if value not in low.softmaxes:
        return None
    of, axis = low.softmaxes[value]
    if x.dims[along] != merged(((of.shape[axis], strides(of.shape)[axis]),)):
        return None
    return View(makers.behind(of, "cast"), x.dims, x.offset), number


def _multiplied(value: Value, makers: Makers) -> tuple[Value, float]:
    """What it is made of by casts and products with numbers, and their product."""
    value, number = makers.behind(value, "cast"), 1.0
    while (node := makers.of(value, "affine")) and node.attrs["offset"] == 0:
        number *= node.attrs["scale"]
        value = makers.behind(node.inputs["x"], "cast")
    return value, number


def _part(low: Lowering, x: View, t: int, makers: Makers) -> _Part | None:
    """x [B, S, d] as [N, heads, T, d] of what the module had before it was put behind a memory,
    copied and widened."""
    node, memory = makers.of(x.value, "cat"), None
    if node is not None and x.shape[1] > t:
        kept, image = node.many("x")[:2]
        if len(node.many("x")) != 2 or image.shape[node.attrs["axis"]] != t:
            return None
        memory = _shared(low, kept, x, makers)
        moved = _in(x, node.out.shape, image.shape)
        if memory is None or moved is None:
            return None
        x = View(image, moved)
    if x.shape[1] != t:
        return None
    lead = _by_heads(x)
    return None if lead is None else _Part(source(lead, makers, "cast"), memory)


def _in(x: View, shape: tuple[int, ...], part: tuple[int, ...]) -> tuple | None:
    """The dimensions of a view of all of a tensor, in a tensor that is shorter along an axis."""
    sizes = {step: n for n, step in zip(shape, strides(shape), strict=True) if n > 1}
    new = dict(zip(strides(shape), zip(part, strides(part), strict=True), strict=True))
    if x.offset or any(sizes.get(step) != n for n, step in x.pieces):
        return None
    return tuple(tuple(new[step] for _, step in dim) for dim in x.dims)


def _shared(low: Lowering, kept: Value, x: View, makers: Makers) -> Value | None:
    """A memory [N, M, heads, d] that is the same for all samples, as [M, C]."""
    node = makers.of(kept, "layout")
    n, m, *heads = kept.shape
    if len(heads) != 2 or x.dims[1:] != whole(x.value).dims[1::2]:
        return None
    rows = (m, math.prod(heads))
    if n == 1:
        return low.gather(whole(kept), rows)
    if node is None or node.attrs["pieces"][0] != (n, 0):
        return None
    attrs = {"pieces": node.attrs["pieces"][1:], "offset": node.attrs["offset"]}
    return low.make("layout", {"x": node.inputs["x"]}, rows, kept.dtype, **attrs)


def _by_heads(x: View) -> View | None:
    """[B, T, d] as [N, heads, T, d], as it lies: samples are outermost in memory."""
    n = x.value.shape[0]
    return None if x.shape[0] % n else x.reshape((n, x.shape[0] // n, *x.shape[1:]))
