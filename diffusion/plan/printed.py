"""A plan as a page: what runs, by which kernels, what it moves and cannot take less time than.

No GPU is needed: each node is launched over tensors in the host's memory that stand for a GPU's,
and what would be launched is noted (`triton_kernels.runtime.launch_recorder` has the idea).
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from triton_kernels.runtime.device import Device, standing_for

from .build import Plan
from .graph import FREE, JOINED, STAGED, Node, Value
from .on_gpu import ON_GPU, launch_kernels

# of the others that the fused kernels have under the reference's names
_KERNELS = {"norm_table", "norm_apply", "norm", "norm_act_grad", "norm_grad_table", "norm_dx"}
_KERNELS |= {"skip_dx", *ON_GPU, *JOINED, *STAGED}


@dataclass(frozen=True)
class Gpu:
    """What times are estimated for."""

    device: Device
    flops: float  # a second, of matrix products in 16 bits
    bandwidth: float  # bytes a second, read and written


_HOPPER = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True, arch=90)
GPUS = {  # h200 as measured, see benchmarks.harness; the memory of the others by data sheet
    "h200": Gpu(_HOPPER, 790e12, 4.23e12),
    "h100": Gpu(_HOPPER, 790e12, 3.35e12),
    "a100": Gpu(Device(False, 108, 166_912, arch=80), 312e12, 2.04e12),
    "rtx4090": Gpu(Device(False, 128, 101_376, arch=89), 165e12, 1.01e12),
}


@dataclass(frozen=True)
class Line:
    """A node on the page."""

    node: Node
    pass_: str  # forward, backward; parameters: once for each update of them
    kernels: tuple[str, ...]
    config: str
    stream: int
    bytes: int
    flops: int
    floor_us: float
    why: str


def lines(plan: Plan, gpu: Gpu) -> list[Line]:
    """The page of a plan, in the order in which it runs."""
    kernels = launched(plan, gpu)
    found = []
    for i, node in enumerate(plan.schedule.nodes):
        moved, flops = bytes_of(node), flops_of(node)
        seconds = max(moved / gpu.bandwidth, flops / gpu.flops)
        names, config = kernels[node]
        reasons = plan.why.get(node.out, [])
        pass_ = "forward" if i < plan.schedule.start else "backward"
        found.append(
            Line(
                node,
                "parameters" if node in plan.schedule.fixed else pass_,
                names,
                config,
                plan.schedule.stream[node],
                moved,
                flops,
                seconds * 1e6,
                "; ".join(reasons),
            )
        )
    return found


def bytes_of(node: Node) -> int:
    """Read and written at least once."""
    if node.op in FREE:
        return 0
    read = [v for role, v in node.inputs.items() if role != "by_tap"]  # `weight` in another order
    return sum(v.bytes for v in {*read, *node.outputs.values()})


def flops_of(node: Node) -> int:
    """Of matrix products."""
    inputs = node.inputs
    if node.op in ("conv", "conv_fused", "linear"):
        pixels = node.out.numel // node.out.shape[-1]
        columns = sum(value.numel for value in node.many("columns"))
        return 2 * pixels * (inputs["weight"].numel + columns)
    if node.op in ("conv_dx", "linear_dx", "conv_input_grad", "skip_dx"):
        dy = inputs["dy"]
        return 2 * dy.numel // dy.shape[-1] * inputs["weight"].numel
    if node.op in ("conv_dw", "linear_dw"):
        dy = inputs["dy"]
        return 2 * dy.numel // dy.shape[-1] * node.out.numel
    if node.op in ("attention", "attention_grad"):
        backward = node.op == "attention_grad"
        o = inputs["dy"] if backward else node.out
        return (10 if backward else 4) * math.prod(o.shape[1:-1]) * o.numel
    if node.op in STAGED:
        return _flops_of_staged(node)
    return _flops_of_joined(node) if node.op in JOINED else 0


def _flops_of_joined(node: Node) -> int:
    """Of what `join` makes: its convolutions are of stride 1."""
    inputs = node.inputs
    x = inputs.get("x", inputs.get("x0", inputs.get("a")))
    if x is None or node.op == "upsampled_filters":
        return 0
    pixels = x.numel // x.shape[-1]
    if "taps" in inputs:  # 4 of 16 taps are of a pixel in each of 4 places of a block
        small = pixels // 4 if node.op == "conv_upsampled" else pixels
        return 2 * small * inputs["taps"].numel + 2 * pixels * inputs["rest"].numel
    if "weight" not in inputs or len(inputs["weight"].shape) < 2:
        return 0  # of a norm
    columns = sum(value.numel for value in node.many("columns"))
    products = 2 * pixels * (inputs["weight"].numel + columns)
    if node.op in ("qkv_attention", "norm_attention"):
        products += 4 * math.prod(node.out.shape[1:-1]) * node.out.numel
    return products


def _flops_of_staged(node: Node) -> int:
    """Of sums [..., N, C, T], [N, 1, T, C] of the head, or [N, F] of a projection."""
    if node.op not in ("stage", "head", "project"):
        return 0
    if node.op == "stage":
        _, n, _, t = node.out.shape
        positions = n * t // 2 if node.attrs["transposed"] else n * t
    else:
        positions = node.out.numel // node.out.shape[-1]
    return 2 * positions * node.inputs["weight"].numel


# --- which kernels --------------------------------------------------------------------------------


def launched(plan: Plan, gpu: Gpu) -> dict[Node, tuple[tuple[str, ...], str]]:
    """Of each node the kernels that it launches on such a GPU, and the configuration of the
    first."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return {node: ((node.op,), "") for node in plan.schedule.nodes}
    values = {v: _blank(v) for v in (*plan.graph.inputs, *plan.graph.parameters.values())}
    values |= plan.graph.constants
    if plan.backward is not None:
        values |= {seed: _blank(seed) for seed in plan.backward.seeds.values()}
    found = {}
    with standing_for(gpu.device), _noting() as notes, torch.no_grad():
        for node in plan.schedule.nodes:
            notes.clear()
            if node.op in _KERNELS:
                values.update(launch_kernels(node, values))
                names = tuple(name for name, _ in notes) or ("PyTorch",)
                found[node] = names, notes[0][1] if notes else ""
            else:
                values.update({value: _blank(value) for value in node.outputs.values()})
                found[node] = ("" if node.op in FREE else "PyTorch",), ""
            for value in plan.schedule.last.get(node, ()):
                values.pop(value, None)
    return found


