"""Places of gradients: each is written by the launch that computes it, into memory that exists
already. Casts, reshapes and concatenations between the two in the trace become views of the place.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.flat_parameters import are_neighbours, over_neighbours
from ..graph import Graph, Node, Value

EMB = "emb"  # the name of the gradient of the blocks' parts of the embedding, side by side
_WRITERS = {  # of ops that write to a place: the results that they can write
    "conv_dw": ("y",),
    "linear_dw": ("y",),
    "bias_grad": ("y",),
    "norm_grad_table": ("weight", "bias", "input_bias", "emb", "scale", "shift"),
    "norm_backward": ("weight", "bias", "input_bias", "emb", "scale", "shift"),
    "skip_backward": ("weight", "bias"),
}


@dataclass(frozen=True)
class Place:
    """Part of a gradient's memory."""

    name: str  # of the gradient
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...] = ()  # axis, start, stop of each narrowing
    others: tuple[str, ...] = ()  # gradients behind it, whose rows, with gaps, are of it too

    @property
    def names(self) -> tuple[str, ...]:
        """Of all gradients that are in it."""
        return self.name, *self.others

    def of(self, whole: Tensor) -> Tensor:
        """The view of the gradient."""
        if self.others:
            return over_neighbours(whole, self.shape)
        for axis, start, stop in self.parts:
            whole = whole.narrow(axis, start, stop - start)
        return whole if whole.shape == self.shape else whole.view(self.shape)


def place(graph: Graph, grads: dict[Value, Place]) -> dict[Value, Place]:
    """Let the nodes that make these gradients write them in place; the place of each value that is
    one. The graph's backward nodes lose what stands in between."""
    producers, readers = graph.producers(), graph.consumers()
    placed: dict[Value, Place] = {}
    gone: set[Node] = set()
    added: dict[Node | None, list[Node]] = {}

    def follow(value: Value, at: Place) -> None:
        node = producers.get(value)
        if node is None or value in placed:
            return copy(value, at)
        read = [r for r in readers.get(value, ()) if r is not None and r not in gone]
        if node.op in ("cast", "reshape", "cat") and read:
            return copy(value, at)
        if node.op in ("cast", "reshape"):
            gone.add(node)
            x = node.inputs["x"]
            return follow(x, Place(at.name, x.shape, at.parts))
        if node.op == "cat" and not at.parts:
            gone.add(node)
            start, axis = 0, node.attrs["axis"]
            for part in node.many("x"):
                stop = start + part.shape[axis]
                follow(part, Place(at.name, part.shape, ((axis, start, stop),)))
                start = stop
            return None
        role = next(r for r, v in node.outputs.items() if v is value)
        if role not in _WRITERS.get(node.op, ()):
            return copy(value, at)
        placed[value] = at
        return None

    def copy(value: Value, at: Place) -> None:
        made = graph.new("accumulate", {"x": value}, {"y": (value.shape, value.dtype)})
        made.attrs["writes"] = at.name == EMB  # whose memory is new
        placed[made.out] = at
        added.setdefault(producers.get(value), []).append(made)

    for value, at in grads.items():
        follow(value, at)
    nodes = [*added.pop(None, ())]
    for node in graph.nodes:
        if node not in gone:
            nodes.append(node)
        nodes += added.pop(node, ())
    graph.nodes = nodes
    return placed


def place_weights(
    graph: Graph, grads: dict[Value, Value], flat: Mapping[str, Tensor]
) -> dict[Value, Place]:
    """Let weight gradients be written where `flat` has them, by the names of parameters: those in
    the memory order of the kernels that nobody else reads. `grads`, by parameter, then names what
    the launches make. Other gradients stay tensors of their own."""
    producers, readers = graph.producers(), graph.consumers()
    placed = _place_stacked(graph, grads, flat)
    results = list(grads.values())
    gone: set[Node] = set()
    for name, parameter in graph.parameters.items():
        x, passed = grads.get(parameter), []
        if x is None or results.count(x) > 1 or readers.get(x):
            continue
        while (node := producers.get(x)) is not None and node.op in ("cast", "reshape"):
            if any(reader is not node for reader in readers.get(node.inputs["x"], ())):
                break
            passed.append(node)
            x = node.inputs["x"]
        if node is None or node.op not in ("conv_dw", "linear_dw"):
            continue
        square = node.keeps_size or len(set(node.attrs.get("stride", ()))) == 1
        at = Place(name, x.shape)
        if square and _is_of_kernels(flat.get(name), x.shape):
            placed[x] = at
            grads[parameter] = x
            gone.update(passed)
    graph.nodes = [node for node in graph.nodes if node not in gone]
    return placed


