"""The memory of an evaluation in sampling, counted in a dry run as that of a step is."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from triton_kernels.registry.chips import Chip

from ..build import Plan
from ..evaluation import Evaluation
from ..graph import Node, Value
from ..launch.table import Kernels, filters, launcher_of
from .kernels import launch_dry, noting, starts
from .memory import Allocations


class EvaluationMemory(NamedTuple):
    """Bytes at the peak of an evaluation, by what they are for. Beside these are the images, the
    noise and the tables of the chain."""

    network: int  # the network's own parameters and buffers
    copies: int  # of these as they are multiplied: made once
    activations: int
    launches: int  # what launchers make for themselves
    at: str  # what is made then

    @property
    def total(self) -> int:
        return self.network + self.copies + self.activations + self.launches

    def __str__(self) -> str:
        megabytes = (f"{bytes_ / 1e6:,.0f} MB" for bytes_ in (self.total, *self[:4]))
        total, network, copies, activations, launches = megabytes
        return (
            f"memory: {total} at the peak of an evaluation ({self.at}), beside the images and the"
            f" chain's tables: {network} of parameters; {copies} of their copies for the kernels;"
            f" {activations} of activations; {launches} of what launches need for themselves, such"
            " as parts of sums"
        )


def evaluation_memory(
    plan: Plan,
    gpu: Chip,
    ops: Kernels,
    network: int,  # bytes of the network's parameters and buffers
    copied: int | None,  # bytes of the sampler's copy of them; None: of what it reads as it is
    shared: int = 0,  # how many inputs behind the first many evaluations share
) -> EvaluationMemory:
    """Of what `Evaluation` runs."""
    graph, run, begins = plan.graph, launcher_of(ops), starts(plan)
    parameters = {name: begins[value] for name, value in graph.parameters.items()}
    if copied is not None:  # in the order of its filters
        parameters = {name: filters(x) if x.ndim == 4 else x for name, x in parameters.items()}
    made: set[int] = set()  # numbers of the memory that is of values
    behind: list[tuple[int, str]] = []  # the peak so far behind nodes, and what these have made

    def launch(node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        found = launch_dry(run, node, values)
        made.update(counted.numbers(found.values()))
        behind.append((counted.peak, node.out.name))
        return found

    with noting(gpu), torch.no_grad(), Allocations() as counted:
        evaluation = Evaluation(plan, parameters, launch, graph.inputs[1 : 1 + shared])
        held, copies = counted.numbers(evaluation.values.values()), counted.now
        made.clear()
        behind.clear()
        counted.peak = copies
        given = [nodes[-1].out for nodes in evaluation.parts.values()]
        given += [value for value in graph.inputs if value not in evaluation.parts]
        inputs = {value: torch.empty(value.shape, dtype=value.dtype) for value in given}
        made.update(counted.numbers(inputs.values()))
        evaluation(inputs)
    activations = counted.at_peak(made - held)
    read = evaluation.values.keys() & graph.parameters.values()
    return EvaluationMemory(
        network=network,
        copies=copies + (sum(value.bytes for value in read) if copied is None else copied),
        activations=activations,
        launches=counted.peak - copies - activations,
        at=next((name for peak, name in behind if peak == counted.peak), "its end"),
    )
