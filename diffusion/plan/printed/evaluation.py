"""The memory of an evaluation in sampling, counted in a dry run as that of a step is."""

from collections.abc import Mapping

import torch
from torch import Tensor

from triton_kernels.registry.chips import Chip

from ..build import Plan
from ..calls.dry_passes import launch_dry, starts
from ..evaluation import Evaluation
from ..graph import Node, Value
from ..launch.table import Kernels, filters, launcher_of
from .kernels import noting
from .memory import LAUNCHES, Allocations, Memory


def evaluation_memory(
    plan: Plan,
    gpu: Chip,
    ops: Kernels,
    network: int,  # bytes of the network's parameters and buffers
    copied: int | None,  # bytes of the sampler's copy of them; None: of what it reads as it is
    shared: int = 0,  # how many inputs behind the first many evaluations share
) -> Memory:
    """Of what `Evaluation` runs."""
    graph, run, begins = plan.graph, launcher_of(ops), starts(plan)
    parameters = {name: begins[value] for name, value in graph.parameters.items()}
    if copied is not None:  # in the order of its filters
        parameters = {name: filters(x) if x.ndim == 4 else x for name, x in parameters.items()}
    made: set[int] = set()  # numbers of the memory that is of values

    def launch(node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        found = launch_dry(run, node, values)
        made.update(counted.numbers(found.values()))
        counted.has_made(node.out.name)
        return found

    with noting(gpu), torch.no_grad(), Allocations() as counted:
        evaluation = Evaluation(plan, parameters, launch, graph.inputs[1 : 1 + shared])
        held, copies = counted.numbers(evaluation.values.values()), counted.now
        made.clear()
        counted.forget()
        given = [nodes[-1].out for nodes in evaluation.parts.values()]
        given += [value for value in graph.inputs if value not in evaluation.parts]
        inputs = {value: torch.empty(value.shape, dtype=value.dtype) for value in given}
        made.update(counted.numbers(inputs.values()))
        evaluation(inputs)
    activations = counted.at_peak(made - held)
    read = evaluation.values.keys() & graph.parameters.values()
    parts = {
        "parameters": network,
        "their copies for the kernels": copies
        + (sum(value.bytes for value in read) if copied is None else copied),
        "activations": activations,
        LAUNCHES: counted.peak - copies - activations,
    }
    beside = "the images, the noise and the chain's tables"
    return Memory("an evaluation", beside, parts, counted.at)
