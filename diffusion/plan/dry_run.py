"""Runs launchers on tensors without memory, to learn what they would launch.

A pass that chooses a kernel by another kernel's number of tiles has to know that number, and only
the launcher does. `DryRun` visits nodes like `execute.run`, with tensors on the device "meta",
which have shapes but no memory, and launches no kernel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from triton_kernels.registry.search import paused
from triton_kernels.runtime.device import Device
from triton_kernels.runtime.launch_recorder import noting_launches

from .graph import Graph, Node, Value

META = torch.device("meta")


@contextmanager
def nothing_launched(gpu: Device) -> Iterator[None]:
    """Within the block this thread launches no kernel, and launchers take any tensor for one of
    this GPU."""

    def nothing(*args: Any, **options: Any) -> None:
        pass

    with noting_launches(gpu, nothing, (JITFunction, InterpretedFunction)), paused():
        with torch.no_grad():
            yield


def unwritten(x: Tensor, device: torch.device) -> Tensor:
    """Memory of the same shape, order and dtype, that nobody has written."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


class DryRun:
    """Stand-ins of a graph's values, as far as nodes have been run."""

    def __init__(self, graph: Graph, parameters: dict[str, Tensor], launch: Callable) -> None:
        self.launch = launch  # as `execute.run` takes it
        self.values = {
            value: torch.empty(value.shape, dtype=value.dtype, device=META)
            for value in (*graph.inputs, *graph.constants)
        }
        for name, value in graph.parameters.items():
            self.values[value] = torch.empty_like(parameters[name], device=META)

    def __call__(self, node: Node) -> None:
        """Run one; its results have the shapes that its kernels give them."""
        made = self.launch(node, self.values)
        self.values.update(made)
        for value, tensor in made.items():
            value.shape = tuple(tensor.shape)

    def __contains__(self, value: Value) -> bool:
        return value in self.values

    def __getitem__(self, value: Value) -> Tensor:
        return self.values[value]