def _place_stacked(
    graph: Graph, grads: dict[Value, Value], flat: Mapping[str, Tensor]
) -> dict[Value, Place]:
    """Likewise of one product whose rows are the gradients of several parameters."""
    readers = graph.consumers()
    by_result = {x: (name, p) for name, p in graph.parameters.items() if (x := grads.get(p))}
    placed: dict[Value, Place] = {}
    gone: set[Node] = set()

    def parts_of(x: Value, axis: int) -> list[Node]:
        """The readers of a value, if all of them cut it along this axis."""
        found = readers.get(x, [])
        kinds = {None if r is None else (r.op, r.attrs.get("axis", axis)) for r in found}
        if not kinds <= {("slice", axis), *([("columns", axis)] if axis else [])}:
            return []
        return sorted(found, key=lambda r: r.attrs["start"])

    for node in graph.nodes:
        if node.op != "linear_dw":
            continue
        whole = parts_of(node.out, 1)  # without the zeros behind rows
        if len(whole) > 1 or whole and whole[0].attrs["start"]:
            continue
        parts = parts_of(whole[0].out if whole else node.out, 0)
        ends = [part.attrs["stop"] for part in parts]
        if [part.attrs["start"] for part in parts] != [0, *ends][:-1] or len(parts) < 2:
            continue
        results = [part.out for part in parts]
        if any(x not in by_result or readers.get(x) for x in results):
            continue
        names = [by_result[x][0] for x in results]
        if _are_rows(flat, names, node.out.shape):  # then they are all of its rows
            placed[node.out] = Place(names[0], node.out.shape, others=tuple(names[1:]))
            grads |= {by_result[x][1]: node.out for x in results}
            gone.update(whole, parts)
    graph.nodes = [node for node in graph.nodes if node not in gone]
    return placed


def low_parameters(
    graph: Graph, names: Mapping[Value, str], flat: Mapping[str, Tensor]
) -> dict[Value, Place]:
    """Casts of parameters that `flat` has already, in the memory order of the kernels, and those of
    several, side by side, with zeros behind their rows. Their nodes go."""
    found, nodes = _low_stacked(graph, names, flat), []
    for node in graph.nodes:
        x = node.inputs.get("x")
        low = flat.get(names[x]) if node.op == "cast" and x in names else None
        is_there = low is not None and low.dtype == node.out.dtype and x.shape == node.out.shape
        if is_there and _is_of_kernels(low, x.shape):
            found[node.out] = Place(names[x], x.shape)
        else:
            nodes.append(node)
    graph.nodes = nodes
    return found


def _low_stacked(
    graph: Graph, names: Mapping[Value, str], flat: Mapping[str, Tensor]
) -> dict[Value, Place]:
    """Those of several."""
    found: dict[Value, Place] = {}
    makers, readers = graph.producers(), graph.consumers()
    made: list[Node] = []
    gone: set[Node] = set()
    for node in graph.nodes:
        cat = makers.get(node.inputs["x"]) if node.op == "pad" else node
        before = any(start for start, _ in node.attrs.get("pads", ()))
        if cat is None or cat.op != "cat" or cat.attrs["axis"] or before:
            continue
        casts = [makers.get(part) for part in cat.many("x")]
        if any(n is None or n.op != "cast" or n.inputs["x"] not in names for n in casts):
            continue
        its = [names[n.inputs["x"]] for n in casts]
        if _are_rows(flat, its, node.out.shape) and flat[its[0]].dtype == node.out.dtype:
            found[node.out] = Place(its[0], node.out.shape, others=tuple(its[1:]))
            made += [node, *casts] if cat is node else [node, cat, *casts]
    for node in made:  # readers before what they read
        if node.out in found or all(r in gone for r in readers.get(node.out, [None])):
            gone.add(node)
    graph.nodes = [node for node in graph.nodes if node not in gone]
    return found


def _are_rows(flat: Mapping[str, Tensor], names: list[str], shape: tuple[int, ...]) -> bool:
    """Whether rows of such a shape are those of these, one after the other."""
    if len(shape) != 2 or not all(name in flat and flat[name].ndim == 2 for name in names):
        return False
    rows = sum(len(flat[name]) for name in names)
    steps = rows, flat[names[0]].stride(0)
    return shape == steps and are_neighbours(flat, names)


def _is_of_kernels(x: Tensor | None, shape: tuple[int, ...]) -> bool:
    """Whether filters of this shape are in [CO, R, S, CI] memory."""
    if x is None or not 2 <= len(shape) <= 4:
        return False
    try:
        filters = x if x.shape == shape else x.view(shape)
    except RuntimeError:  # no view has that shape
        return False
    return filters.movedim(1, -1).is_contiguous() and x.dtype != torch.float64
