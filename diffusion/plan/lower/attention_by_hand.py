"""Attention that a module writes itself, as two products around a softmax, is one op.

PyTorch would write the scores of all queries and keys to memory, several times. So products and
softmaxes are remembered while a module is lowered, and a product with what a softmax made of
another is `attention` of the views that the module has multiplied:

    softmax(scale a b + c) v,  c constant along the softmax's axis: minus the largest score, or none

Whatever else is done to the scores, such as to add a bias, leaves all of them PyTorch's calls.
"""

import math
from dataclasses import dataclass

import torch

from ..graph import Makers, Node, Value, made_of
from ..views import View, merged, refined, turned
from .arithmetic import arithmetic
from .layers import attention, product_of_layer
from .linear_attention import linear_attention
from .sources import source
from .table import Lowering, lowers

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class _Scores:
    """scale q k^T, of q [..., T, d] and k [..., S, d], and which axis of it is of the keys."""

    q: View
    k: View
    scale: float
    dtype: torch.dtype  # of the product
    keys_last: bool  # in memory; else the queries are


@lowers("mm", "matmul", "bmm")
def _product(low, a, b):
    weight = _weight(low, b)
    if weight is not None and a.shape[:-1] == low.meta.shape[:-1]:
        return product_of_layer(low, a, weight)
    weight = _weight(low, turned(a)) if len(a.dims) > 1 and len(b.dims) > 1 else None
    if weight is not None and b.shape[:-2] == low.meta.shape[:-2]:
        return turned(product_of_layer(low, turned(b), weight))
    if len(b.dims) == 2:
        return product_of_layer(low, a, b)
    return _of_two(low, a, b)


def _weight(low: Lowering, x: View) -> View | None:
    """The matrix that x [..., M, N] is for every element of a batch, if it is made of parameters
    alone."""
    if len(x.dims) < 2 or any(step for dim in x.dims[:-2] for _, step in dim):
        return None
    parameters = low.graph.parameters.values()
    made = {v for n in made_of(parameters, low.graph.nodes) for v in n.outputs.values()}
    return View(x.value, x.dims[-2:], x.offset) if x.value in made.union(parameters) else None


@lowers("baddbmm")
def _baddbmm(low, start, a, b, *, beta=1, alpha=1):
    if beta != 0:
        return arithmetic(low, start, a, b, beta=beta, alpha=alpha)
    y = arithmetic(low, start, a, b, beta=beta, alpha=alpha)
    low.products[y.value] = a, b, alpha
    return y


def _of_two(low: Lowering, a: View, b: View) -> View:
    """a [..., M, K] b [..., K, N]: PyTorch's, or what attention ends with."""
    for p, v, ahead in ((a, b, True), (b, a, False)):
        y = _attention(low, p, v, ahead) if a.shape[:-2] == b.shape[:-2] else None
        if y is not None:
            return y
    y = linear_attention(low, a, b)
    if y is not None:
        return y
    a, b = (View(low.cast(x.value, low.meta.dtype), x.dims, x.offset) for x in (a, b))
    y = arithmetic(low, a, b)
    low.products[y.value] = a, b, 1
    return y


def _attention(low: Lowering, p: View, v: View, ahead: bool) -> View | None:
    """p v, or v p, if p is a softmax over the keys of scores; None: it is none."""
    if not low.softmaxes:
        return None
    makers = low.graph.producers()
    value = makers.behind(p.value, "cast")
    scores = _scores(low, value, makers) if value in low.softmaxes else None
    if scores is None or not 0 < scores.scale < math.inf:
        return None
    # [B, T, S] of p v, [B, S, T] of v p
    p, v = _keys_in_order(*((p, v) if ahead else (turned(p), turned(v))))
    t, s, count = scores.q.shape[-2], scores.k.shape[-2], math.prod(p.shape[:-2])
    dims = ((s, 1), (t, s)) if scores.keys_last else ((s, t), (t, 1))
    expected = ((count, t * s), dims[1], dims[0])
    flat = p.reshape((count, t, s)) if p.shape[-2:] == (t, s) else None
    if flat is None or flat.offset or flat.dims != tuple(merged((d,)) for d in expected):
        return None
    if not scores.q.shape[:-2] == scores.k.shape[:-2] or math.prod(scores.q.shape[:-2]) != count:
        return None
    parts = [_narrow(low, x, makers) for x in (scores.q, scores.k, v)]
    *parts[:2], scale = _scaled(*parts[:2], scores.scale, makers)
    dtype = low.meta.dtype
    exact = all(x.value.dtype == dtype for x in parts[:2]) or scores.dtype == dtype
    if parts[1].shape[-1] != parts[2].shape[-1] or not exact:
        return None
    parts = _by_heads(parts)
    if parts is None:
        return None
    parts = [source(x, makers) for x in parts]
    y = attention(low, *parts, scale=scale)
    y = y.reshape((*p.shape[:-2], t, v.shape[-1]))
    if y is None:
        return None
    return y if ahead else turned(y)


