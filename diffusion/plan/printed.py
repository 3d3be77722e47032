"""Prints a plan: each node with its kernels, the bytes it moves, and a lower bound of its time.

No GPU is needed: each node is launched over host tensors that stand for a GPU's, and its launches
are recorded, as in `triton_kernels.runtime.launch_recorder`.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from triton_kernels import fused_ops
from triton_kernels.registry.chips import Chip, floor
from triton_kernels.registry.choose import Decision, noted
from triton_kernels.runtime.launch_recorder import noting_launches

from .build import Plan
from .calls.table import BY_PYTORCH, Kernels, launcher_of
from .execute import Streams, run_moves
from .graph import FREE, Node, Value
from .moves import Move

# of which each multiplies a gradient with all filters
INPUT_GRADS = (
    "conv_dx", "linear_dx", "conv_input_grad", "skip_dx", "conv_down_dx", "skip_backward",
)  # fmt: skip

_PRODUCTS = (  # which multiply each pixel with all filters
    *INPUT_GRADS, "conv", "linear", "conv_fused", "conv_down", "conv_few", "conv_split",
    "conv_norm", "conv_norm_grid_sync", "norm_conv", "norm_conv_of_two",
    "projected_attention", "head", "project",
)  # fmt: skip


@dataclass(frozen=True)
class Launched:
    """What nodes launch."""

    kernels: tuple[str, ...]
    config: str = ""  # of the first
    predicted_us: float | None = None  # None: no times were fitted to these kernels


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
    source: str
    why: str
    waits: tuple[int, ...] = ()  # for lines of other streams, by their numbers

    @property
    def us(self) -> float:
        """As predicted, but no less than the floor."""
        return max(self.floor_us, self.launched.predicted_us or 0)


@dataclass(frozen=True)
class Page:
    """All lines in their order, and what is said under them."""

    lines: list[Line]
    memory: str


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

    def write(self, nodes: Sequence[Node], pass_: str, made: Launched, stream: int) -> None:
        """The line of nodes that are launched together."""
        node = nodes[-1]
        values = {v for n in nodes if n.op not in FREE for v in _moved(n)}
        own = {v for n in nodes[:-1] for v in n.outputs.values()}
        moved = sum(v.bytes for v in values - own)
        shape = "x".join(map(str, node.out.shape))
        alike = sum(n.op == node.op for n in nodes)
        name = f"{node.out.name.split('.')[0]} {shape}" + f" and {alike - 1} more" * (alike > 1)
        why = [r for n in nodes for v in n.outputs.values() for r in self.why.get(v, ())]
        said = node.source, "; ".join(dict.fromkeys(why))
        self.write_other(
            name, node.op, pass_, made, stream, moved, sum(map(flops_of, nodes)), *said
        )

    def write_other(
        self,
        name: str,
        op: str,
        pass_: str,
        made: Launched,
        stream: int,
        moved: int,  # bytes
        flops: int = 0,
        source: str = "",
        why: str = "",
    ) -> None:
        least = floor(self.gpu, flops, moved)
        what = name, op, pass_, made, stream, moved, flops, least, source, why
        self.lines.append(Line(*what, self._waits))
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
                writer.write((node,), which, kernels[node], move.stream)
    return writer.lines


def page(plan: Plan, gpu: Chip, ops: Kernels = fused_ops) -> Page:
    return Page(lines(plan, gpu, ops), f"memory: {plan.schedule.peak / 1e6:,.0f} MB at the peak")


def _moved(node: Node) -> set[Value]:
    read = [v for role, v in node.inputs.items() if role != "by_tap"]  # `weight` in another order
    return {*read, *node.outputs.values()}


def flops_of(node: Node) -> int:
    """Of matrix products."""
    op, inputs, out = node.op, node.inputs, node.out
    if op in ("attention", "attention_grad"):
        o = inputs.get("dy", out)
        keys = next(inputs[role] for role in ("qkv", "kv", "k") if role in inputs)
        return (10 if "dy" in inputs else 4) * math.prod(keys.shape[1:-1]) * o.numel
    if op in ("conv_dw", "linear_dw"):
        return 2 * _pixels(inputs["dy"]) * out.numel
    if op == "stage":  # sums [..., N, C, T]
        _, n, _, t = out.shape
        return 2 * (n * t // 2 if node.attrs["transposed"] else n * t) * inputs["weight"].numel
    if "taps" in inputs:  # 4 of 16 are of a pixel in each of 4 places of a block
        pixels = _pixels(inputs.get("dy", inputs.get("a", inputs.get("x"))))
        small = pixels if op == "conv_of_upsampled" else pixels // 4
        return 2 * (small * inputs["taps"].numel + pixels * inputs["rest"].numel)
    if op not in _PRODUCTS:
        return 0
    of = inputs["dy"] if op in INPUT_GRADS else inputs["x"] if op == "conv_split" else out
    each = inputs["weight"].numel + sum(value.numel for value in node.many("columns"))
    if op == "projected_attention":
        return 2 * _pixels(of) * each + 4 * math.prod(out.shape[1:-1]) * out.numel
    return 2 * _pixels(of) * each


def _pixels(image: Value) -> int:
    return image.numel // image.shape[-1]


# --- which kernels --------------------------------------------------------------------------------


def launched(plan: Plan, gpu: Chip, ops: Kernels = fused_ops) -> dict[Node, Launched]:
    """Of each node what it launches on such a GPU, of these kernels."""
    if is_interpreted():
        return {node: Launched((node.op,)) for node in plan.schedule.nodes}
    values = {v: _blank(v) for v in (*plan.graph.inputs, *plan.graph.parameters.values())}
    values |= plan.graph.constants
    if plan.backward is not None:
        values |= {seed: _blank(seed) for seed in plan.backward.seeds.values()}
    found, run = {}, launcher_of(ops)

    def launch(node: Node, values: Mapping[Value, torch.Tensor]) -> dict[Value, torch.Tensor]:
        if node.op in BY_PYTORCH:
            found[node] = Launched(("" if node.op in FREE else "PyTorch",))
            return {value: _blank(value) for value in node.outputs.values()}
        made = run(node, values)
        found[node] = notes.taken()
        return made

    with noting(gpu) as notes, torch.no_grad():
        run_moves(plan.schedule.moves, values, Streams(torch.device("cpu"), others=0), launch)
    return found


def _blank(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype)


def is_interpreted() -> bool:
    """Whether there are no kernels to be noted."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Notes:
    """What would have been launched, and what `select` took."""

    def __init__(self, gpu: Chip, decisions: list[Decision]) -> None:
        self.gpu, self.decisions = gpu, decisions
        self.launches: list[tuple[str, str]] = []  # names and configurations

    def taken(self) -> Launched:
        """All since the last call."""
        names = tuple(name for name, _ in self.launches) or ("PyTorch",)
        config = self.launches[0][1] if self.launches else ""
        device = self.gpu.gpu
        own = [d for d in self.decisions if not d.choice.kernel.delegates]
        times = [d.choice.kernel.model(d.spec, device, d.choice.config) for d in own]
        self.launches.clear()
        self.decisions.clear()
        known = times and None not in times
        return Launched(names, config, sum(times) if known else None)