def _blank(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype)


@contextmanager
def _noting() -> Iterator[list[tuple[str, str]]]:
    """Within the block kernels are not launched, but noted: names and configurations."""
    notes: list[tuple[str, str]] = []

    def note(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | options
        blocks = {k.removeprefix("BLOCK_"): v for k, v in given.items() if k.startswith("BLOCK")}
        more = {k: given[k] for k in ("num_warps", "num_stages") if k in given}
        numbers = {k: v for k, v in (blocks | more).items() if isinstance(v, int)}
        notes.append((self.__name__.strip("_"), " ".join(f"{k}={v}" for k, v in numbers.items())))

    run = JITFunction.run
    JITFunction.run = note
    try:
        yield notes
    finally:
        JITFunction.run = run


# --- as text and as a picture ---------------------------------------------------------------------


def table(found: list[Line], plan: Plan) -> str:
    """The page, without what is done for parameters alone, and sums under it."""
    rows = [("#", "node", "kernel", "configuration", "stream", "MB", "floor us", "from", "why")]
    for i, line in enumerate(found):
        if line.node.op in FREE or line.pass_ == "parameters":
            continue
        shape = "x".join(map(str, line.node.out.shape))
        name = line.node.out.name.split(".")[0]
        rows.append(
            (
                str(i),
                f"{name} {shape}",
                ", ".join(line.kernels),
                line.config,
                str(line.stream),
                f"{line.bytes / 1e6:.2f}",
                f"{line.floor_us:.1f}",
                line.node.source,
                line.why,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    widths[2], widths[3] = min(widths[2], 60), min(widths[3], 40)
    text = []
    for row in rows:
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=False)]
        text.append("  ".join((*cells, row[-1])).rstrip())
    return "\n".join((*text, "", *summary(found, plan)))


def summary(found: list[Line], plan: Plan) -> list[str]:
    said = []
    for pass_ in ("parameters", "forward", "backward"):
        of = [line for line in found if line.pass_ == pass_ and line.node.op not in FREE]
        if of:
            time = sum(line.floor_us for line in of)
            moved = sum(line.bytes for line in of) / 1e9
            often = " (once for each update of them)" if pass_ == "parameters" else ""
            said.append(
                f"{pass_}{often}: {len(of)} nodes, {sum(len(x.kernels) for x in of)} launches,"
                f" {moved:.2f} GB, at least {time:,.0f} us"
            )
    s = plan.schedule
    said.append(f"memory: {s.peak / 1e6:,.0f} MB at the peak, {s.arena / 1e6:,.0f} MB with holes")
    return said


def draw(found: list[Line], path: Path) -> None:
    """The timeline: each node as long as its floor, a row a stream."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = ("conv", "norm", "attention", "linear", "other")
    figure = Figure(figsize=(14, 3))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends, bars = [0.0, 0.0], {group: [] for group in groups}
    for line in found:
        if line.pass_ == "parameters":
            continue
        # what is beside the chain begins when what it reads is there: no earlier than the chain
        start = max(ends[line.stream], ends[0] if line.stream else 0)
        group = next((g for g in groups if line.node.op.startswith(g)), "other")
        group = "norm" if line.node.op in ("moments", "skip_dx") else group
        bars[group].append((line.stream, start, line.floor_us))
        ends[line.stream] = start + line.floor_us
    for i, (group, given) in enumerate(bars.items()):
        rows, starts, lengths = zip(*given, strict=True) if given else ((), (), ())
        options = {"color": f"C{i}", "label": group, "edgecolor": "white", "linewidth": 0.2}
        axes.barh(rows, lengths, left=starts, **options)
    axes.set_yticks([0, 1], ["chain", "weight gradients"])
    axes.invert_yaxis()
    axes.set_xlabel("us, as far as memory and products cannot be quicker")
    axes.legend(ncols=len(groups), loc="upper center", bbox_to_anchor=(0.5, 1.2), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
