"""The fuse table: rewrites that decide, before anything runs, what is computed in one launch.

A row has a root op, a guard, a rewrite and the figure that justifies it. `prepare` applies the rows
that change the network's ops before it is differentiated, so that backward follows from them.
`fuse` applies the rows that fuse a node with its neighbours. A rewrite inspects its root; it either
changes the graph and names the value that is now computed differently, or changes nothing and
returns None.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..canonical.canonical import merge_equal
from ..differentiate import Backward
from ..graph import Graph, Node
from .backward import BACKWARD_ROWS
from .by_pytorch import WHERE_IT_LIES
from .casts import WHERE_IT_IS_READ
from .forward import FORWARD_ROWS
from .preparing import PREPARING
from .rewrite import Fusing, On, Row

ROWS = {row.name: row for row in (*PREPARING, *FORWARD_ROWS, *BACKWARD_ROWS)}
_left_out: set[str] = set()
_noted: list[set[str]] = []


@contextmanager
def leaving_out(*names: str) -> Iterator[None]:
    """Within the block these rows do not apply to what is planned, to measure what they are worth.
    ValueError: there is no such row."""
    for name in names:
        if name not in ROWS:
            raise ValueError(f"{name!r} is no row of the fuse table; there are {', '.join(ROWS)}")
    _left_out.update(names)
    try:
        yield
    finally:
        _left_out.difference_update(names)


@contextmanager
def applied() -> Iterator[set[str]]:
    """The names of the rows that apply to what is planned within the block."""
    _noted.append(set())
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


def prepare(graph: Graph, mode: str) -> None:
    """Apply the rows of `PREPARING`, in place."""
    _apply(graph, PREPARING, mode)
    merge_equal(graph)  # the sums of a tensor serve every norm that reads it
    graph.prune()


def fuse(
    graph: Graph,
    backward: Backward | None,
    tf32: tuple[bool, bool] = (True, True),
    kernels: On | None = None,  # and a GPU: for rows whose kernels do not serve every size
    step: bool = False,  # it is of a training step
) -> None:
    """Apply the other rows, in place. Where `tf32` says no, convolutions, or other products, of
    float32 are left to kernels that multiply in float32."""
    if backward is None:
        return _apply(graph, FORWARD_ROWS, "sample", tf32)
    mode = "step" if step else "train"
    # each pass for itself: nothing of backward moves into forward
    nodes, outputs, constants = graph.nodes, graph.outputs, graph.constants
    forward, behind = nodes[: backward.start], nodes[backward.start :]
    read = {v for node in behind for v in node.inputs.values()}
    graph.nodes, graph.outputs = forward, [*outputs, *read]
    _apply(graph, FORWARD_ROWS, mode, tf32, kernels=kernels)
    forward = graph.nodes
    graph.nodes, graph.outputs = behind, list(backward.grads.values())
    _apply(graph, BACKWARD_ROWS, mode, tf32, forward, kernels)
    behind = graph.nodes
    graph.nodes, graph.outputs = [*forward, *behind], outputs
    graph.constants = constants | graph.constants
    # what both passes read
    graph.outputs = [*outputs, *backward.grads.values()]
    _apply(graph, (WHERE_IT_IS_READ, WHERE_IT_LIES), mode, tf32)
    graph.outputs = outputs
    backward.start = len(set(graph.nodes).intersection(forward))
    return None


def _apply(
    graph: Graph,
    rows: tuple[Row, ...],
    mode: str,
    tf32: tuple[bool, bool] = (True, True),
    before: Sequence[Node] = (),
    kernels: On | None = None,
) -> None:
    for row in rows:
        if mode not in row.when or row.name in _left_out:
            continue
        f = Fusing(graph, mode, tf32, kernels, before)
        for node in list(graph.nodes):
            if node in f.gone or node.op not in row.root:
                continue
            value = row.rewrite(f, node)
            if value is not None:
                graph.reason(value, f"{row.name} ({row.earns})")
                for names in _noted:
                    names.add(row.name)
        f.done()
        graph.sort()
        graph.prune()
