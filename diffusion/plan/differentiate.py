"""The backward pass, as nodes after the forward ones.

`GRADIENTS` has one entry per op: the gradients of its inputs, given the gradient of its result. A
value with several readers gets the sum of their gradients; gradients of slices that together cover
a value are concatenated instead.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from .graph import PARTS, Graph, PlanError, Value, numbered

GRADIENTS: dict[str, Callable] = {}
_WITHOUT = ("detach", "draw")  # what reads these asks for no gradient


def gradient(*ops: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        GRADIENTS.update(dict.fromkeys(ops, function))
        return function

    return register


@dataclass
class Backward:
    """Where backward begins in the graph's nodes, and with what; and what it makes."""

    start: int  # nodes before it are the forward pass
    seeds: dict[Value, Value] = field(default_factory=dict)  # of each result, its gradient
    grads: dict[Value, Value] = field(default_factory=dict)  # of each value that was asked for
    results: dict[Value, set[Value]] = field(default_factory=dict)  # which of the seeds' reach it


@dataclass(frozen=True)
class _Part:
    """The gradient of a slice."""

    grad: Value
    axis: int
    start: int
    stop: int


def differentiate(graph: Graph, wanted: list[Value]) -> Backward:
    """Append the nodes that make the gradients of `wanted` from those of the graph's results.
    Values that no result depends on get none. PlanError: an op on the way has no gradient."""
    return _Differentiation(graph, wanted).run()


class _Differentiation:
    def __init__(self, graph: Graph, wanted: list[Value]) -> None:
        self.graph, self.wanted = graph, wanted
        self.producers = graph.producers()
        self.needed = set(wanted)  # values on the way from those to a result
        for node in graph.nodes:
            if node.op in _WITHOUT:
                continue
            if any(value in self.needed for value in node.inputs.values()):
                self.needed.update(v for v in node.outputs.values() if v.has_gradients)
        self.sent: dict[Value, list[Value | _Part]] = {}
        self.made: dict[tuple, Value] = {}  # sums, each once

    def results(self, seeds: dict[Value, Value]) -> dict[Value, set[Value]]:
        """Of each value that was asked for, the results that depend on it."""
        found = {value: {value} & set(seeds) for value in self.needed}
        for node in reversed(self.graph.nodes):
            behind = set().union(*(found.get(value, ()) for value in node.outputs.values()))
            if node.op not in _WITHOUT:
                for value in self.needed.intersection(node.inputs.values()):
                    found[value] |= behind
        return {value: found[value] for value in self.wanted}

    def run(self) -> Backward:
        graph, forward = self.graph, list(self.graph.nodes)
        backward = Backward(len(forward))
        for value in graph.outputs:
            if value in self.needed and value not in backward.seeds:
                seed = graph.value(f"d_{value.name}", value.shape, value.dtype)
                backward.seeds[value] = seed
                self.sent.setdefault(value, []).append(seed)
        backward.results = self.results(backward.seeds)
        for node in reversed(forward):
            dy = self.collected(node.out)
            if dy is None:
                continue
            if node.op not in GRADIENTS:
                raise PlanError(f"{node.op} ({node.source}) has no gradient")
            graph.source = node.source
            GRADIENTS[node.op](self, node, dy)
        grads = {value: self.collected(value) for value in self.wanted}
        backward.grads = {value: grad for value, grad in grads.items() if grad is not None}
        graph.source = ""
        return backward

    def make(self, op: str, inputs: dict, like: Value, shape=None, dtype=None, **attrs) -> Value:
        """A node of the backward pass, whose result is like this value but for shape and dtype."""
        shape = like.shape if shape is None else shape
        return self.graph.make(op, inputs, shape, dtype or like.dtype, **attrs)

    def send(self, value: Value | None, grad: Callable[[], Value | _Part]) -> None:
        """Add to a value's gradient, if anybody wants it."""
        if value in self.needed:
            self.sent.setdefault(value, []).append(grad())

    def send_each(self, op: str, inputs: dict, values: dict[str, Value], **attrs) -> None:
        """Add to the gradients of these values what one node makes of them, each under its role, if
        anybody wants one."""
        if self.needed.isdisjoint(values.values()):
            return
        outputs = {role: (value.shape, value.dtype) for role, value in values.items()}
        node = self.graph.node(op, inputs, outputs, **attrs)
        for value, grad in zip(values.values(), node.outputs.values(), strict=True):
            self.send(value, lambda grad=grad: grad)

    def collected(self, value: Value) -> Value | None:
        """All that was sent to a value, as one."""
        sent = self.sent.pop(value, [])
        if not sent:
            return None
        parts = [s for s in sent if isinstance(s, _Part)]
        whole = [s for s in sent if not isinstance(s, _Part)]
        if value in self.producers:
            self.graph.source = self.producers[value].source
        return self._total(value, [*whole, *([self._joined(value, parts)] if parts else ())])

    def _total(self, value: Value, grads: list[Value]) -> Value:
        total, *rest = grads
        for grad in rest:
            total = self.make("add", {"a": total, "b": grad}, value)
        return total

    def _joined(self, value: Value, parts: list[_Part]) -> Value:
        axis = parts[0].axis
        parts = sorted(parts, key=lambda p: p.start)
        ends = [0, *(p.stop for p in parts)]
        tile = all(p.axis == axis and p.start == end for p, end in zip(parts, ends, strict=False))
        if tile and ends[-1] == value.shape[axis]:
            inputs = numbered("x", [p.grad for p in parts])
            return self.make("cat", inputs, value, axis=axis)
        return self._total(value, [self._padded(value, p) for p in parts])

    def _padded(self, value: Value, part: _Part) -> Value:
        """The gradient of a slice, with zeros for the rest."""
        pads = [(0, 0)] * len(value.shape)
        pads[part.axis] = (part.start, value.shape[part.axis] - part.stop)
        return self.make("pad", {"x": part.grad}, value, pads=tuple(pads))

    def summed(self, dy: Value, shape: tuple[int, ...], dtype) -> Value:
        """dy added up over the axes along which `shape` has length 1."""
        if shape == dy.shape:
            return dy
        axes = tuple(i for i, (n, m) in enumerate(zip(dy.shape, shape, strict=True)) if n != m)
        if len(dy.shape) > 2 and shape == (dy.shape[0], *(1 for _ in dy.shape[1:-1]), dy.shape[-1]):
            rows = self.pixel_sums(dy)
            return self.make("reshape", {"x": rows}, rows, shape)
        return self.make("sum", {"x": dy}, dy, shape, dtype, axes=axes)

    def pixel_sums(self, dy: Value) -> Value:
        """dy [N, ..., C] added up over all but images and channels: [N, C]"""
        if len(dy.shape) <= 2:
            return dy
        if ("pixels", dy) not in self.made:
            axes, shape = tuple(range(1, len(dy.shape) - 1)), (dy.shape[0], dy.shape[-1])
            self.made["pixels", dy] = self.make("sum", {"x": dy}, dy, shape, axes=axes)
        return self.made["pixels", dy]

    def channel_sums(self, dy: Value, bias: Value) -> Value:
        """dy added up over all but channels: [C]"""
        if len(dy.shape) == 1:
            return dy
        rows = self.pixel_sums(dy)
        return self.make("sum", {"x": rows}, bias, axes=(0,))


