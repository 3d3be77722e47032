"""The launches of a plan, recorded before its first call on a GPU, so that many processes compile
its kernels and not one: a network has more than a hundred, each of which takes a second or more."""

from collections.abc import Sequence

from torch import Tensor

from triton_kernels.runtime.device import Device
from triton_kernels.runtime.launch_recorder import Launch, rehearsal

from .build import Plan
from .dry_passes import HOST, blank, dry_passes
from .dry_run import unwritten
from .launch.table import launch_kernels


def launches_of(made: Plan, tensors: Sequence[Tensor], gpu: Device) -> list[Launch]:
    """Those of both passes, for such inputs and parameters on a GPU. Nothing is launched."""
    graph = made.graph
    begins = [*graph.inputs, *graph.parameters.values(), *graph.constants]
    there = [*tensors, *graph.constants.values()]
    values = {v: unwritten(x, HOST) for v, x in zip(begins, there, strict=True)}
    values |= {seed: blank(seed) for seed in made.backward.seeds.values()} if made.backward else {}
    with rehearsal(gpu) as launches:
        dry_passes(made, values, launch_kernels.of_backward({}, HOST))
    return launches
