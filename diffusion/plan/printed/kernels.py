"""Which kernels nodes launch on a GPU.

No GPU is needed: each node is launched over host tensors that stand for a GPU's, and its launches
are noted, as in `triton_kernels.runtime.launch_recorder`.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from triton_kernels import fused_ops
from triton_kernels.registry.chips import Chip
from triton_kernels.registry.choose import Decision, noted
from triton_kernels.runtime.launch_recorder import noting_launches

from ..build import Plan
from ..dry_run import META, launch_on_shapes, unwritten
from ..execute import Streams, run_moves
from ..graph import Node, Value
from ..launch.pytorch import as_it_lies
from ..launch.table import BY_PYTORCH, Kernels, Launcher, launcher_of
from ..moves import Move
from ..ops import FREE

HOST = torch.device("cpu")
_VIEWS = (*FREE, "slice", "layout")  # which may make no memory


@dataclass(frozen=True)
class Launched:
    """What nodes launch."""

    kernels: tuple[str, ...]
    config: str = ""  # of the first
    predicted_us: float | None = None  # None: no times were fitted to these kernels
    decisions: tuple[Decision, ...] = ()  # answers of the registry


def launched(plan: Plan, gpu: Chip, ops: Kernels = fused_ops) -> dict[Node, Launched]:
    """Of each node what it launches on such a GPU, of these kernels."""
    if is_interpreted():
        return {node: Launched((node.op,)) for node in plan.schedule.nodes}
    found = {}

    def note(node: Node) -> None:
        free = node.is_view and node.op in BY_PYTORCH
        found[node] = Launched(("",)) if free else notes.taken()

    with noting(gpu) as notes:
        dry_run(plan, starts(plan), launcher_of(ops).of_backward({}, HOST), note)
    return found


def starts(plan: Plan) -> dict[Value, Tensor]:
    """What a call of a plan begins with, and gradients of results, in host memory that nobody
    writes."""
    begins = [*plan.graph.inputs, *plan.graph.parameters.values()]
    begins += [] if plan.backward is None else plan.backward.seeds.values()
    return {v: _blank(v, v in plan.graph.in_order) for v in begins} | plan.graph.constants


def dry_run(
    plan: Plan,
    values: dict[Value, Tensor],  # as `starts` gives them
    run: Launcher,
    note: Callable[[Node], None] = lambda node: None,  # told of each, in its turn
    watch: Callable[[Move, dict[Value, Tensor]], None] | None = None,  # as `run_moves` has it
) -> None:
    """Both passes over host tensors that nobody writes, within `noting`."""

    def launch(node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        made = launch_dry(run, node, values)
        note(node)
        return made

    orders = {v: unwritten(values[v], META) for v in plan.graph.parameters.values()}
    with torch.no_grad():
        run_moves(plan.schedule.moves, values, Streams(HOST, others=0), launch, watch=watch)
        for value, parameter in orders.items():
            grad = plan.backward and plan.backward.grads.get(value)
            if grad:  # which autograd is given in the order of the parameter
                as_it_lies(unwritten(values[grad], META), parameter, run.kernels)


def launch_dry(run: Launcher, node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
    """What the node makes, over such tensors. PyTorch's kernels are not run."""
    if node.op in BY_PYTORCH and node.op in _VIEWS:
        return _viewed(run, node, values)
    if node.op in BY_PYTORCH:
        return launch_on_shapes(run, node, values)
    return run(node, values)


def _viewed(run: Launcher, node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
    """What is where `x` is, if strides allow that, or else memory of its own."""
    x = values[node.inputs["x"]]
    shape = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    y = run(node, {**values, node.inputs["x"]: shape})[node.out]
    if y.untyped_storage()._cdata != shape.untyped_storage()._cdata:
        return {node.out: _blank(node.out)}
    start = x.storage_offset() + y.storage_offset()
    return {node.out: x.as_strided(y.shape, y.stride(), start)}


def _blank(value: Value, in_order: bool = False) -> Tensor:
    last = in_order and len(value.shape) == 4
    order = torch.channels_last if last else torch.contiguous_format
    return torch.empty(value.shape, dtype=value.dtype, memory_format=order)


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
        answers = tuple(self.decisions)
        self.launches.clear()
        self.decisions.clear()
        known = times and None not in times
        return Launched(names, config, sum(times) if known else None, answers)


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
