"""The table from PyTorch's ops to nodes of the graph: what a trace may contain.

A lowering gets views (`views`) of the op's tensors, and returns views of its results. An op that
only changes a view (permute, view, expand, split, ...) makes no node. For an op that is not in the
table, `trace` raises PlanError with its line.

The parameters of a lowering are the arguments of the op that it understands: positional ones in the
order of the op's schema, keyword ones by name. `understood` refuses every other argument that is
not at its default.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph, PlanError, Value
from ..views import View, Views

LOWERINGS: dict[str, Callable] = {}
_MOST = 2**63 - 1  # of int64
_KNOWN: dict[Callable, tuple[str, ...]] = {}


def lowers(*names: str, known: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """Decorator of the lowering of these ops of aten; of arguments that are `known` the trace's
    result has the answer."""

    def register(function: Callable) -> Callable:
        LOWERINGS.update(dict.fromkeys(names, function))
        _KNOWN[function] = known
        return function

    return register


class Lowering:
    """The graph as far as it is, and the call that is being lowered."""

    def __init__(
        self,
        graph: Graph,
        differentiable: bool = True,  # False: no gradients are asked for
        numbers: Callable[[Graph, Value], Tensor | None] = lambda graph, value: None,
    ) -> None:
        self.graph, self.views = graph, Views(graph)
        self.differentiable = differentiable
        self.numbers = partial(numbers, graph)  # of a value that every call has, or None
        self.name = ""  # of the op
        self.function = ""  # that Python called, of which the op is a part or the whole
        self.meta: Any = None  # what the trace says of the result: shape and dtype
        self.target: Any = None
        # products of two views and a number, and softmaxes along an axis, as `attention_by_hand`
        # looks for them
        self.products: dict[Value, tuple[Any, Any, float]] = {}
        self.softmaxes: dict[Value, tuple[Value, int]] = {}
        self._rng: Value | None = None  # of PyTorch's dropouts
        self._layers = 0  # of them

    def refuse(self, why: str) -> PlanError:
        name = self.name
        if self.function not in name:
            name = f"{self.function} ({name})"
        return PlanError(f"{name} {why} has no place in a plan ({self.graph.source})")

    def make(self, op: str, inputs: dict, shape, dtype, **more) -> Value:
        return self.graph.make(op, inputs, shape, dtype, **more)

    def rng(self) -> Value:
        """Seed and step of this call's dropouts, int64 [2], by PyTorch's generator. Kernels draw
        from these what they drop, where they make it, and again in backward: no mask is kept."""
        if self._rng is None:
            numbers = tuple(("number", n) for n in (0, _MOST, [2]))
            attrs = {"target": torch.ops.aten.randint.low, "arguments": numbers}
            attrs |= {"options": {"dtype": torch.int64}}
            self._rng = self.make("draw", self.beside(), (2,), torch.int64, **attrs)
        return self._rng

    def layer(self) -> int:
        """The number of the next of them."""
        self._layers += 1
        return self._layers - 1

    def beside(self) -> dict[str, Value]:
        """What says to a draw of nothing on which device it is: an image among the arguments, or
        another tensor of the call."""
        graph = self.graph
        found = [*(v for v in graph.inputs if v.shape), *graph.parameters.values(), *graph.inputs]
        if not found:
            raise self.refuse("where no tensor says on which device")
        return {"beside": found[0]}

    def gather(self, view: View | None, shape=None) -> Value | None:
        """The view as a value, see `Views.gather`."""
        if view is None:
            return None
        return self.views.gather(view, shape)

    def cast(self, value: Value | None, dtype: torch.dtype) -> Value | None:
        if value is None or value.dtype == dtype:
            return value
        return self.make("cast", {"x": value}, value.shape, dtype)

    def cast_all(self, inputs: dict[str, Value | None], dtype: torch.dtype) -> dict:
        """In the dtype of the result, which under autocast is not that of the inputs."""
        return {role: self.cast(value, dtype) for role, value in inputs.items()}


def understood(
    low: Lowering, function: Callable, args: tuple, kwargs: dict[str, Any]
) -> tuple[list, dict[str, Any]]:
    """The arguments of the call that is being lowered, as its lowering takes them. PlanError: it
    has one that the lowering does not take, at another value than its default."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD or p.kind is p.VAR_POSITIONAL for p in parameters):
        return list(args), kwargs  # a call that stays PyTorch's
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    known, places, named = _KNOWN[function], [], {}
    for i, argument in enumerate(low.target._schema.arguments):
        name = argument.name
        if i >= len(args) and name not in kwargs:
            continue
        value = args[i] if i < len(args) else kwargs[name]
        if name in names:
            named[name] = value
        elif name in known:
            continue
        elif argument.kwarg_only or len(places) == len(parameters) - len(names):
            if not _is(value, argument.default_value):
                raise low.refuse(f"with {name}" + ("" if isinstance(value, View) else f"={value}"))
        else:
            places.append(value)
    return places, named


def _is(value: Any, usual: Any) -> bool:
    """Whether an argument has this value; a list, in each place."""
    if isinstance(value, list | tuple) and not isinstance(usual, list | tuple):
        return all(v == usual for v in value)
    return value is usual or (not isinstance(value, View) and value == usual)


def each(low: Lowering, op: str, x: View, role: str = "x", **attrs: Any) -> View:
    """A node that changes each element, wherever it lies."""
    x = low.views.owned(x)
    value = x.value
    return View(low.make(op, {role: value}, value.shape, low.meta.dtype, **attrs), x.dims)


def call_arguments(arguments: tuple, tensors: Sequence[Any]) -> list[Any]:
    """The arguments of an arith node's target, of its inputs."""

    def filled(arg: Any) -> Any:
        if isinstance(arg, int):
            return tensors[arg]
        kind, value = arg
        return [filled(v) for v in value] if kind == "list" else value

    return [filled(arg) for arg in arguments]
