"""Both passes of a plan over tensors of the host that stand for a GPU's, to learn what they launch
or how much memory they take.

Nobody writes these tensors, and PyTorch's own kernels see shapes alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from triton_kernels.runtime.device import Device
from triton_kernels.runtime.launch_recorder import Launch, rehearsal

from ..build import Plan
from ..dry_run import META, unwritten
from ..execute import Streams, run_moves
from ..graph import Node, Value
from ..launch.pytorch import as_it_lies
from ..launch.table import BY_PYTORCH, Launcher, launch_kernels
from ..ops import FREE
from ..schedule.moves import Move

HOST = torch.device("cpu")
_VIEWS = (*FREE, "slice", "layout")  # which may make no memory


def starts(plan: Plan) -> dict[Value, Tensor]:
    """What a call of a plan begins with, gradients of results, and what lies in the flat buffers of
    a step, in host memory that nobody writes."""
    begins = [*plan.graph.inputs, *plan.graph.parameters.values()]
    begins += [] if plan.backward is None else plan.backward.seeds.values()
    found = {v: blank(v, v in plan.graph.in_order) for v in begins} | plan.graph.constants
    return found | {v: blank(v, in_order=True) for v in (*plan.low, *plan.placed)}


def launches_of(made: Plan, tensors: Sequence[Tensor], gpu: Device) -> list[Launch]:
    """What both passes would launch for such inputs and parameters on a GPU. So many processes can
    compile it before the first call: a network has more than a hundred kernels, of which each takes
    a second or more."""
    graph = made.graph
    begins = [*graph.inputs, *graph.parameters.values(), *graph.constants]
    there = [*tensors, *graph.constants.values()]
    values = {v: unwritten(x, HOST) for v, x in zip(begins, there, strict=True)}
    values |= {seed: blank(seed) for seed in made.backward.seeds.values()} if made.backward else {}
    with rehearsal(gpu) as launches:
        dry_passes(made, values, launch_kernels.of_backward({}, HOST))
    return launches


def dry_passes(
    plan: Plan,
    values: dict[Value, Tensor],  # as `starts` gives them
    run: Launcher,
    note: Callable[[Node], None] = lambda node: None,  # told of each, in its turn
    watch: Callable[[Move, dict[Value, Tensor]], None] | None = None,  # as `run_moves` has it
) -> None:
    """Both passes over host tensors that nobody writes, within a rehearsal, or where launches are
    noted."""

    def launch(node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        made = launch_dry(run, node, values)
        note(node)
        return made

    run = replace(run, in_places=bool(plan.placed))
    orders = {v: unwritten(values[v], META) for v in plan.graph.parameters.values()}
    with torch.no_grad():
        run_moves(plan.schedule.moves, values, Streams(HOST, others=0), launch, watch=watch)
        for value, parameter in orders.items():
            grad = plan.backward and plan.backward.grads.get(value)
            if grad and grad not in plan.placed:
                # which autograd is given in the order of the parameter
                as_it_lies(unwritten(values[grad], META), parameter, run.kernels)


def launch_dry(run: Launcher, node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
    """What the node makes, over such tensors. PyTorch's kernels are not run."""
    if node.op not in BY_PYTORCH:
        return run(node, values)
    if node.op in _VIEWS:
        return _viewed(run, node, values)
    shapes = {v: unwritten(values[v], META) for v in node.inputs.values()}
    return {v: unwritten(x, HOST) for v, x in run(node, shapes).items()}


def _viewed(run: Launcher, node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
    """What is where `x` is, if strides allow that, or else memory of its own."""
    x = values[node.inputs["x"]]
    shape = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    y = run(node, {**values, node.inputs["x"]: shape})[node.out]
    if y.untyped_storage()._cdata != shape.untyped_storage()._cdata:
        return {node.out: unwritten(y, HOST)}
    start = x.storage_offset() + y.storage_offset()
    return {node.out: x.as_strided(y.shape, y.stride(), start)}


def blank(value: Value, in_order: bool = False) -> Tensor:
    """Its memory; of filters in the order of the kernels, [CO, ..., CI], if `in_order`."""
    if not in_order:
        return torch.empty(value.shape, dtype=value.dtype)
    co, ci, *taps = value.shape
    return torch.empty((co, *taps, ci), dtype=value.dtype).movedim(-1, 1)