@contextmanager
def noting(gpu: Chip) -> Iterator[Notes]:
    """Within the block kernels are not launched, but noted, for tensors in the host's memory that
    stand for such a GPU's."""

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | options
        blocks = {k.removeprefix("BLOCK_"): v for k, v in given.items() if k.startswith("BLOCK")}
        more = {k: given[k] for k in ("num_warps", "num_stages") if k in given}
        numbers = {k: v for k, v in (blocks | more).items() if isinstance(v, int)}
        notes.launches.append(
            (self.__name__.strip("_"), " ".join(f"{k}={v}" for k, v in numbers.items()))
        )

    with noting_launches(gpu.gpu, note), noted() as decisions:
        notes = Notes(gpu, decisions)
        yield notes


# --- as text and as a picture ---------------------------------------------------------------------


def table(page: Page) -> str:
    """The page, without what is done for parameters alone, and sums under it."""
    head = ("#", "node", "kernel", "configuration", "stream", "MB", "floor us", "predicted us")
    rows = [(*head, "from", "why")]
    for i, line in enumerate(page.lines):
        if line.op in FREE or line.pass_ == "parameters":
            continue
        made = line.launched
        rows.append(
            (
                str(i),
                line.name,
                ", ".join(made.kernels),
                made.config,
                str(line.stream),
                f"{line.bytes / 1e6:.2f}",
                f"{line.floor_us:.1f}",
                "-" if made.predicted_us is None else f"{made.predicted_us:.1f}",
                line.source,
                line.why,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    widths[2], widths[3] = min(widths[2], 60), min(widths[3], 40)
    text = []
    for row in rows:
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=False)]
        text.append("  ".join((*cells, row[-1])).rstrip())
    return "\n".join((*text, "", *summary(page)))


