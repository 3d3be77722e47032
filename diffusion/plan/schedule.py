"""When each node runs, and how long each value lives.

The rules, all of them here:

- Forward nodes run in the order in which the module called them.
- Backward nodes run in the order in which `differentiate` made them, which is that of the chain
  through the network, but for gradients of weights: nobody waits for those. They go to a second
  stream, behind what they read, in groups of `GROUP` at most.
- A value dies with its last reader; what backward reads lives until then, unless it is made again.
- Memory is one arena a pass: each value gets the lowest place that is free during its life.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .graph import Graph, Node, Value

WEIGHT_GRADS = ("conv_dw", "linear_dw")
GROUP = 4  # gradients of weights that go to the second stream together
ALIGNMENT = 256  # bytes
BUCKET = 16 * 2**20  # bytes of gradients that are summed over processes at a time
FREE = ("reshape",)  # nodes that make no memory


@dataclass
class Schedule:
    """Nodes in their order, and what is decided about each."""

    nodes: list[Node]
    start: int  # of backward, in nodes
    stream: dict[Node, int] = field(default_factory=dict)  # 0: the chain; 1: gradients of weights
    last: dict[Node, tuple[Value, ...]] = field(default_factory=dict)  # that die with a node
    place: dict[Value, int] = field(default_factory=dict)  # in the arena
    arena: int = 0  # bytes
    buckets: list[tuple[int, list[Value]]] = field(default_factory=list)  # complete at node i

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
    forward, backward = graph.nodes[:start], _grouped(graph.nodes[start:])
    nodes = [*forward, *backward]
    made = Schedule(nodes, start)
    made.stream = {
        node: int(i >= start and node.op in WEIGHT_GRADS) for i, node in enumerate(nodes)
    }
    kept = {*graph.outputs, *grads}
    made.last = last_readers(nodes, kept)
    made.place, made.arena = arena(nodes, made.last)
    made.buckets = _buckets(nodes, grads)
    return made


def _grouped(nodes: list[Node]) -> list[Node]:
    """Gradients of weights in groups, each behind the last node that one of them waits for. What
    reads one (a cast, or another summand) is behind its group."""
    order, waiting, blocked = [], [], set()
    held: list[Node] = []

    def release() -> None:
        order.extend(waiting)
        order.extend(held)
        waiting.clear(), held.clear(), blocked.clear()

    for node in nodes:
        if node.op in WEIGHT_GRADS:
            if any(value in blocked for value in node.inputs.values()):
                release()
            waiting.append(node)
            blocked.update(node.outputs.values())
        elif any(value in blocked for value in node.inputs.values()):
            held.append(node)
            blocked.update(node.outputs.values())
        else:
            order.append(node)
        if len(waiting) == GROUP:
            release()
    release()
    return order


def last_readers(nodes: Iterable[Node], kept: set[Value]) -> dict[Node, tuple[Value, ...]]:
    """The values that die with each node. What a reshape gives is the memory of what it was given,
    and dies as a value of its own."""
    nodes = list(nodes)
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
    """The place of each value that a node makes, and the bytes of all. A value that nobody lets go
    of (a result) keeps its place to the end."""
    owner: dict[Value, Value] = {}  # of memory that several values share
    users: dict[Value, int] = {}
    free: list[tuple[int, int]] = []  # (place, bytes), by place
    place: dict[Value, int] = {}
    end = 0

    def root(value: Value) -> Value:
        return owner.get(value, value)

    for node in nodes:
        for value in node.outputs.values():
            source = node.inputs.get("x")
            if node.op in FREE and (source in place or source in owner):
                owner[value] = root(source)
                users[root(source)] += 1
                continue
            if node.op in FREE:
                owner[value] = value  # of a parameter or an input, which have a place elsewhere
                continue
            size = rounded(value.bytes)
            place[value], end = _take(free, size, end)
            users[value] = 1
        for value in last.get(node, ()):
            memory = root(value)
            if memory in users:
                users[memory] -= 1
                if users[memory] == 0:
                    _give(free, place[memory], rounded(memory.bytes))
    return place, end


def rounded(size: int) -> int:
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def _take(free: list[tuple[int, int]], size: int, end: int) -> tuple[int, int]:
    """The lowest place of that many bytes, and where the arena ends then."""
    for i, (place, length) in enumerate(free):
        if length >= size:
            free[i : i + 1] = [(place + size, length - size)] if length > size else []
            return place, end
    if free and free[-1][0] + free[-1][1] == end:  # the end is free, and not long enough
        place = free.pop()[0]
        return place, place + size
    return end, end + size


def _give(free: list[tuple[int, int]], place: int, size: int) -> None:
    free.append((place, size))
    free.sort()
    joined: list[tuple[int, int]] = []
    for start, length in free:
        if joined and joined[-1][0] + joined[-1][1] == start:
            joined[-1] = joined[-1][0], joined[-1][1] + length
        else:
            joined.append((start, length))
    free[:] = joined


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
