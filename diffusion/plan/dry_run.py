"""Runs launchers on tensors without memory, to learn what they would launch.

A pass that chooses a kernel by another kernel's number of tiles has to know that number, and only
the launcher does. `DryRun` visits nodes like `execute.run`, with tensors on the device "meta",
which have shapes but no memory, and launches no kernel.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from triton_kernels.registry.search import paused
from triton_kernels.runtime.device import Device, standing_for

from .graph import Graph, Node, Value

META = torch.device("meta")
_one_at_a_time = threading.RLock()  # or a thread would put back what another has put there


@contextmanager
def nothing_launched(gpu: Device) -> Iterator[None]:
    """Within the block this thread launches no kernel, and launchers take any tensor for one of
    this GPU."""
    mine = threading.get_ident()

    def skipping(run: Callable) -> Callable:
        def skipped(self: Any, *args: Any, **options: Any) -> Any:
            return None if threading.get_ident() == mine else run(self, *args, **options)

        return skipped

    with _one_at_a_time, standing_for(gpu), paused(), torch.no_grad():
        before = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}
        for kind, run in before.items():
            kind.run = skipping(run)
        try:
            yield
        finally:
            for kind, run in before.items():
                kind.run = run


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
