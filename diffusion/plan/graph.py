"""The graph of a network: values, and the nodes that compute them.

A value stands for a tensor: a shape and a dtype. Its memory is contiguous in the order of its
shape, and images are always [N, H, W, C]. A node computes one or more values from others, which
have names in the node, its roles, like the arguments of a function. `ops` defines what each node
computes; `launch` has what launches it.

    trace -> differentiate -> fuse -> schedule -> execute

Each of these takes a graph and returns a graph, or a list of its nodes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .ops import FREE, OPS


class PlanError(ValueError):
    """A module cannot be planned. The message names what, and the line and module it came from."""


@dataclass(eq=False)
class Value:
    """A tensor of the plan."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def has_gradients(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def exact(self) -> torch.dtype:
        """What sums of it are kept in."""
        kept = self.dtype == torch.float64 or self.dtype.is_complex
        return self.dtype if kept else torch.float32

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)}"


@dataclass(eq=False)
class Node:
    """One operation."""

    op: str
    inputs: dict[str, Value]
    outputs: dict[str, Value]
    attrs: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    tf32: bool = True  # whether it may multiply float32 in TF32
    of_matrices: bool = False  # a product of a linear layer or of matrices, not of a convolution
    rounds: bool = False  # what it writes, or attention also reads, to TF32: see `rounding`

    @property
    def out(self) -> Value:
        """The first result, which most nodes have alone."""
        return next(iter(self.outputs.values()))

    def many(self, role: str) -> list[Value]:
        """The inputs role0, role1, ... of those that take any number."""
        return many(self.inputs, role)

    @property
    def values(self) -> tuple[Value, ...]:
        """All that it reads and makes."""
        return *self.inputs.values(), *self.outputs.values()

    @property
    def casts_floats(self) -> bool:
        """Whether it is a cast between floating-point types."""
        return self.op == "cast" and all(v.dtype.is_floating_point for v in self.values)

    @property
    def widens(self) -> bool:
        """Whether it is one that loses nothing."""
        return self.casts_floats and self.inputs["x"].dtype.itemsize < self.out.dtype.itemsize

    @property
    def is_view(self) -> bool:
        """Whether it makes no memory: what it makes lies in that of x."""
        if self.op != "slice":
            return self.op in FREE
        return math.prod(self.out.shape[: self.attrs["axis"]]) == 1

    @property
    def draws(self) -> bool:
        """Whether two of it, of the same inputs, make different numbers."""
        return self.op in ("dropout", "draw")

    @property
    def keeps_size(self) -> bool:
        """Whether the images of a convolution or linear layer, or of its gradient, have one size:
        its stride is 1, and around them are as many zeros as its odd filters need."""
        r, s = self.inputs.get("weight", self.out).shape[2:] or (1, 1)
        same = (r // 2, r // 2, s // 2, s // 2)
        how = self.attrs.get("stride", (1, 1)), self.attrs.get("padding", same)
        return how == ((1, 1), same) and r % 2 == s % 2 == 1

    def __repr__(self) -> str:
        made = ", ".join(map(repr, self.outputs.values()))
        read = ", ".join(f"{k}={v.name}" for k, v in self.inputs.items())
        said = ", ".join(f"{k}={v}" for k, v in self.attrs.items())
        return f"{made} = {self.op}({read}{'; ' if said else ''}{said})"


class Makers(dict[Value, Node]):
    """The node that makes each value."""

    def of(self, value: Value | None, *ops: str) -> Node | None:
        """That of this value, if it is one of these ops."""
        node = self.get(value)
        return node if node is not None and node.op in ops else None

    def behind(self, value: Value, *ops: str) -> Value:
        """What a value is made of by these ops; of casts, by those between floating-point types."""
        while (node := self.of(value, *ops)) is not None:
            if node.op == "cast" and not node.casts_floats:
                break
            value = node.inputs["x"]
        return value


def many(inputs: Mapping[str, Any], role: str) -> list[Any]:
    """inputs role0, role1, ..."""
    return [v for k, v in inputs.items() if k.startswith(role) and k[len(role) :].isdigit()]


def made_of(values: Iterable[Value], nodes: Iterable[Node]) -> dict[Node, None]:
    """The nodes that read these values alone, or what is made of them alone, in their order."""
    known, found = set(values), {}
    for node in nodes:
        if known.issuperset(node.inputs.values()):
            known.update(node.outputs.values())
            found[node] = None
    return found


def nodes_for(values: Iterable[Value], nodes: Sequence[Node]) -> list[Node]:
    """Those of the nodes, which are in order, that these values depend on."""
    wanted, found = set(values), []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs.values()):
            wanted.update(node.inputs.values())
            found.append(node)
    return found[::-1]


