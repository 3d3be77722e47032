"""The page of a plan: each node with its kernels, its stream, the bytes that it moves, and a lower
bound of its time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton_kernels import fused_ops
from triton_kernels.registry.chips import Chip, floor
from triton_kernels.runtime.device import Device

from ..build import Plan
from ..graph import Node, Value
from ..launch.table import Kernels
from ..ops import WEIGHT_GRADS
from ..schedule.moves import Move
from .call import call_memory
from .flops import flops_of
from .kernels import Launched, is_interpreted, launched
from .memory import Memory


@dataclass(frozen=True)
class Line:
    """What is launched together, on the page."""

    name: str
    op: str
    pass_: str  # forward, backward; parameters: once for each update of them
    launched: Launched
    stream: int
    bytes: int
    flops: int
    floor_us: float
    source: str = ""
    sources: tuple[str, ...] = ()  # of all that is launched together
    why: tuple[str, ...] = ()  # rewrites
    waits: tuple[int, ...] = ()  # for lines of other streams, by their numbers
    image: str = ""  # rows and columns, such as 32x32, where it multiplies
    is_view: bool = False  # nothing is launched

    @property
    def us(self) -> float:
        """As predicted, but no less than the floor."""
        return max(self.floor_us, self.launched.predicted_us or 0)


@dataclass(frozen=True)
class Page:
    """All lines in their order, and what is said under them, or about them all."""

    lines: list[Line]
    memory: Memory | str  # a sentence, where none is counted
    gpu: Device
    about: str = ""


class Writer:
    """Writes the lines of moves, and numbers moves by the line behind which each is done."""

    def __init__(self, gpu: Chip, why: Mapping[Value, list[str]]) -> None:
        self.gpu, self.why = gpu, why
        self.lines: list[Line] = []
        self._numbers: dict[Move, int] = {}
        self._waits: tuple[int, ...] = ()  # of the next line

    @contextmanager
    def of(self, move: Move) -> Iterator[None]:
        """Within the block the move's lines are written; what a move waits for that has none, the
        next one waits for."""
        self._waits += tuple(self._numbers[m] for m in move.waits if m in self._numbers)
        yield
        self._numbers[move] = max(len(self.lines) - 1, 0)
        if move.what != "wait":
            self._waits = ()

    def write_nodes(self, nodes: Sequence[Node], pass_: str, made: Launched, stream: int) -> None:
        """The line of nodes that are launched together."""
        node = nodes[-1]
        values = {v for n in nodes if not n.is_view for v in _moved(n)}
        own = {v for n in nodes[:-1] for v in n.outputs.values()}
        moved = sum(v.bytes for v in values - own)
        shape = "x".join(map(str, node.out.shape))
        alike = sum(n.op == node.op for n in nodes)
        name = f"{node.out.name.split('.')[0]} {shape}" + f" and {alike - 1} more" * (alike > 1)
        why = [r for n in nodes for v in n.outputs.values() for r in self.why.get(v, ())]
        flops = sum(map(flops_of, nodes))
        read = [v.dtype for n in nodes for v in n.inputs.values()]
        multiplied = min((d.itemsize for d in read if d.is_floating_point), default=2)
        self.write(
            name,
            node.op,
            pass_,
            made,
            stream,
            moved,
            flops,
            multiplied,
            source=node.source,
            sources=tuple(dict.fromkeys(n.source for n in nodes)),
            why=tuple(dict.fromkeys(why)),
            image=_image(node) if flops else "",
            is_view=all(n.is_view for n in nodes),
        )

    def write(
        self,
        name: str,
        op: str,
        pass_: str,
        made: Launched,
        stream: int,
        moved: int = 0,  # bytes
        flops: int = 0,
        itemsize: int = 2,  # of what is multiplied
        **more: Any,  # source, sources, why, image and is_view
    ) -> None:
        """A line."""
        what = name, op, pass_, made, stream, moved, flops
        at_best = floor(self.gpu, flops, moved, itemsize)
        self.lines.append(Line(*what, at_best, waits=self._waits, **more))
        self._waits = ()


def lines(plan: Plan, gpu: Chip, ops: Kernels = fused_ops) -> list[Line]:
    """The lines of a plan, in the order in which it runs, by these kernels."""
    kernels, s, writer = launched(plan, gpu, ops), plan.schedule, Writer(gpu, plan.graph.why)
    forward = set(s.forward)
    for move in s.moves:
        pass_ = "forward" if move in forward else "backward"
        with writer.of(move):
            for node in move.all_nodes:
                which = "parameters" if node in s.fixed else pass_
                writer.write_nodes((node,), which, kernels[node], move.stream)
    return writer.lines


def page(
    plan: Plan,
    gpu: Chip,
    ops: Kernels = fused_ops,
    memory_of: Callable[[Plan, Chip, Kernels], Memory] = call_memory,
) -> Page:
    """All of a plan that `accelerate` runs, or of one that samples, with its own `memory_of`."""
    interpreted = f"memory: {plan.schedule.peak / 1e6:,.0f} MB of activations at the peak"
    memory = interpreted if is_interpreted() else memory_of(plan, gpu, ops)
    return Page(lines(plan, gpu, ops), memory, gpu.gpu)


def _image(node: Node) -> str:
    """The size of what it makes, if that is an image or parts of one, or steps of a policy."""
    shape = node.out.shape
    if node.op == "stage":  # sums [..., N, C, T]
        return f"1x{shape[-1]}"
    if node.op == "conv_split":  # parts [P, N, C, pixels]
        (_, h, w, _), stride = node.inputs["x"].shape, node.attrs.get("stride", 1)
        return f"{h // stride}x{w // stride}"
    is_image = len(shape) == 4 and node.op not in WEIGHT_GRADS
    return f"{shape[1]}x{shape[2]}" if is_image else ""


def _moved(node: Node) -> set[Value]:
    read = [v for role, v in node.inputs.items() if role != "by_tap"]  # `weight` in another order
    return {*read, *node.outputs.values()}
