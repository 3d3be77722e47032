"""The backward pass, as nodes after the forward ones.

`gradients` has a row per op. A value with several readers gets the sum of their gradients;
gradients of slices that together cover a value are concatenated instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from .gradients import GRADIENTS, Part
from .graph import Graph, PlanError, Value, numbered, rows_beside

_WITHOUT = ("detach", "draw")  # what reads these asks for no gradient


@dataclass
class Backward:
    """Where backward begins in the graph's nodes, and with what; and what it makes."""

    start: int  # nodes before it are the forward pass
    seeds: dict[Value, Value] = field(default_factory=dict)  # of each result, its gradient
    grads: dict[Value, Value] = field(default_factory=dict)  # of each value that was asked for
    results: dict[Value, set[Value]] = field(default_factory=dict)  # which of the seeds' reach it


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
        self.sent: dict[Value, list[Value | Part]] = {}
        self.made: dict[tuple, Value] = {}  # sums and casts, each once

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
        shape, dtype = like.shape if shape is None else shape, dtype or like.dtype
        if op != "cast":
            return self.graph.make(op, inputs, shape, dtype, **attrs)
        key = op, inputs["x"], dtype
        if key not in self.made:
            self.made[key] = self.graph.make(op, inputs, shape, dtype)
        return self.made[key]

    def send(self, value: Value | None, grad: Callable[[], Value | Part]) -> None:
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
        parts = [s for s in sent if isinstance(s, Part)]
        whole = [s for s in sent if not isinstance(s, Part)]
        if value in self.producers:
            self.graph.source = self.producers[value].source
        return self._total(value, [*whole, *([self._joined(value, parts)] if parts else ())])

    def _total(self, value: Value, grads: list[Value]) -> Value:
        total, *rest = grads
        for grad in rest:
            total = self.make("add", {"a": total, "b": grad}, value)
        return total

    def _joined(self, value: Value, parts: list[Part]) -> Value:
        axis = parts[0].axis
        parts = sorted(parts, key=lambda p: p.start)
        ends = [0, *(p.stop for p in parts)]
        tile = all(p.axis == axis and p.start == end for p, end in zip(parts, ends, strict=False))
        if tile and ends[-1] == value.shape[axis]:
            inputs = numbered("x", [p.grad for p in parts])
            return self.make("cat", inputs, value, axis=axis)
        return self._total(value, [self._padded(value, p) for p in parts])

    def _padded(self, value: Value, part: Part) -> Value:
        """The gradient of a slice, with zeros for the rest."""
        pads = [(0, 0)] * len(value.shape)
        pads[part.axis] = (part.start, value.shape[part.axis] - part.stop)
        return self.make("pad", {"x": part.grad}, value, pads=tuple(pads))

    def summed(self, dy: Value, shape: tuple[int, ...], dtype) -> Value:
        """dy added up over the axes along which `shape` has length 1."""
        if shape == dy.shape:
            return dy
        axes = tuple(i for i, (n, m) in enumerate(zip(dy.shape, shape, strict=True)) if n != m)
        if len(dy.shape) > 2 and shape == rows_beside(dy.shape):
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
