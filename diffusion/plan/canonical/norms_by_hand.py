"""Norms over channels that a module writes itself, as a reduction and arithmetic, are one node.

PyTorch would read and write the image several times. What is looked for is a quotient by a root of
the mean square over the last axis of x or axes, or by what such a root becomes with eps, or the
product with its reciprocal:

    x / sqrt(mean(x^2) + eps)        RMSNorm, and LayerNorm of x - mean(x); also of var(x)
    x / max(|x|, eps)                F.normalize
    x / (|x| + eps)

in whatever form: |x| as a vector's norm or as the root of a sum of squares, each with numbers that
are multiplied, and casts on the way; also where a vector is multiplied first, x (g / root). Numbers
and vectors of channels that the result is multiplied with, FiLM and the activation are taken into
the node by `canonical`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..graph import Graph, Makers, Node, Value, row_beside, rows_beside

_ATEN = torch.ops.aten


def channel_norm_attributes(
    eps: float, *, centred: bool = False, eps_in: str = "root", factor: float = 1.0
) -> dict[str, Any]:
    """Of a node `channel_norm` without an activation."""
    how = {"eps": eps, "centred": centred, "eps_in": eps_in, "factor": factor}
    return how | {"activation": "identity"}


def find_norms(graph: Graph) -> None:
    """Replace each such product by a node, in place; what is then not read is left."""
    _gains_last(graph)
    makers = graph.producers()
    nodes, graph.nodes = graph.nodes, []
    for node in nodes:
        found = _norm_of(node, makers)
        if found is None:
            graph.nodes.append(node)
        else:
            graph.source = node.source
            _put(graph, node, *found)
            makers |= {v: n for n in graph.nodes[-3:] for v in n.outputs.values()}
    graph.source = ""


def _gains_last(graph: Graph) -> None:
    """x (g / root) is (x / root) g, as k-diffusion has it the other way around."""
    makers = graph.producers()
    for node, x, product in list(graph.products()):
        factors, shape = _factors(product, x, makers)
        if factors is None or node.out.shape != x.shape:
            continue
        for gain, root in (("a", "b"), ("b", "a")):
            found = _gain_last(graph, node, x, factors.inputs[gain], factors.inputs[root], shape)
            if found:
                at = graph.nodes.index(node)
                graph.nodes[at : at + 1] = found
                makers = graph.producers()
                break


def _factors(product: Value, x: Value, makers: Makers) -> tuple[Node | None, tuple[int, ...]]:
    """The product that this is, and the shape of x beside it: of a gain of channels, or of one
    number for each row, such as for those of a head."""
    node = _maker(product, makers)
    if node is not None and node.op == "mul":
        return node, node.out.shape
    over = _of_each_row(product, x, makers)
    node = None if over is None else _maker(over, makers)
    if node is None or node.op != "mul" or over.shape[-1:] != (1,):
        return None, ()
    return node, (*over.shape[:-1], x.numel // over.numel)


def _gain_last(
    graph: Graph, node: Node, x: Value, gain: Value, root: Value, shape: tuple[int, ...]
) -> list[Node]:
    """What computes the node's value as the norm of x in this shape times the gain; none, if it
    is no norm."""
    makers, dtype, nodes = graph.producers(), node.out.dtype, []

    def made(op: str, inputs: dict[str, Value], *like: Any) -> Value:
        """In a shape and dtype, which a value may have already."""
        start = next(iter(inputs.values()))
        if len(inputs) > 1 or (start.shape, start.dtype) != like:
            nodes.append(graph.new(op, inputs, {"y": like}, node.source))
            makers[nodes[-1].out] = nodes[-1]
            return nodes[-1].out
        return start

    rows = made("reshape", {"x": x}, shape, x.dtype)
    normed = made("mul", {"a": rows, "b": root}, shape, dtype)
    if _norm_of(makers[normed], makers) is None:
        return []
    gain, like = _not_repeated(gain, makers)
    gain = made("cast", {"x": made("reshape", {"x": gain}, like, gain.dtype)}, like, dtype)
    product = made("mul", {"a": normed, "b": gain}, shape, dtype)
    last = made("reshape", {"x": product}, node.out.shape, dtype)
    makers[last].outputs = {"y": node.out}
    return nodes


def _not_repeated(g: Value, makers: Makers) -> tuple[Value, tuple[int, ...]]:
    """The vector, or the vector of each sample, that g repeats for all rows, and a shape in which
    PyTorch would; or g."""
    copies = makers.of(g, "layout")
    if copies is None or copies.attrs["offset"]:
        return g, g.shape
    (*_, c), n, x = g.shape, g.shape[0], copies.inputs["x"]
    for shape, pieces in (
        (row_beside(g.shape), ((g.numel // c, 0), (c, 1))),
        (rows_beside(g.shape), ((n, c), (g.numel // (n * c), 0), (c, 1))),
    ):
        if copies.attrs["pieces"] == pieces and x.numel == math.prod(shape):
            return x, shape
    return g, g.shape


def _put(graph: Graph, product: Node, x: Value, width: int, attrs: dict[str, Any]) -> None:
    """What makes the product's value: of rows that are so wide."""
    y, shape = product.out, x.shape
    if x.shape[-1] != width:
        lead = _lead(shape, width)
        last = (shape[-1] // width,) if lead is None else ()
        shape = (*(shape[:-1] if lead is None else lead), *last, width)
    if x.shape != shape:
        x = graph.make("reshape", {"x": x}, shape, x.dtype)
    node = graph.node("channel_norm", {"x": x}, {"y": (shape, y.dtype)}, **attrs)
    if y.shape == shape:
        node.outputs = {"y": y}
    else:
        graph.node("reshape", {"x": node.out}, {"y": (y.shape, y.dtype)}).outputs = {"y": y}


@dataclass(frozen=True)
class _Root:
    """factor times the root of the mean square of x's rows, `squared` if it is its square; x is
    less its mean if it is `centred`. With eps it is what `channel_norm` divides by."""

    x: Value
    width: int  # of a row
    factor: float
    squared: bool = False
    centred: bool = False
    eps: float = 0.0  # of the root itself, not of its multiple
    eps_in: str | None = None  # None: there is none yet

    def times(self, number: float) -> "_Root | None":
        """A multiple of it; None: it is no root of anything."""
        return replace(self, factor=self.factor * number) if number > 0 else None

    def with_eps(self, eps: float, eps_in: str) -> "_Root | None":
        """With a number that is added, or than which it is not smaller."""
        if self.eps_in is not None or eps < 0:
            return None
        return replace(self, eps=eps / self.factor, eps_in=eps_in)


def _lead(shape: tuple[int, ...], width: int) -> tuple[int, ...] | None:
    """The axes in front of those that are so long together; None: there are none."""
    ends = (i for i in reversed(range(len(shape))) if math.prod(shape[i:]) == width)
    return next((shape[:i] for i in ends), None)


def _maker(value: Value, makers: Makers) -> Node | None:
    """The node of a value, or of that which it is in another shape or dtype."""
    return makers.get(makers.behind(value, "reshape", "cast"))


def _same(a: Value, b: Value, makers: Makers) -> bool:
    a, b = (makers.behind(value, "reshape", "cast") for value in (a, b))
    return a is b


def _norm_of(node: Node, makers: Makers) -> tuple | None:
    """x, the width of its rows and attributes of its norm, if the node makes one."""
    quotient = node.op == "arith" and node.attrs["target"] == _ATEN.div.Tensor
    if node.op != "mul" and not (quotient and len(node.inputs) == 2):
        return None
    x, b = node.inputs.values()
    over = _of_each_row(b, x, makers)
    root = None if over is None else (_root if quotient else _reciprocal)(over, makers)
    if root is None or root.squared or not 0 < root.factor < math.inf:
        return None
    less = _less_mean(x, root.width, makers)
    if root.centred:  # of the variance of x: what it divides is x - mean
        if less is None or not _same(less, root.x, makers):
            return None
    elif not _same(x, root.x, makers):
        return None
    if less is not None:
        x = less
    cast = makers.get(x)
    if cast is not None and cast.widens:  # statistics are in float32 of any dtype
        x = cast.inputs["x"]
    fits = x.shape[-1] % root.width == 0 or _lead(x.shape, root.width) is not None
    if not fits or over.numel * root.width != x.numel or not x.dtype.is_floating_point:
        return None
    eps_in = root.eps_in or "root"
    how = {"centred": less is not None, "eps_in": eps_in, "factor": 1 / root.factor}
    return x, root.width, channel_norm_attributes(root.eps, **how)


def _of_each_row(b: Value, x: Value, makers: Makers) -> Value | None:
    """What has a number for each row of x, which b repeats or not, [..., 1], [..., 1, 1], ..."""
    node = makers.of(b, "layout")
    if node is not None and b.shape == x.shape:
        *rest, (_, step) = node.attrs["pieces"]  # several rows of an axis
        count = math.prod(n for n, _ in rest)
        whole = len(rest) == 1 and rest[0][1] == 1 or not rest
        is_all = node.attrs["offset"] == 0 and count == node.inputs["x"].numel
        return node.inputs["x"] if step == 0 and whole and is_all else None
    ends = range(1, len(x.shape) + 1)
    return b if any(b.shape == (*x.shape[:-i], *(1,) * i) for i in ends) else None


def _less_mean(x: Value, width: int, makers: Makers) -> Value | None:
    """y, if x is y less the means of its rows."""
    node = _maker(x, makers)
    lead = None if node is None or node.op != "add" else _lead(node.out.shape, width)
    if lead is None:
        return None
    less = _maker(node.inputs["b"], makers)
    if less is None or less.op != "affine" or less.attrs != {"scale": -1, "offset": 0}:
        return None
    mean = _reduced(less.inputs["x"], makers, _ATEN.mean.dim)
    shape = node.out.shape
    whole = node.inputs["b"].shape == (*lead, *(1,) * (len(shape) - len(lead)))
    y = node.inputs["a"]
    return y if whole and mean is not None and _same(mean, y, makers) else None


# --- roots ----------------------------------------------------------------------------------------


def _reciprocal(value: Value, makers: Makers) -> _Root | None:
    """What this is 1 / of."""
    node = _maker(value, makers)
    if node is None:
        return None
    if node.op == "affine" and node.attrs["offset"] == 0 and node.attrs["scale"] > 0:
        root = _reciprocal(node.inputs["x"], makers)
        return root and root.times(1 / node.attrs["scale"])
    if calls(node, _ATEN.rsqrt.default):
        return _square_root(node.inputs["x0"], makers)
    if calls(node, _ATEN.reciprocal.default) or calls(node, _ATEN.pow.Tensor_Scalar, -1):
        return _root(node.inputs["x0"], makers)
    if calls(node, _ATEN.pow.Tensor_Scalar, -0.5):
        return _square_root(node.inputs["x0"], makers)
    return None


def _root(value: Value, makers: Makers) -> _Root | None:
    """The root that this is, with eps or without, or the mean square."""
    node = _maker(value, makers)
    if node is None:
        return None
    if node.op == "affine":
        root = _root(node.inputs["x"], makers)
        root = root and root.times(node.attrs["scale"])
        offset = node.attrs["offset"]
        return root.with_eps(offset, "sum") if root and offset else root
    if node.op == "mul":
        return _mean_square(value, makers)
    if node.op != "arith":
        return None
    if least := _least(node):
        root = _root(node.inputs["x0"], makers)
        return root and not root.squared and root.with_eps(least, "max") or None
    if calls(node, _ATEN.sqrt.default) or calls(node, _ATEN.pow.Tensor_Scalar, 0.5):
        return _square_root(node.inputs["x0"], makers)
    if (x := _reduced(value, makers, _ATEN.linalg_vector_norm.default)) is not None:
        length = _row_length(node)
        return _Root(x, length, math.sqrt(length))
    return _mean_square(value, makers)


def _square_root(value: Value, makers: Makers) -> _Root | None:
    square = _root(value, makers)
    if square is None or not square.squared or square.eps_in == "max":
        return None
    eps_in = square.eps_in and "root"
    return replace(square, factor=math.sqrt(square.factor), squared=False, eps_in=eps_in)


def _mean_square(value: Value, makers: Makers) -> _Root | None:
    node = _maker(value, makers)
    if (x := _reduced(value, makers, _ATEN.var.correction)) is not None:
        given = dict(node.attrs["options"])
        biased = given.get("correction", 1) == 0 or given.get("unbiased") is False
        return _Root(x, _row_length(node), 1.0, True, centred=True) if biased else None
    for target, is_mean in ((_ATEN.mean.dim, True), (_ATEN.sum.dim_IntList, False)):
        squares = _reduced(value, makers, target)
        x = None if squares is None else _squared(squares, makers)
        if x is not None:
            length = _row_length(node)
            return _Root(x, length, 1.0 if is_mean else float(length), True)
    return None


def _squared(value: Value, makers: Makers) -> Value | None:
    node = _maker(value, makers)
    if node is None:
        return None
    if node.op == "mul" and _same(node.inputs["a"], node.inputs["b"], makers):
        return node.inputs["a"]
    return node.inputs["x0"] if calls(node, _ATEN.pow.Tensor_Scalar, 2) else None


# --- calls of PyTorch -----------------------------------------------------------------------------


def calls(node: Node, target: Callable, *numbers: float) -> bool:
    """Whether it is this op of one tensor and these numbers."""
    if node.op != "arith" or node.attrs["target"] != target or node.attrs["options"]:
        return False
    return node.attrs["arguments"] == (0, *(("number", n) for n in numbers))


def _least(node: Node) -> float | None:
    """Below which no element of its result is."""
    a = node.attrs
    target, rest, options = a["target"], a["arguments"][1:], dict(a["options"])
    if target not in (_ATEN.clamp_min.default, _ATEN.clamp.default):
        return None
    numbers = (
        [n for kind, n in rest if kind == "number"]
        if all(isinstance(r, tuple) for r in rest)
        else []
    )
    least, most = ([*numbers, None, None])[:2]
    least, most = options.get("min", least), options.get("max", most)
    return least if most is None and isinstance(least, float | int) else None


def _reduced(value: Value, makers: Makers, target: Callable) -> Value | None:
    """What this has reduced along its last axis or axes, of which it keeps one element."""
    node = _maker(value, makers)
    if node is None or node.op != "arith" or node.attrs["target"] != target:
        return None
    x = node.inputs["x0"]
    numbers = [number for _, number in node.attrs["arguments"][1:]]
    if target is _ATEN.linalg_vector_norm.default and numbers.pop(0) != 2:
        return None
    last = [list(range(i, len(x.shape))) for i in range(len(x.shape))]
    return x if numbers[:1] and numbers[0] in last else None


def _row_length(node: Node) -> int:
    return node.inputs["x0"].numel // node.out.numel
