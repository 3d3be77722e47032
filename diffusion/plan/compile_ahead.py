"""The launches of a plan, recorded before its first call on a GPU, so that many processes compile
its kernels and not one: a network has more than a hundred, each of which takes a second or more."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from triton_kernels.runtime.device import Device
from triton_kernels.runtime.launch_recorder import Launch, rehearsal

from .build import Plan
from .execute import Streams, run_moves
from .graph import Node, Value
from .launch.table import BY_PYTORCH, launch_kernels

_HOST, _META = torch.device("cpu"), torch.device("meta")


def launches_of(made: Plan, tensors: Sequence[Tensor], gpu: Device) -> list[Launch]:
    """Those of both passes, for such inputs and parameters on a GPU. Nothing is launched: tensors
    are the host's, whose memory nobody writes, and PyTorch's own kernels see shapes alone."""
    graph, back = made.graph, made.backward
    starts = [*graph.inputs, *graph.parameters.values(), *graph.constants]
    there = [*tensors, *graph.constants.values()]
    values = {v: _like(x, _HOST) for v, x in zip(starts, there, strict=True)}
    streams, run = Streams(_HOST, others=1), launch_kernels.of_backward({}, _HOST)

    def launch(node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        if node.op not in BY_PYTORCH:
            return run(node, values)
        shapes = {v: _like(values[v], _META) for v in node.inputs.values() if v is not None}
        return {v: _like(x, _HOST) for v, x in run(node, shapes).items()}

    with rehearsal(gpu) as launches, torch.no_grad():
        run_moves(made.schedule.forward, values, streams, launch)
        if back is not None:
            for seed in back.seeds.values():
                values[seed] = torch.empty(seed.shape, dtype=seed.dtype)
            run_moves(made.schedule.backward, values, streams, launch)
    return launches


def _like(x: Tensor, device: torch.device) -> Tensor:
    """Memory of the same shape, order and dtype, that nobody has written."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