def summary(page: Page) -> list[str]:
    said = []
    for pass_ in ("parameters", "forward", "backward"):
        of = [line for line in page.lines if line.pass_ == pass_ and line.op not in FREE]
        if of:
            time = sum(line.floor_us for line in of)
            moved = sum(line.bytes for line in of) / 1e9
            often = " (once for each update of them)" if pass_ == "parameters" else ""
            launches = sum(len(x.launched.kernels) for x in of)
            said.append(
                f"{pass_}{often}: {len(of)} nodes, {launches} launches,"
                f" {moved:.2f} GB, at least {time:,.0f} us"
            )
    return [*said, page.memory]


STREAMS = ("chain", "weight gradients", "held", "embedding")


def times(page: Page) -> list[tuple[float, float]]:
    """When each line begins and ends, if each takes its `us`, one after the other on its stream,
    and waits for what it has to. What stands beside the chain and waits for nothing named begins no
    earlier than what the chain has been given before it."""
    ends, found = dict.fromkeys(range(len(STREAMS)), 0.0), []
    for line in page.lines:
        skipped = line.pass_ == "parameters" or line.op in FREE
        start = max([ends[line.stream], *(found[i][1] for i in line.waits)])
        if line.stream and not line.waits:
            start = max(start, ends[0])
        found.append((start, start if skipped else start + line.us))
        ends[line.stream] = found[-1][1]
    return found


def draw(page: Page, path: Path) -> None:
    """The timeline: each line as long as it is predicted to take, or cannot be quicker than; a row
    a stream."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = ("conv", "norm", "attention", "linear", "other")
    used = sorted({line.stream for line in page.lines})
    figure = Figure(figsize=(14, 1.6 + 0.7 * len(used)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars: dict[str, list] = {group: [] for group in groups}
    for line, (start, end) in zip(page.lines, times(page), strict=True):
        group = next((g for g in groups if line.op.startswith(g)), "other")
        group = "norm" if line.op in ("moments", "skip_dx", "skip_backward") else group
        bars[group].append((used.index(line.stream), start, end - start))
    for i, (group, given) in enumerate(bars.items()):
        rows, starts, lengths = zip(*given, strict=True) if given else ((), (), ())
        options = {"color": f"C{i}", "label": group, "edgecolor": "white", "linewidth": 0.2}
        axes.barh(rows, lengths, left=starts, **options)
    behind = [
        start
        for line, (start, _) in zip(page.lines, times(page), strict=True)
        if line.pass_ == "backward" and line.stream == 0
    ]
    if behind:
        axes.axvline(behind[0], color="0.3", linewidth=1)
        beside = len(used) > 1  # where there is room beside the bars
        axes.annotate(" backward", (behind[0], 0.6 if beside else -0.45), va="top", color="0.3")
    axes.set_yticks(range(len(used)), [STREAMS[stream] for stream in used])
    axes.invert_yaxis()
    axes.set_xlabel("us: as predicted where times were fitted, else no quicker than memory allows")
    axes.legend(ncols=len(groups), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
