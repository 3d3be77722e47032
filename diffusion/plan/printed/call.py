"""The memory of a call that `accelerate` launches, counted in a dry run as that of a step is."""

from typing import NamedTuple

from torch import Tensor

from triton_kernels.registry.chips import Chip

from ..build import Plan
from ..graph import Value
from ..launch.table import Kernels, launcher_of
from ..moves import Move
from .kernels import HOST, dry_run, noting, starts
from .memory import Allocations


class CallMemory(NamedTuple):
    """Bytes at the peak of a call, by what they are for. Beside these are its inputs, gradients of
    its results and of earlier calls, and what PyTorch's own kernels need for themselves."""

    parameters: int  # and buffers
    activations: int  # and gradients of activations
    results: int  # of the call, and gradients of parameters and inputs
    rows: int  # that are summed to gradients of norms and biases
    launches: int  # what launchers make for themselves
    at: str  # what is made then

    @property
    def total(self) -> int:
        return self.parameters + self.activations + self.results + self.rows + self.launches

    def __str__(self) -> str:
        parts = {
            "parameters": self.parameters,
            "activations and their gradients": self.activations,
            "results, and gradients of parameters": self.results,
            "rows that are summed to gradients of norms and biases": self.rows,
            "what launches need for themselves, such as parts of sums": self.launches,
        }
        said = "; ".join(f"{size / 1e6:,.0f} MB of {what}" for what, size in parts.items() if size)
        total = f"{self.total / 1e6:,.0f} MB at the peak of a call ({self.at})"
        return f"memory: {total}, beside its inputs: {said}"


def call_memory(plan: Plan, gpu: Chip, ops: Kernels) -> CallMemory:
    """Of a forward pass and, if the plan has one, the backward pass behind it."""
    graph, back = plan.graph, plan.backward
    kept = {*graph.outputs, *(() if back is None else back.grads.values())}
    found: dict[bool, set[int]] = {True: set(), False: set()}  # of what is kept; of other values
    behind: list[tuple[int, str]] = []  # the peak so far behind moves, and what these have made
    launcher, tables = launcher_of(ops), {}

    def watch(move: Move, values: dict[Value, Tensor]) -> None:
        for value in move.made:
            if value in values:
                found[value in kept] |= counted.numbers((values[value],))
        if move.nodes:
            behind.append((counted.peak, move.nodes[0].out.name))

    with noting(gpu):
        dry_run(plan, starts(plan), launcher.of_backward(tables, HOST))  # which learns the rows
        begins = starts(plan)
        with Allocations() as counted:
            run = launcher.of_backward(tables, HOST)
            rows = set() if run.sums is None else counted.numbers(run.sums.workspaces)
            dry_run(plan, begins, run, watch=watch)
    results, others = found[True] - rows, found[False] - found[True] - rows
    return CallMemory(
        parameters=sum(v.bytes for v in (*graph.parameters.values(), *graph.constants)),
        activations=counted.at_peak(others),
        results=counted.at_peak(results),
        rows=counted.at_peak(rows),
        launches=counted.peak - counted.at_peak(others | results | rows),
        at=next((name for peak, name in behind if peak == counted.peak), "its end"),
    )
