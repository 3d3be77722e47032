"""When each node runs, and how long each value lives.

The rules, all of them here:

- Forward nodes run in the order in which the module called them.
- Backward nodes run in the order in which `differentiate` made them, which is that of the chain
  through the network, but for what only gradients of parameters follow from: gradients of weights,
  and small sums and casts. Nobody waits for those. They go to a second stream, behind what they
  read, with `GROUP` gradients of weights at a time.
- What the second stream reads is kept until the chain has waited for it, which it does for a group
  before the group after the next begins.
- What depends on parameters and constants alone (casts to 16 bits, filters side by side) is named
  `fixed`: it would have to be made once for each update of them. `accelerate` makes it in every
  call, for nobody is told when a parameter changes (through `.data`, say).
- A value dies with its last reader; what backward reads lives until then, unless it is made again.
- Memory is one arena: each value, the largest first, gets the lowest place that is free during its
  life.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from .graph import FREE, Graph, Node, Value

WEIGHT_GRADS = ("conv_dw", "linear_dw")
GROUP = 4  # gradients of weights that go to the second stream together
SMALL = (  # what makes of gradients of weights those of parameters
    "sum", "cast", "reshape", "slice", "add", "mul", "affine", "cat", "pad", "layout",
    "layout_grad", "embedding_grad", "arith_grad",
)  # fmt: skip
ALIGNMENT = 256  # bytes
BUCKET = 16 * 2**20  # bytes of gradients that are summed over processes at a time


@dataclass
class Schedule:
    """Nodes in their order, and what is decided about each."""

    nodes: list[Node]
    start: int  # of backward, in nodes
    stream: dict[Node, int] = field(default_factory=dict)  # 0: the chain; 1: gradients of weights
    waits: dict[Node, Node] = field(default_factory=dict)  # behind a node, the chain for another
    last: dict[Node, tuple[Value, ...]] = field(default_factory=dict)  # that die with a node
    place: dict[Value, int] = field(default_factory=dict)  # in the arena
    arena: int = 0  # bytes of it
    peak: int = 0  # bytes of what is alive at once, at most; the rest of the arena are holes
    buckets: list[tuple[int, list[Value]]] = field(default_factory=list)  # complete at node i
    fixed: set[Node] = field(default_factory=set)  # forward nodes of parameters alone

    @property
    def forward(self) -> list[Node]:
        return self.nodes[: self.start]

    @property
    def backward(self) -> list[Node]:
        return self.nodes[self.start :]


def schedule(graph: Graph, start: int | None = None, grads: Sequence[Value] = ()) -> Schedule:
    """The schedule of a graph whose nodes from `start` on are the backward pass, which makes
    `grads`."""
    start = len(graph.nodes) if start is None else start
    forward, backward = graph.nodes[:start], graph.nodes[start:]
    beside = _beside(backward)
    nodes = [*forward, *_grouped(backward, beside)]
    made = Schedule(nodes, start)
    made.stream = {node: int(node in beside) for node in nodes}
    kept = {*graph.outputs, *grads}
    made.last = last_readers(nodes, kept)
    made.waits = _waits(nodes, beside, made.last)
    made.place, made.arena = arena(nodes, made.last)
    made.peak = peak(nodes, made.last)
    made.buckets = _buckets(nodes, grads)
    made.fixed = set(fixed_nodes(graph, forward))
    return made


def _beside(nodes: Sequence[Node]) -> set[Node]:
    """The nodes of backward that nobody on the chain waits for."""
    readers: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in node.inputs.values():
            readers.setdefault(value, []).append(node)
    beside: set[Node] = set()
    for node in reversed(nodes):
        behind = [r for value in node.outputs.values() for r in readers.get(value, ())]
        if node.op in WEIGHT_GRADS + SMALL and all(reader in beside for reader in behind):
            beside.add(node)
    return beside


def _grouped(nodes: Sequence[Node], beside: set[Node]) -> list[Node]:
    """With the nodes beside the chain in groups, each behind the last that one of them reads."""
    order, waiting = [], []
    for node in nodes:
        (waiting if node in beside else order).append(node)
        if sum(n.op in WEIGHT_GRADS for n in waiting) == GROUP:
            order += waiting
            waiting = []
    return order + waiting


def _waits(
    nodes: Sequence[Node], beside: set[Node], last: dict[Node, tuple[Value, ...]]
) -> dict[Node, Node]:
    """Of the nodes behind which the chain waits for a group, its last node. In `last`, what groups
    read of the chain dies there."""
    groups: list[list[int]] = []
    for i, node in enumerate(nodes):
        if node in beside:
            follows = groups and groups[-1][-1] == i - 1
            groups[-1].append(i) if follows else groups.append([i])
    own = set()  # memory of the second stream, which it may use again at once
    for node in nodes:
        if node in beside and (node.op not in FREE or node.inputs["x"] in own):
            own.update(node.outputs.values())
    end_of = {value: i for i, node in enumerate(nodes) for value in last.get(node, ())}
    waits: dict[Node, Node] = {}
    for group, later in zip(groups, [*groups[2:], None, None], strict=False):
        free = len(nodes) - 1 if later is None else later[0] - 1
        for value in {v for i in group for v in _touched(nodes[i])} - own:
            if value in end_of:
                end_of[value] = max(end_of[value], free)
        if later is not None:
            waits[nodes[free]] = nodes[group[-1]]
    last.clear()
    for value, i in end_of.items():
        last[nodes[i]] = (*last.get(nodes[i], ()), value)
    return waits


def _touched(node: Node) -> tuple[Value, ...]:
    return (*node.inputs.values(), *node.outputs.values())


def last_readers(nodes: Iterable[Node], kept: set[Value]) -> dict[Node, tuple[Value, ...]]:
    """The values that die with each node."""
    last: dict[Value, Node] = {}
    for node in nodes:
        for value in (*node.inputs.values(), *node.outputs.values()):
            last[value] = node
    dying: dict[Node, list[Value]] = {}
    for value, node in last.items():
        if value not in kept:
            dying.setdefault(node, []).append(value)
    return {node: tuple(values) for node, values in dying.items()}


def arena(
    nodes: Sequence[Node], last: dict[Node, tuple[Value, ...]]
) -> tuple[dict[Value, int], int]:
    """The place of each value that a node makes, and the bytes of all: the largest first, each at
    the lowest place that nothing has during its life. A value that nobody lets go of (a result)
    lives to the end."""
    lives = lifetimes(nodes, last)
    place: dict[Value, int] = {}
    taken: list[tuple[int, int, int, int]] = []  # (place, end, born, dies), by place
    for value in sorted(lives, key=lambda v: (-v.bytes, lives[v])):
        born, dies = lives[value]
        size, at = rounded(value.bytes), 0
        for low, high, other_born, other_dies in taken:
            if other_dies < born or dies < other_born:
                continue
            if low - at >= size:
                break
            at = max(at, high)
        place[value] = at
        insort(taken, (at, at + size, born, dies))
    return place, max((high for _, high, _, _ in taken), default=0)


def peak(nodes: Sequence[Node], last: dict[Node, tuple[Value, ...]]) -> int:
    """The most bytes that are alive during a node."""
    change = [0] * (len(nodes) + 2)
    for value, (born, dies) in lifetimes(nodes, last).items():
        change[born] += rounded(value.bytes)
        change[dies + 1] -= rounded(value.bytes)
    return max(accumulate(change))


def lifetimes(
    nodes: Sequence[Node], last: dict[Node, tuple[Value, ...]]
) -> dict[Value, tuple[int, int]]:
    """The first and the last node of each memory, by the value that it is made for: what only gives
    it another shape lengthens its life."""
    owner: dict[Value, Value] = {}
    born: dict[Value, int] = {}
    dies: dict[Value, int] = {}
    for i, node in enumerate(nodes):
        source = node.inputs.get("x")
        for value in node.outputs.values():
            if node.op not in FREE:
                owner[value], born[value] = value, i
            elif source in owner:
                owner[value] = owner[source]
    end_of = {value: i for i, node in enumerate(nodes) for value in last.get(node, ())}
    for value, memory in owner.items():
        dies[memory] = max(dies.get(memory, 0), end_of.get(value, len(nodes)))
    return {value: (born[value], dies[value]) for value in born}


def rounded(size: int) -> int:
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def fixed_nodes(graph: Graph, forward: Sequence[Node]) -> dict[Node, None]:
    """Those of parameters and constants alone, in their order."""
    known = {*graph.parameters.values(), *graph.constants}
    found = {}
    for node in forward:
        if all(value in known for value in node.inputs.values()):
            known.update(node.outputs.values())
            found[node] = None
    return found


def _buckets(nodes: Sequence[Node], grads: Sequence[Value]) -> list[tuple[int, list[Value]]]:
    """Gradients in the order in which they are complete, in buckets of `BUCKET` bytes at least, and
    the node behind which each can be sent."""
    at = {value: i for i, node in enumerate(nodes) for value in node.outputs.values()}
    buckets, current, size = [], [], 0
    for value in sorted((v for v in grads if v in at), key=at.__getitem__):
        current.append(value)
        size += value.bytes
        if size >= BUCKET:
            buckets.append((at[value], current))
            current, size = [], 0
    if current:
        buckets.append((at[current[-1]], current))
    return buckets
