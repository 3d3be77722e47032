"""Makes a plan from a module and example arguments, by applying the passes in order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from triton_kernels.reductions.row_sums import Tables
from triton_kernels.runtime.device import Device

from .differentiate import Backward, differentiate
from .fuse.rows import fuse, prepare
from .graph import Graph, Node, Value
from .join.rules import join
from .norms import split_norms
from .rounding import round_operands
from .schedule.order import backward_moves, forward_moves
from .schedule.schedule import Schedule, schedule
from .schedule.together import casts_together, sums_together
from .step.places import Place, low_parameters, place_weights
from .trace import Traced, trace


@dataclass(eq=False)
class Plan:
    """What runs in the place of a module, for arguments of certain shapes."""

    traced: Traced
    schedule: Schedule
    backward: Backward | None  # None: it only evaluates
    retained: bool = False  # whether a backward pass was asked to keep what it reads
    tables: Tables = field(default_factory=dict)  # of sums, once a backward pass has run
    placed: dict[Value, Place] = field(default_factory=dict)  # gradients with places
    low: dict[Value, Place] = field(default_factory=dict)  # parameters that are there in 16 bits

    @property
    def graph(self) -> Graph:
        return self.traced.graph

    @cached_property
    def fixed(self) -> list[int]:
        """Which of the inputs and parameters, counted through, are parameters that the call only
        reads: those whose place counts."""
        names, written = self.graph.parameters, self.traced.written
        return [i for i, x in enumerate(names, len(self.graph.inputs)) if x not in written]

    @cached_property
    def gives_back(self) -> bool:
        """Whether a result is a view of what the caller has given."""
        given = {*self.graph.inputs, *self.graph.parameters.values()}
        return not given.isdisjoint(self.memory)

    @cached_property
    def memory(self) -> list[Value]:
        """Of each result the value in whose memory it is: itself, or one that was there before."""
        over = {node.out: node.inputs["x"] for node in self.graph.nodes if node.is_view}
        found = []
        for value in self.graph.outputs:
            while value in over:
                value = over[value]
            found.append(value)
        return found


def evaluated(traced: Traced) -> Plan:
    """The plan of a forward pass alone, whose nodes are in order."""
    graph = traced.graph
    made = schedule(graph, forward_moves(graph.nodes))
    graph.rename()
    return Plan(traced, made, None)


def states_of(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _multiplies_float32(node: Node) -> bool:
    """Whether its operands, of which it reads one first, have 32 bits."""
    return next(iter(node.inputs.values())).dtype == torch.float32 if node.inputs else False


def _multiplies_low(graph: Graph, tf32: tuple[bool, bool]) -> bool:
    """Whether no product of images has to be in float32, which the joined kernels do not have."""
    dtypes = {
        node.out.dtype
        for node in graph.nodes
        if node.op.startswith(("conv", "attention"))
        or node.op == "linear"
        and len(node.out.shape) == 4
    }
    return torch.float32 not in dtypes or all(tf32)


def plan(
    module: nn.Module,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    *,
    trains: bool = False,  # with gradients of the parameters that require one
    of_inputs: tuple[int, ...] = (),  # and of these inputs, counted among the tensors
    # what is launched, and where: for what not every GPU has kernels for; None: without that
    kernels: tuple[ModuleType, Device] | None = None,
    tf32: tuple[bool, bool] = (True, True),  # may convolutions, may other products be in TF32
    rounds: bool = False,  # round to TF32 what products in it read
    # places of gradients by the names of parameters, and parameters in 16 bits
    flat: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] = ({}, {}),
) -> Plan:
    """The plan of module(*args, **kwargs). PlanError: it has none, and why."""
    traced = trace(module, args, kwargs)
    graph = traced.graph
    wanted = [v for k, v in graph.parameters.items() if trains and k in graph.trainable]
    wanted += [graph.inputs[i] for i in of_inputs]
    split_norms(graph)
    prepare(graph, "train" if wanted else "sample")
    backward = differentiate(graph, wanted) if wanted else None
    fuse(graph, backward, tf32, kernels)
    graph.check(() if backward is None else backward.seeds.values())
    if kernels is not None and backward is None and _multiplies_low(graph, tf32):
        join(graph, states_of(module), *kernels)
    placed, low = {}, {}
    if backward is not None and any(flat):
        forward, grads = set(graph.nodes[: backward.start]), backward.grads
        placed = place_weights(graph, grads, flat[0])
        # what is written in the forward pass is not in 16 bits before the next update
        read = {v: k for k, v in graph.parameters.items() if k not in traced.written}
        low = low_parameters(graph, read, flat[1])
        backward.start = len(forward.intersection(graph.nodes))
    if backward is not None:
        sums_together(graph, backward.start, set(backward.grads.values()))
    for node in graph.nodes:
        allowed = tf32[node.of_matrices or "attention" in node.op]
        node.tf32 = allowed or not _multiplies_float32(node)
    start = len(graph.nodes) if backward is None else backward.start
    if rounds:
        start = round_operands(graph, start)
    start -= casts_together(graph)
    if backward is None:
        return evaluated(traced)
    moves = forward_moves(graph.nodes[:start]), backward_moves(graph.nodes[start:])
    made = schedule(graph, *moves, backward.grads.values())
    graph.nodes = made.nodes
    graph.rename()
    return Plan(traced, made, backward, placed=placed, low=low)