# --- layers ---------------------------------------------------------------------------------------


@gradient("conv", "linear")
def _product(d, node, dy):
    x, weight, bias = (node.inputs.get(role) for role in ("x", "weight", "bias"))
    dw, dx = f"{node.op}_dw", f"{node.op}_dx"
    d.send(bias, lambda: d.channel_sums(dy, bias))
    d.send(weight, lambda: d.make(dw, {"x": x, "dy": dy}, weight, **node.attrs))
    d.send(x, lambda: d.make(dx, {"dy": dy, "weight": weight}, x, **node.attrs))


# of ops of one tensor: op, inputs and attributes of its gradient
_OF_X: dict[str, Callable] = {
    "act": lambda node, dy: ("act_grad", {"dy": dy, "x": node.inputs["x"]}, node.attrs),
    "cast": lambda node, dy: ("cast", {"x": dy}, {}),
    "reshape": lambda node, dy: ("reshape", {"x": dy}, {}),
    "upsample": lambda node, dy: ("sum_pool", {"x": dy}, {"window": node.attrs["factor"]}),
}


@gradient(*_OF_X)
def _of_x(d, node, dy):
    x, (op, inputs, attrs) = node.inputs["x"], _OF_X[node.op](node, dy)
    d.send(x, lambda: d.make(op, inputs, x, **attrs))


@gradient("norm_apply")
def _norm(d, node, dy):
    """All of a norm: its table and its moments send nothing themselves."""
    xs, table = node.many("x"), node.inputs["table"]
    made = d.producers[table]
    film = {r: made.inputs[r] for r in ("weight", "bias", "scale", "shift") if r in made.inputs}
    if not any(value in d.needed for value in (*xs, *film.values())):
        return
    (n, _, c), several = table.shape, numbered("x", xs)
    first = d.graph.node(
        "norm_act_grad",
        {"da": dy, **several, "table": table},
        {"dz": (dy.shape, dy.dtype), "partials": ((n, 1, 2, c), table.dtype)},
        activation=node.attrs["activation"],
    )
    dz, partials = first.outputs.values()
    second = d.graph.node(
        "norm_grad_table",
        {"partials": partials, "table": table, **film},
        {
            "coeff": ((n, 3, c), table.dtype),
            **{role: (value.shape, value.dtype) for role, value in film.items()},
        },
        groups=made.attrs["groups"],
        pixels=math.prod(dy.shape[1:-1]),
    )
    for role, value in film.items():
        d.send(value, lambda role=role: second.outputs[role])
    inputs = {"dz": dz, **several, "coeff": second.outputs["coeff"]}
    d.send_each("norm_dx", inputs, {f"dx{i}": x for i, x in enumerate(xs, 1)})


