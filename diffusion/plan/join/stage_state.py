"""State of `stages`: the launches so far, and the deferred activations."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from triton_kernels.runtime.device import Device

from ..graph import Graph, Node, PlanError, Value, nodes_for
from ..launch.table import launch_reference
from .film import Films

_REARRANGES = {"slice", "cat", "layout", "reshape", "cast"}


@dataclass(frozen=True)
class PutOff:
    """An activation, as far as it is known: inputs and attributes of the stage that reads it."""

    inputs: dict[str, Value]
    attrs: dict[str, Any]

    def with_(self, inputs: dict[str, Value] | None = None, **attrs: Any) -> "PutOff":
        return replace(self, inputs=self.inputs | (inputs or {}), attrs=self.attrs | attrs)


class Stages:
    """The nodes so far, and what has been put off."""

    def __init__(
        self,
        graph: Graph,
        found: Films | None,
        parameters: dict[str, Tensor],
        gpu: Device,
        dtype: torch.dtype,
        tf32: bool,
    ) -> None:
        self.graph, self.gpu, self.dtype, self.tf32 = graph, gpu, dtype, tf32
        self.parameters = parameters
        self.image = graph.inputs[0]
        self.row = graph.value("row", (1,), torch.int64)
        self.consumers = graph.consumers()
        self.producers = graph.producers()
        self.columns: dict[Value, slice] = {} if found is None else dict(found.columns)
        self.film = {} if found is None else {"table": found.table, "row": self.row}
        if found is not None and found.other is not None:
            self.film["other"] = found.other
        self.nodes: list[Node] = []
        self.done: set[Node] = set()  # of the old ones: in a launch with another
        self.made: set[Value] = set()  # tensors that a launch leaves: kept activations
        self.put_off: dict[Value, PutOff] = {}
        self.residuals: dict[Value, dict[str, Value]] = {}  # 1x1 convolutions, as inputs
        self.cats: dict[Value, Value] = {}  # the first half of those that were put off

    def refuse(self, node: Node, why: str = "") -> None:
        if len(node.out.shape) == 2 and node.op in ("act", "cat", "linear"):
            return  # of the embedding, see `film`
        raise PlanError(f"{why or f'{node.op} has no place in a stage'} ({node.source})")

    def emit(self, op: str, inputs: dict, outputs: dict, like: Node, **attrs: Any) -> Node:
        node = self.graph.new(op, inputs, outputs, like.source, **attrs)
        node.tf32 = self.tf32
        self.nodes.append(node)
        return node

    def readers(self, value: Value) -> list[Node | None]:
        return [r for r in self.consumers.get(value, []) if r not in self.done]

    def activation(self, node: Node, role: str = "x") -> PutOff:
        found = self.put_off.get(node.inputs[role])
        if found is None:
            self.refuse(node, f"{node.op} of what no stage has made")
        if "columns" in found.attrs and "scale" not in found.attrs:
            self.refuse(node, "a scale without a shift")
        return found

    def bias(self, node: Node) -> Value:
        if "bias" not in node.inputs:
            self.refuse(node, f"a {node.op} without a bias")
        return node.inputs["bias"]

    def rearranged(self, value: Value) -> Tensor | None:
        """Which number of a parameter is where, counted from one, and zero where there is none;
        None if a value is not parameters that were only rearranged."""
        nodes = nodes_for([value], self.graph.nodes)
        if any(node.op not in _REARRANGES for node in nodes):
            return None
        values = {v: tensor.cpu() for v, tensor in self.graph.constants.items()}
        for parameter in self.graph.parameters.values():
            if any(parameter in node.inputs.values() for node in nodes):
                count = parameter.numel + 1
                numbers = torch.arange(1, count, dtype=torch.float64, device="cpu")
                values[parameter] = numbers.view(parameter.shape)
        for node in nodes:
            replaced = Node(node.op, node.inputs, node.outputs, node.attrs)
            made = launch_reference(replaced, values)
            values |= {v: x.double() for v, x in made.items()}
        return values.get(value)
