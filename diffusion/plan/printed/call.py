"""The memory of a call that `accelerate` launches, counted in a dry run as that of a step is."""

from torch import Tensor

from triton_kernels.registry.chips import Chip

from ..build import Plan
from ..calls.dry_passes import HOST, dry_passes, starts
from ..graph import Value
from ..launch.table import Kernels, launcher_of
from ..schedule.moves import Move
from .kernels import noting
from .memory import ACTIVATIONS, LAUNCHES, ROWS, Allocations, Memory


def call_memory(plan: Plan, gpu: Chip, ops: Kernels) -> Memory:
    """Of a forward pass and, if the plan has one, the backward pass behind it; without gradients of
    its results and of earlier calls, and what PyTorch's own kernels need for themselves."""
    graph, back = plan.graph, plan.backward
    kept = {*graph.outputs, *(() if back is None else back.grads.values())}
    found: dict[bool, set[int]] = {True: set(), False: set()}  # of what is kept; of other values
    launcher, tables = launcher_of(ops), {}

    def watch(move: Move, values: dict[Value, Tensor]) -> None:
        for value in move.made:
            if value in values:
                found[value in kept] |= counted.numbers((values[value],))
        if move.nodes:
            counted.has_made(move.nodes[0].out.name)

    with noting(gpu):
        dry_passes(plan, starts(plan), launcher.of_backward(tables, HOST))  # which learns the rows
        begins = starts(plan)
        with Allocations() as counted:
            run = launcher.of_backward(tables, HOST)
            rows = set() if run.sums is None else counted.numbers(run.sums.workspaces)
            dry_passes(plan, begins, run, watch=watch)
    results, others = found[True] - rows, found[False] - found[True] - rows
    parts = {
        "parameters": sum(v.bytes for v in (*graph.parameters.values(), *graph.constants)),
        ACTIVATIONS: counted.at_peak(others),
        "results, and gradients of parameters": counted.at_peak(results),
        ROWS: counted.at_peak(rows),
        LAUNCHES: counted.peak - counted.at_peak(others | results | rows),
    }
    return Memory("a call", "its inputs", parts, counted.at)