def numbered(role: str, values: Iterable[Value]) -> dict[str, Value]:
    """Inputs of a node that takes any number."""
    return {f"{role}{i}": v for i, v in enumerate(values)}


def readers_of(nodes: Iterable[Node]) -> dict[Value, list[Node]]:
    """The nodes that read each value, each once."""
    readers: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in dict.fromkeys(node.inputs.values()):
            readers.setdefault(value, []).append(node)
    return readers


def behind_what_they_read(nodes: Sequence[Node]) -> list[Node]:
    """The nodes in an order in which they can run, otherwise in their own."""
    producers = {value: node for node in nodes for value in node.outputs.values()}
    begun, done = set(), {}
    for root in nodes:
        stack = [root]
        while stack:
            node = stack[-1]
            makers = (producers.get(v) for v in node.inputs.values())
            waits = [m for m in makers if m is not None and m not in done]
            if waits and node not in done:
                assert node not in begun, f"{node} waits for itself"
                begun.add(node)
                stack.extend(waits)
                continue
            done[stack.pop()] = None
    return list(done)


def row_beside(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[1, ..., 1, C]: of a vector of channels that meets a tensor of this shape."""
    return *(1 for _ in shape[:-1]), shape[-1]


def rows_beside(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[N, 1, ..., 1, C]: of a vector of channels for each image, likewise."""
    return shape[0], *(1 for _ in shape[1:-1]), shape[-1]


class Graph:
    """Nodes in an order in which they can run, and what they begin and end with."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []  # what the caller gives
        self.parameters: dict[str, Value] = {}  # by their names in the module; buffers, too
        self.trainable: set[str] = set()  # of these, the ones that a gradient may be asked of
        self.in_order: set[Value] = set()  # and filters that lie in memory as kernels read them
        self.constants: dict[Value, Tensor] = {}
        self.outputs: list[Value] = []
        self.why: dict[Value, list[str]] = {}  # what made a value as it is made, and the figures
        self.source = ""  # the line of the module that new nodes are made for
        self._names: dict[str, int] = {}

    def value(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> Value:
        """A new value, whose name gets a number if another has it."""
        number = self._names.get(name, 0)
        self._names[name] = number + 1
        shape = tuple(int(s) for s in shape)
        return Value(f"{name}.{number}" if number else name, shape, dtype)

    def new(
        self,
        op: str,
        inputs: dict[str, Value | None],
        outputs: dict[str, tuple],  # role: (shape, dtype)
        source: str = "",  # "": the graph's
        **attrs: Any,
    ) -> Node:
        """A node that is not among the others yet; inputs that are None are left out."""
        assert op in OPS, op
        given = {k: v for k, v in inputs.items() if v is not None}
        several = len(outputs) > 1
        made = {
            role: self.value(f"{op}.{role}" if several else op, *spec)
            for role, spec in outputs.items()
        }
        return Node(op, given, made, attrs, source or self.source)

    def node(self, *what: Any, **attrs: Any) -> Node:
        """Append a node, see `new`."""
        self.nodes.append(self.new(*what, **attrs))
        return self.nodes[-1]

    def insert(self, before: Node, op: str, x: Value, shape: Iterable[int], **attrs: Any) -> Value:
        """Put a node of one tensor in front of another node, for the same line of the module; the
        result, in the dtype of x."""
        node = self.new(op, {"x": x}, {"y": (shape, x.dtype)}, before.source, **attrs)
        self.nodes.insert(self.nodes.index(before), node)
        return node.out

    def replace(self, last: Node, node: Node) -> None:
        """Let a node, which may be in the graph, make the result of another in that one's place."""
        if node in self.nodes:
            self.nodes.remove(node)
        self.nodes[self.nodes.index(last)] = node
        node.outputs = {"y": last.out}

    def make(
        self,
        op: str,
        inputs: dict[str, Value | None],
        shape: Iterable[int],
        dtype: torch.dtype,
        **more: Any,
    ) -> Value:
        """Append a node of one result; the result."""
        return self.node(op, inputs, {"y": (shape, dtype)}, **more).out

    def constant(self, tensor: Tensor, name: str = "constant") -> Value:
        value = self.value(name, tensor.shape, tensor.dtype)
        self.constants[value] = tensor
        return value

    def reason(self, value: Value, why: str) -> None:
        """Say why a value is made as it is."""
        self.why.setdefault(value, []).append(why)

    def producers(self) -> Makers:
        return Makers({value: node for node in self.nodes for value in node.outputs.values()})

    def consumers(self) -> dict[Value, list[Node | None]]:
        """The nodes that read a value, each once; a result of the graph has None among them."""
        readers = readers_of(self.nodes)
        for value in self.outputs:
            readers.setdefault(value, []).append(None)
        return readers

    def products(self) -> Iterator[tuple[Node, Value, Value]]:
        """Each product of two values, with these in either order, until it is something else."""
        for node in self.nodes:
            for x, other in (("a", "b"), ("b", "a")):
                if node.op == "mul":
                    yield node, node.inputs[x], node.inputs[other]

    def fixed(self, nodes: Iterable[Node]) -> dict[Node, None]:
        """Those of parameters and constants alone, in their order."""
        return made_of({*self.parameters.values(), *self.constants}, nodes)

    def substitute(self, new: dict[Value, Value]) -> None:
        """Let everybody who reads a key of `new` read its value; which may be a key, too."""

        def final(value: Value) -> Value:
            while value in new:
                value = new[value]
            return value

        for node in self.nodes:
            node.inputs = {role: final(value) for role, value in node.inputs.items()}
        self.outputs = [final(value) for value in self.outputs]

    def prune(self) -> None:
        """Forget nodes that nobody reads."""
        self.nodes = nodes_for(self.outputs, self.nodes)
        read = {*self.outputs, *(v for node in self.nodes for v in node.inputs.values())}
        self.constants = {v: t for v, t in self.constants.items() if v in read}

    def sort(self) -> None:
        """Put nodes behind what they read, and otherwise leave them in their order."""
        self.nodes = behind_what_they_read(self.nodes)

    def check(self, given: Iterable[Value] = ()) -> None:
        """Every value is made before it is read, and once, where these are there, too."""
        known = {*self.inputs, *self.parameters.values(), *self.constants, *given}
        for node in self.nodes:
            missing = [v for v in node.inputs.values() if v not in known]
            assert not missing, f"{node} reads {missing} before it is made"
            again = [v for v in node.outputs.values() if v in known]
            assert not again, f"{node} makes {again} again"
            known.update(node.outputs.values())
        assert all(v in known for v in self.outputs), "a result is never made"

    def rename(self) -> None:
        """Call what nodes make by their ops and numbers, in the order in which they run."""
        numbers: dict[str, int] = {}
        for node in self.nodes:
            numbers[node.op] = number = numbers.get(node.op, 0) + 1
            for role, value in node.outputs.items():
                value.name = f"{node.op}{number}" + ("" if role == "y" else f".{role}")

    def count(self) -> dict[str, int]:
        """How many nodes there are of each op."""
        counts: dict[str, int] = {}
        for node in self.nodes:
            counts[node.op] = counts.get(node.op, 0) + 1
        return counts

    def __str__(self) -> str:
        return "\n".join(f"{node}  # {node.source}" for node in self.nodes)
