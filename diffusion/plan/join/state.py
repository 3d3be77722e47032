"""State of `join`: the launches so far, and the nodes that are deferred until their readers are
known."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from torch import Tensor

from triton_kernels.conv.fused_spec import forward_spec
from triton_kernels.registry.spec import WHOLE_PIXELS, ConvSpec, Spec
from triton_kernels.runtime.device import Device

from ..dry_run import DryRun
from ..graph import Graph, Node, Value
from ..launch.table import as_filters, launcher_of

TERMS = ("emb", "residual", "extra0", "extra1", "columns0", "columns1", "extra_bias")
NORM = ("weight", "bias", "scale", "shift")


class Joining:
    """The nodes so far, and what has been put off until it is known who reads it."""

    def __init__(
        self,
        graph: Graph,
        parameters: dict[str, Tensor],
        kernels: ModuleType,
        gpu: Device,
        tf32: bool,
    ) -> None:
        self.graph, self.k, self.gpu, self.tf32 = graph, kernels, gpu, tf32
        self.consumers = graph.consumers()
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.dry = DryRun(graph, parameters, launcher_of(kernels))
        self.made = {*graph.inputs, *graph.parameters.values(), *graph.constants}
        self.nodes: list[Node] = []
        self.done: set[Node] = set()  # of the old ones: launched with another
        self.parts: dict[Value, Node] = {}  # convolutions in parts, by their result
        # norms, upsampling and means that were put off, by their result, and what launches them
        self.later: dict[Value, tuple[Node, Callable]] = {}
        self.cheap: set[Value] = set()  # of norms' results, which a projection to q, k, v may make
        self.measured: dict[Value, Value] = {}  # what sums were taken of, if nobody has taken them

    def emit(self, op: str, inputs: dict, outputs: dict[str, Value], like: Node, **attrs) -> Node:
        """A new node, which makes values of the old graph."""
        inputs = {role: value for role, value in inputs.items() if value is not None}
        missing = [value for value in inputs.values() if value not in self.made]
        assert not missing, f"{op} reads {missing} too early"
        return self.keep(Node(op, inputs, outputs, attrs, like.source))

    def keep(self, node: Node) -> Node:
        self.nodes.append(node)
        self.dry(node)
        for role in [r for r, value in node.outputs.items() if value not in self.dry]:
            self.measured[node.outputs.pop(role)] = node.outputs["y"]  # sums, not taken there
        self.made.update(node.outputs.values())
        for value in node.outputs.values():
            self.later.pop(value, None)
            self.measured.pop(value, None)
        return node

    def need(self, *values: Value | None) -> None:
        """Make what was put off."""
        for value in values:
            if value in self.parts:
                self.sum_parts(value)
            elif value in self.later:
                node, make = self.later[value]
                make(self, node)

    def readers(self, value: Value) -> list[Node]:
        """Who still reads it, in their order."""
        readers = [r for r in self.consumers.get(value, ()) if r is not None and r not in self.done]
        return sorted(readers, key=self.order.__getitem__)

    def first_reader(self, value: Value) -> Node | None:
        return next(iter(self.readers(value)), None)

    def others_read(self, value: Value, *nodes: Node) -> bool:
        is_result = None in self.consumers.get(value, ())
        return is_result or any(reader not in nodes for reader in self.readers(value))

    def ready(self, node: Node, *roles: str) -> bool:
        """Whether these inputs of a node are there, or can be at once."""
        there = {*self.made, *self.later, *self.parts}
        return all(node.inputs[role] in there for role in roles if role in node.inputs)

    def other(self, node: Node) -> None:
        for value in node.inputs.values():
            self.measure(value, node)
        self.need(*node.inputs.values())
        self.keep(node)

    def measure(self, value: Value, like: Node) -> None:
        x = self.measured.get(value)
        if x is None:
            return
        self.need(x)
        if value in self.measured:
            self.emit("moments", {"x": x}, {"y": value}, like)

    def filters(self, node: Node) -> Tensor:
        return as_filters(self.dry[node.inputs["weight"]])

    def put_off(self, node: Node, make: Callable | None = None) -> None:
        """Until it is known who reads it; who needs it as a tensor has it made so."""
        self.later[node.out] = node, make or Joining.keep

    def late(self, value: Value | None, op: str) -> Node | None:
        """The node of this op that was put off, if it is what makes the value."""
        node, _ = self.later.get(value, (None, None))
        return node if node is not None and node.op == op else None

    def forget(self, value: Value) -> None:
        """What was put off is made by another launch."""
        self.later.pop(value, None)

    def joins(self, op: str, spec: Spec) -> bool:
        """Whether one launch is to compute this."""
        return self.k.OPS[op].why_apart(spec, self.gpu) is None

    def reads_whole(self, elements: int, pixels: int) -> bool:
        """Whether a norm does not want the partials of a tensor so small."""
        return elements <= self.k.SMALL_NORM and pixels <= WHOLE_PIXELS

    def spec(self, node: Node, x: Value, **rest: Any) -> ConvSpec:
        """Of a convolution that reads this and adds 1x1 convolutions."""
        extra = tuple(other.shape[3] for other in node.many("extra"))
        spec = forward_spec(self.dry[x], self.filters(node), allow_tf32=self.tf32, **rest)
        return replace(spec, extra=extra)

    def sum_inputs(self, conv: Node) -> dict[str, Value]:
        """Of what adds the parts of a convolution up."""
        roles = ("parts", "bias", "emb", "residual", "extra_bias")
        return {role: conv.inputs[role] for role in roles if role in conv.inputs}

    def sum_parts(self, y: Value) -> None:
        conv = self.parts.pop(y)
        outputs = dict(conv.outputs)
        self.emit("sum_parts", self.sum_inputs(conv), outputs, conv, **factor_of(conv))


def factor_of(conv: Node) -> dict[str, float]:
    """What multiplies its sum, for the launch that adds that up."""
    return {"factor": conv.attrs["factor"]} if "factor" in conv.attrs else {}


def norm_attrs(norm: Node) -> dict[str, Any]:
    """Those of a launch that has the norm in it."""
    return {key: norm.attrs[key] for key in ("groups", "eps", "activation")}


def norm_inputs(norm: Node, prefix: str = "norm_") -> dict[str, Value]:
    """What a launch that has the norm in it reads for it, beside images and sums."""
    return {
        (f"{prefix}{role}" if role in ("weight", "bias") else role): norm.inputs[role]
        for role in NORM
        if role in norm.inputs
    }
