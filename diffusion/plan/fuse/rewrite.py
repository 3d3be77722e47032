"""A row of the fuse table, and the graph that it rewrites."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..graph import Graph, Node, Value

HALF = (2, 2)  # pixels of a block, or steps


@dataclass(frozen=True)
class Row:
    name: str
    root: tuple[str, ...]  # ops where the pattern begins
    rewrite: Callable[["Fusing", Node], Value | None]
    # how much longer unet64 takes without it, on an H200 in bf16, or "unmeasured". "A pass" is
    # forward and backward by accelerate, "a step" one of train.py (`benchmarks.ablate rows=...`),
    # both at commit aca892e where nothing else is said; figures of an H100 are of commit 3a802e1
    earns: str
    when: tuple[str, ...] = ("train", "sample")  # and "step": rows of "train" apply there, too

    def applies(self, mode: str) -> bool:
        """Whether it is for such plans."""
        return mode in self.when or mode == "step" and "train" in self.when


Serves = Callable[[Value, tuple[int, int], int], bool]


class Fusing:
    """A graph that is being rewritten, and who makes and reads each value of it. Where a node is in
    the order does not matter: it is sorted afterwards."""

    few = 16  # channels; fewer of them, whose pixels TMA cannot address, are padded

    def __init__(
        self,
        graph: Graph,
        mode: str,
        tf32: bool = True,
        serves_upsampled: Serves | None = None,  # of a small image, channels of two tensors, CO
    ) -> None:
        self.graph, self.mode, self.tf32 = graph, mode, tf32
        self._serves_upsampled = serves_upsampled
        self.producers = graph.producers()
        self.consumers = graph.consumers()
        self.gone: set[Node] = set()
        self.new: dict[Node, list[Node]] = {}  # by the node that they stand in front of

    def is_exact(self, y: Value) -> bool:
        """Whether the products of y are in float32, and left to kernels without an epilogue."""
        return y.dtype == torch.float32 and not self.tf32

    def is_few(self, value: Value, channels: int) -> bool:
        """Whether so many channels of such numbers have to be padded."""
        size = value.dtype.itemsize
        return size <= 4 and channels < self.few and channels * size % 16 != 0

    def padded_width(self, value: Value) -> int | None:
        """How many channels an image has that a convolution reads, or its gradient; None: those
        that are there. What a step begins with is written anew, for in float32 it may have to be
        rounded."""
        channels = value.shape[-1]
        if self.mode != "step":
            return self.few if self.is_few(value, channels) else None
        begins = value not in self.producers
        cast = self.maker(value, "cast")
        if not begins and (cast is None or cast.inputs["x"] not in self.graph.inputs):
            return None
        width = -(-channels // self.few) * self.few
        return width if width != channels or value.dtype == torch.float32 else None

    def serves_upsampled(self, small: Value, channels: tuple[int, int], co: int) -> bool:
        """Whether there are kernels for a convolution of upsampled channels, and they pay."""
        ask = self._serves_upsampled
        return ask is not None and ask(small, channels, co)

    def made_by(self, op: str) -> list[Node]:
        """The nodes of an op, of the other pass too."""
        return [node for node in dict.fromkeys(self.producers.values()) if node.op == op]

    def maker(self, value: Value | None, *ops: str) -> Node | None:
        """The node that makes a value, if it is one of these ops."""
        node = self.producers.get(value)
        return node if node is not None and node.op in ops else None

    def reader(self, value: Value, *ops: str) -> Node | None:
        """The only node that reads a value, if it is one of these ops."""
        readers = [r for r in self.consumers.get(value, []) if r not in self.gone]
        alone = len(readers) == 1 and readers[0] is not None
        return readers[0] if alone and readers[0].op in ops else None

    def summands(self, node: Node) -> tuple[tuple[Value, Value], ...]:
        """What an addition of two tensors of one shape reads, in either order."""
        a, b = node.inputs["a"], node.inputs["b"]
        return ((a, b), (b, a)) if a is not b and a.shape == b.shape else ()

    def take(self, node: Node, *ended: Node) -> None:
        """Forget nodes whose work `node` does now."""
        for other in ended:
            self.gone.add(other)
            for value in set(other.inputs.values()):
                if other in self.consumers[value]:
                    self.consumers[value].remove(other)
        for value in node.outputs.values():
            self.producers[value] = node
        self.connect(node)

    def write(self, node: Node, value: Value, *ended: Node, role: str = "") -> None:
        """Let a node make this value in the place of a result of its, the first if no role is
        named, and forget nodes whose work it does now."""
        role = role or next(iter(node.outputs))
        self.producers.pop(node.outputs[role])
        node.outputs[role] = value
        self.take(node, *ended)

    def connect(self, node: Node) -> None:
        for value in set(node.inputs.values()):
            readers = self.consumers.setdefault(value, [])
            if node not in readers:
                readers.append(node)

    def give(self, node: Node, role: str, value: Value) -> None:
        """Another input of a node."""
        node.inputs[role] = value
        self.connect(node)

    def forget(self, node: Node, role: str) -> None:
        value = node.inputs.pop(role)
        if value not in node.inputs.values():
            self.consumers[value].remove(node)

    def swap(self, node: Node, role: str, value: Value) -> None:
        """Another value for an input, which keeps its place among the others."""
        before, node.inputs[role] = node.inputs[role], value
        if before not in node.inputs.values():
            self.consumers[before].remove(node)
        self.connect(node)

    def insert(self, before: Node, op: str, inputs: dict, outputs: dict, **attrs) -> Node:
        """A new node in front of another."""
        node = self.graph.new(op, inputs, outputs, before.source, **attrs)
        self.new.setdefault(before, []).append(node)
        self.take(node)
        return node

    def done(self) -> None:
        nodes = []
        for node in self.graph.nodes:
            nodes += [n for n in self.new.get(node, []) if n not in self.gone]
            nodes += [] if node in self.gone else [node]
        self.graph.nodes = nodes