def _keys_in_order(p: View, v: View) -> tuple[View, View]:
    """p [..., S] v [..., S, d] with keys as they lie in p: of images einsum takes columns before
    rows, of both."""
    cuts = refined(p.dims[-1], v.dims[-2])
    if cuts is None:
        return p, v
    cuts.sort(key=lambda cut: -cut[1])
    of_p, of_v = (merged(tuple((cut[0], cut[at]) for cut in cuts)) for at in (1, 2))
    dims = (*v.dims[:-2], of_v, v.dims[-1])
    return View(p.value, (*p.dims[:-1], of_p), p.offset), View(v.value, dims, v.offset)


def _scores(low: Lowering, softmax: Value, makers: Makers) -> _Scores | None:
    """Of which product it is a softmax."""
    value, axis = low.softmaxes[softmax]
    size, behind = softmax.shape[axis], math.prod(softmax.shape[axis + 1 :])
    scale = 1.0
    while value not in low.products:
        node = makers.get(value)
        if node is None:
            return None
        if node.op == "affine":  # whose offset a softmax does not see
            scale *= node.attrs["scale"]
        elif not (node.op == "reshape" or node.widens or _less_largest(node, behind, makers)):
            return None
        value = node.inputs["a" if node.op == "add" else "x"]
    a, b, alpha = low.products[value]
    m, n = a.shape[-2], b.shape[-1]
    scale *= alpha
    if (size, behind) == (n, 1):
        return _Scores(*_scaled(a, turned(b), scale, makers), value.dtype, True)
    if (size, behind) == (m, n):
        return _Scores(*_scaled(turned(b), a, scale, makers), value.dtype, False)
    return None


def _scaled(q: View, k: View, scale: float, makers: Makers) -> tuple[View, View, float]:
    """Both without the numbers that they are multiplied with."""
    found = []
    for x in (q, k):
        while (node := makers.of(x.value, "affine")) and node.attrs["offset"] == 0:
            scale *= node.attrs["scale"]
            x = View(node.inputs["x"], x.dims, x.offset)
        found.append(x)
    return *found, scale


def _less_largest(node: Node, behind: int, makers: Makers) -> bool:
    """Whether it is scores less their largest along the softmax's axis, `behind` which there are so
    many elements: a softmax does not see that."""
    if node.op != "add":
        return False
    less = makers.of(makers.behind(node.inputs["b"], "reshape"), "affine")
    if less is None or less.attrs != {"scale": -1, "offset": 0}:
        return False
    most = makers.get(makers.behind(less.inputs["x"], "reshape", "detach"))
    if most is None or most.attrs.get("target") != _ATEN.amax.default:
        return False
    (_, axes), x = most.attrs["arguments"][1], most.inputs["x0"]
    along = len(axes) == 1 and math.prod(x.shape[axes[0] + 1 :]) == behind
    a, b = (makers.behind(v, "reshape") for v in (x, node.inputs["a"]))
    return along and a is b


def _narrow(low: Lowering, x: View, makers: Makers) -> View:
    """Without casts from the dtype of the result, there and back, which lose nothing."""
    value, dtype, found = x.value, low.meta.dtype, x.value
    while (cast := makers.of(value, "cast")) is not None:
        value = cast.inputs["x"]
        if torch.promote_types(value.dtype, dtype) != value.dtype:
            break  # it was rounded on the way
        found = value if value.dtype == dtype else found
    return View(found, x.dims, x.offset)


def _by_heads(parts: list[View]) -> list[View] | None:
    """Views [..., T, d] as [N, heads, T, d]: as they lie, where the module has both as one."""
    lead = parts[0].shape[:-2]
    if len(lead) != 2:
        ahead = (merged(sum(x.dims[:-2], ())) for x in parts)
        heads = next((pieces[1][0] for pieces in ahead if len(pieces) == 2), 1)
        lead = math.prod(lead) // heads, heads
    found = [x.reshape((*lead, *x.shape[-2:])) for x in parts]
    return None if None in found else found
