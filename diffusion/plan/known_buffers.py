"""Numbers of small buffers that a plan depends on, such as the filters of a module's resampling, of
which one number for a whole block makes means of it. The plan serves as long as they are the same.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from .execute import run
from .graph import Graph, Value, made_of, nodes_for
from .trees import version_of

_MOST = 64  # numbers


class KnownBuffers:
    """Those of a module, by name."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._there = {k: x for k, x in buffers.items() if 0 < x.numel() <= _MOST and not x.is_meta}
        # what has been read: the tensor, its version, and its numbers
        self._read: dict[str, tuple[Tensor, tuple, Tensor]] = {}

    def numbers(self, graph: Graph, value: Value) -> Tensor | None:
        """What a value is, on the CPU; None: it is not made of constants and of these buffers
        alone."""
        if value in graph.constants:
            return graph.constants[value]
        names = {v: k for k, v in graph.parameters.items() if k in self._there}
        fixed = made_of({*names, *graph.constants}, graph.nodes)
        nodes = nodes_for([value], [node for node in fixed if not node.draws])
        if not nodes and value not in names:
            return None
        read = {value, *(v for node in nodes for v in node.inputs.values())}
        made = dict(graph.constants) | {v: self._of(names[v]) for v in names if v in read}
        return run(nodes, made)[value]

    def _of(self, name: str) -> Tensor:
        if name not in self._read:
            x = self._there[name]
            self._read[name] = x, version_of(x), x.detach().cpu().clone()
        return self._read[name][2]

    def hold(self, states: Mapping[str, Tensor]) -> bool:
        """Whether those that were read have the same numbers, looked at where somebody has written
        to them."""
        for name, (x, version, numbers) in self._read.items():
            now = states[name]
            if now is x and version_of(x) == version:
                continue
            if not torch.equal(now.detach().cpu(), numbers):
                return False
            self._read[name] = now, version_of(now), numbers
        return True
