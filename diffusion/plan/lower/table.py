"""The one table from PyTorch's ops to the graph's: what a trace may contain.

Each lowering is given views (`views`) of the tensors that the op was called with, and gives views
of its results. What only changes a view (permute, view, expand, split, ...) makes no node. An op
that is not in the table has no place in a plan: `trace` raises PlanError with its line.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..graph import Graph, PlanError, Value
from ..views import View, Views

LOWERINGS: dict[str, Callable] = {}


def lowers(*names: str) -> Callable[[Callable], Callable]:
    """Decorator of the lowering of these ops of aten."""

    def register(function: Callable) -> Callable:
        LOWERINGS.update(dict.fromkeys(names, function))
        return function

    return register


class Lowering:
    """The graph as far as it is, and the call that is being lowered."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.views = graph, Views(graph)
        self.name = ""  # of the op
        self.function = ""  # that Python called, of which the op is a part or the whole
        self.source = ""  # the line of the module
        self.meta: Any = None  # what the trace says of the result: shape and dtype
        self.target: Any = None

    def refuse(self, why: str) -> PlanError:
        name = self.name if not self.function or self.function in self.name else self.function
        return PlanError(f"{name} {why} has no place in a plan ({self.source})")

    def make(self, op: str, inputs: dict, shape, dtype, **more) -> Value:
        return self.graph.make(op, inputs, shape, dtype, source=self.source, **more)

    def gather(self, view: View | None, shape=None, layout: str = "") -> Value | None:
        """The view as a value, see `Views.gather`."""
        if view is None:
            return None
        return self.views.gather(view, shape, self.source, layout)

    def cast(self, value: Value | None, dtype: torch.dtype) -> Value | None:
        if value is None or value.dtype == dtype:
            return value
        return self.make("cast", {"x": value}, value.shape, dtype, layout=value.layout)

    def cast_all(self, inputs: dict[str, Value | None], dtype: torch.dtype) -> dict:
        """In the dtype of the result, which under autocast is not that of the inputs."""
        return {role: self.cast(value, dtype) for role, value in inputs.items()}


def each(low: Lowering, op: str, x: View, **attrs: Any) -> View:
    """A node that changes each element, wherever it lies."""
    x = low.views.owned(x, low.source)
    value = x.value
    return View(
        low.make(op, {"x": value}, value.shape, low.meta.dtype, layout=value.layout, **attrs),
        x.dims,
    )


def call_arguments(arguments: tuple, tensors: Sequence[Any]) -> list[Any]:
    """The arguments of an arith node's target, of its inputs."""

    def filled(arg: Any) -> Any:
        if isinstance(arg, int):
            return tensors[arg]
        kind, value = arg
        return [filled(v) for v in value] if kind == "list" else value

    return [filled(arg) for arg in arguments]
