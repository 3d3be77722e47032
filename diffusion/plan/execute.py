"""Running a list of launches. `run` goes through it and lets go of each value behind its last
reader."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from triton_kernels.reference import fused

from .calls import backward, forward, norms  # noqa: F401  they fill the table
from .calls.table import LAUNCHES
from .graph import Node, Value
from .schedule import Schedule


def run(
    nodes: Iterable[Node],
    values: dict[Value, Tensor],
    last: Mapping[Node, tuple[Value, ...]] | None = None,  # what each node is the last to read
    launch: Callable[[Node, Mapping], dict] | None = None,  # None: on the reference kernels
) -> dict[Value, Tensor]:
    """Launch the nodes in their order. `values` has what they begin with, and gets what they make,
    but for what `last` says nobody reads any more."""
    launch = launch or launch_reference
    for node in nodes:
        values.update(launch(node, values))
        for value in last.get(node, ()) if last is not None else ():
            values.pop(value, None)
    return values


def run_beside(
    nodes: Iterable[Node],
    values: dict[Value, Tensor],
    made: Schedule,
    launch: Callable[[Node, Mapping], dict],
) -> dict[Value, Tensor]:
    """`run` on a GPU: what is beside the chain on a stream of its own, which the current one has
    waited for at the end."""
    chain = torch.cuda.current_stream()
    beside = _beside(chain.device)
    done: dict[Node, torch.cuda.Event] = {}
    awaited, before = set(made.waits.values()), None
    for node in nodes:
        if made.stream[node]:
            if before is None or not made.stream[before]:
                beside.wait_stream(chain)  # for what a group reads
            with torch.cuda.stream(beside):
                values.update(launch(node, values))
                if node in awaited:
                    done[node] = beside.record_event()
        else:
            values.update(launch(node, values))
        if node in made.waits:
            chain.wait_event(done[made.waits[node]])
        for value in made.last.get(node, ()):
            values.pop(value, None)
        before = node
    chain.wait_stream(beside)
    return values


@lru_cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def launch_reference(
    node: Node, values: Mapping[Value, Tensor], kernels: ModuleType = fused
) -> dict[Value, Tensor]:
    """On the reference kernels, which compute in the dtype of what they are given: in float32 or
    more."""
    inputs = {role: _widened(values[value]) for role, value in node.inputs.items()}
    return results(node, LAUNCHES[node.op](kernels, node, inputs))


def results(node: Node, made: Any) -> dict[Value, Tensor]:
    """What a launch gave, by the node's values and in their dtypes; nothing where it gave none."""
    made = made if isinstance(made, dict) else {next(iter(node.outputs)): made}
    given = {value: made[role] for role, value in node.outputs.items()}
    return {value: x.to(value.dtype) for value, x in given.items() if x is not None}


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
