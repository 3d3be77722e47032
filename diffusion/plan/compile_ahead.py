"""The launches of a plan, recorded before its first call on a GPU, so that many processes compile
its kernels and not one: a network has more than a hundred, each of which takes a second or more."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from triton_kernels.runtime.device import Device
from triton_kernels.runtime.launch_recorder import Launch, rehearsal

from .build import Plan
from .dry_run import launch_on_shapes, unwritten
from .execute import Streams, run_moves
from .graph import Node, Value
from .launch.pytorch import as_it_lies
from .launch.table import BY_PYTORCH, launch_kernels

_HOST = torch.device("cpu")


def launches_of(made: Plan, tensors: Sequence[Tensor], gpu: Device) -> list[Launch]:
    """Those of both passes, for such inputs and parameters on a GPU. Nothing is launched: tensors
    are the host's, whose memory nobody writes, and PyTorch's own kernels see shapes alone."""
    graph, back = made.graph, made.backward
    starts = [*graph.inputs, *graph.parameters.values(), *graph.constants]
    there = [*tensors, *graph.constants.values()]
    values = {v: unwritten(x, _HOST) for v, x in zip(starts, there, strict=True)}
    streams, run = Streams(_HOST, others=1), launch_kernels.of_backward({}, _HOST)

    def launch(node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        if node.op in BY_PYTORCH:
            return launch_on_shapes(run, node, values)
        return run(node, values)

    with rehearsal(gpu) as launches, torch.no_grad():
        run_moves(made.schedule.forward, values, streams, launch)
        if back is not None:
            for seed in back.seeds.values():
                values[seed] = torch.empty(seed.shape, dtype=seed.dtype)
            run_moves(made.schedule.backward, values, streams, launch)
            for value, x in zip(
                graph.parameters.values(), tensors[len(graph.inputs) :], strict=True
            ):
                if value in back.grads:
                    as_it_lies(values[back.grads[value]], x, run.kernels)
    return launches