@gradient("attention")
def _attention(d, node, dy):
    parts = {role: node.inputs[role] for role in PARTS if role in node.inputs}
    if not any(value in d.needed for value in parts.values()):
        return
    first, heads = next(iter(parts.values())), node.attrs["heads"]
    positions = math.prod(first.shape[1:-1])
    state = d.graph.value("attention.state", (first.shape[0], heads, positions), first.exact)
    node.outputs["state"] = state
    inputs = {"dy": dy, "o": node.out, "state": state, **node.inputs}
    d.send_each("attention_grad", inputs, parts, **node.attrs)


# --- between layers -------------------------------------------------------------------------------


@gradient("cat")
def _cat(d, node, dy):
    start, axis = 0, node.attrs["axis"]
    for x in node.many("x"):
        stop = start + x.shape[axis]
        ends = {"axis": axis, "start": start, "stop": stop}
        d.send(x, lambda x=x, ends=ends: d.make("slice", {"x": dy}, x, **ends))
        start = stop


@gradient("slice")
def _slice(d, node, dy):
    d.send(node.inputs["x"], lambda: _Part(dy, **node.attrs))


@gradient("add")
def _add(d, node, dy):
    for role in ("a", "b"):
        x = node.inputs[role]
        d.send(x, lambda x=x: d.summed(dy, x.shape, x.dtype))


@gradient("mul")
def _mul(d, node, dy):
    for role, other in (("a", "b"), ("b", "a")):
        x, factor = node.inputs[role], node.inputs[other]

        def product(x=x, factor=factor) -> Value:
            return d.summed(d.make("mul", {"a": dy, "b": factor}, dy), x.shape, x.dtype)

        d.send(x, product)


@gradient("affine")
def _affine(d, node, dy):
    x, scale = node.inputs["x"], node.attrs["scale"]
    d.send(x, lambda: dy if scale == 1 else d.make("affine", {"x": dy}, x, scale=scale, offset=0))


@gradient("avg_pool")
def _avg_pool(d, node, dy):
    x, (y, z) = node.inputs["x"], node.attrs["window"]

    def grad() -> Value:
        n, p, q, c = dy.shape
        shape = n, p * y, q * z, c
        small = d.make("affine", {"x": dy}, dy, scale=1 / (y * z), offset=0)
        if shape == x.shape:
            return d.make("upsample", {"x": small}, x, factor=(y, z))
        part = d.make("upsample", {"x": small}, x, shape, factor=(y, z))
        pads = ((0, 0), (0, x.shape[1] - p * y), (0, x.shape[2] - q * z), (0, 0))
        return d.make("pad", {"x": part}, x, pads=pads)  # what was left over counts nothing

    d.send(x, grad)


@gradient("pad")
def _pad(d, node, dy):
    x = node.inputs["x"]

    def grad() -> Value:
        part, shape = dy, list(dy.shape)
        for axis, (before, behind) in enumerate(node.attrs["pads"]):
            if before or behind:
                shape[axis] = x.shape[axis]
                ends = {"axis": axis, "start": before, "stop": before + x.shape[axis]}
                part = d.make("slice", {"x": part}, x, tuple(shape), **ends)
        return part

    d.send(x, grad)


@gradient("dropout")
def _dropout(d, node, dy):
    """It is linear: what was dropped is dropped again, by the same draws or by the mask."""
    x, attrs = node.inputs["x"], node.attrs
    if "rng" in node.inputs:
        inputs = {"x": dy, "rng": node.inputs["rng"]}
        d.send(x, lambda: d.make("dropout", inputs, x, **attrs))
    else:
        d.send(x, lambda: d.make("mul", {"a": dy, "b": node.outputs["mask"]}, x))


@gradient("detach", "draw")
def _none(d, node, dy):
    """None, if the value is itself a result."""


@gradient("layout")
def _layout(d, node, dy):
    x, pieces = node.inputs["x"], node.attrs["pieces"]

    def grad() -> Value:
        if x.numel != dy.numel or any(step == 0 for _, step in pieces):
            return d.make("layout_grad", {"dy": dy}, x, **node.attrs)
        steps, step = [], 1  # a permutation: the way back is one, too
        for size, place in reversed(pieces):
            steps.append((place, size, step))
            step *= size
        back = tuple((size, step) for place, size, step in sorted(steps, key=lambda s: -s[0]))
        return d.make("layout", {"x": dy}, x, pieces=back, offset=0)

    d.send(x, grad)


@gradient("embedding")
def _embedding(d, node, dy):
    weight, index = node.inputs["weight"], node.inputs["index"]
    inputs = {"dy": dy, "index": index}
    d.send(weight, lambda: d.make("embedding_grad", inputs, weight, **node.attrs))


@gradient("arith")
def _arith(d, node, dy):
    of = {i: x for i, x in enumerate(node.many("x")) if x in d.needed}
    values = {f"d{i}": x for i, x in of.items()}
    d.send_each("arith_grad", {**node.inputs, "dy": dy}, values, of=list(of), **node.attrs)


@gradient("layer_norm")
def _layer_norm(d, node, dy):
    given = {r: v for r, v in node.inputs.items() if v in d.needed}
    stats = {role: node.outputs[role] for role in ("mean", "rstd")}
    d.send_each("layer_norm_grad", {**node.inputs, **stats, "dy": dy}, given, **node.attrs)
