"""Runs both passes of a plan: as one node of autograd, or the forward pass alone."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from triton_kernels.runtime.device import on_gpu
from triton_kernels.runtime.library import once_differentiable

from ..build import Plan
from ..execute import Streams, run_moves
from ..graph import Value
from ..launch.pytorch import as_it_lies
from ..launch.table import Launcher, launch_kernels, launch_reference
from .replay import Replay

_TWICE = "backward through a plan a second time: its values are gone; those of the next call stay"


def launcher(device: torch.device) -> Launcher:
    """What launches a node there."""
    return launch_kernels if on_gpu(device) else launch_reference


@lru_cache
def _streams(device: torch.device) -> Streams:
    return Streams(device, others=1)


class FlatGradients(Protocol):
    """Where a training step has its gradients (`step.others`)."""

    grads: Mapping[str, Tensor]  # by the names of parameters
    low: Mapping[str, Tensor]  # the parameters in 16 bits; none: they are cast

    def begin(self, placed: Collection[str]) -> bool:
        """A backward pass begins that writes these. Whether it has to add to what is there."""
        ...

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add these, by name, to `grads`."""
        ...


def evaluate(
    made: Plan,
    inputs: list[Tensor],
    parameters: list[Tensor],
    launch: Callable | None,
    low: Mapping[str, Tensor] | None = None,
) -> tuple[tuple[Tensor, ...], dict[Value, Tensor]]:
    """What the forward pass of a plan gives, and what its backward pass reads."""
    graph, given = made.graph, [x.detach() for x in (*inputs, *parameters)]
    starts = [*graph.inputs, *graph.parameters.values()]
    values = dict(zip(starts, given, strict=True)) | graph.constants
    values |= {value: at.of(low[at.name]) for value, at in made.low.items()}
    device = next((x.device for x in given), torch.device("cpu"))
    with torch.autocast(device.type, enabled=False):
        launch = launch or launcher(device)
        run_moves(made.schedule.forward, values, _streams(device), launch)
    outputs: dict[Value, Tensor] = {}
    for v, memory in zip(graph.outputs, made.memory, strict=True):
        y = values[v].clone() if memory in graph.constants else values[v]
        # two of one tensor, of which one may have no gradient
        seen = any(y is z for w, z in outputs.items() if w is not v)
        outputs[v] = y.detach() if seen else y
    return tuple(outputs[v] for v in graph.outputs), values


def _refuse_written(
    made: Plan, values: dict[Value, Tensor], results: list[Tensor], versions: list[int]
) -> None:
    """RuntimeError: backward reads a result that somebody has written to."""
    written = {
        y.untyped_storage()._cdata: i
        for i, (y, version) in enumerate(zip(results, versions, strict=True))
        if y._version != version
    }
    read = {v for move in made.schedule.backward for v in move.reads} if written else ()
    for at in (written.get(values[v].untyped_storage()._cdata) for v in read if v in values):
        if at is not None:
            raise RuntimeError(
                f"result {at}, of {list(results[at].shape)}, has been modified by an inplace"
                " operation, and backward reads it; write to a copy of it"
            )


class Planned(torch.autograd.Function):
    """One node of autograd for the whole network."""

    @staticmethod
    def forward(
        ctx: Any,
        made: Plan,
        launch: Callable | None,
        flat: FlatGradients | None,  # None: gradients are autograd's
        replay: Replay | None,  # None: launched
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.made, ctx.launch, ctx.flat, ctx.replay = made, launch, flat, replay
        if replay is None:
            given = list(tensors[:count]), list(tensors[count:])
            low = None if flat is None else flat.low
            outputs, values = evaluate(made, *given, launch, low)
            # no views, to which nobody could write, but of what is the caller's, where it would be
            # seen
            starts = {*made.graph.inputs, *made.graph.parameters.values()}
            pairs = zip(made.memory, outputs, strict=True)
            outputs = tuple(y if v in starts else y.data for v, y in pairs)
            ctx.values, ctx.results = values, [y.detach() for y in outputs]
            ctx.versions = [y._version for y in outputs]
        else:
            outputs = replay.forward(tensors)
        ctx.save_for_backward(*tensors)  # which notices if somebody has written to one
        results = zip(made.graph.outputs, outputs, strict=True)
        ctx.mark_non_differentiable(*(y for v, y in results if v not in made.backward.seeds))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        made: Plan = ctx.made
        backward, graph = made.backward, made.graph
        tensors = ctx.saved_tensors  # raises if one has changed, or if this is over
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()  # retain_graph
        made.retained |= keeps
        if keeps and ctx.replay is not None and not {"draw", "dropout"} & set(graph.count()):
            _launch_again(ctx, tensors)
        launched = ctx.replay is None
        if launched:
            values = _launched_backward(ctx, dys, tensors[0].device, keeps)
        elif ctx.replay.is_done:
            raise RuntimeError(_TWICE)
        else:
            values = ctx.replay.backward(dys)
        asked = {v for v, dy in zip(graph.outputs, dys, strict=True) if dy is not None}
        starts = [*graph.inputs, *graph.parameters.values()]
        grads = [backward.grads.get(value) for value in starts]
        grads = [  # of results that have a gradient
            g if asked & backward.results.get(value, set()) else None
            for value, g in zip(starts, grads, strict=True)
        ]
        found = [None if g is None or g in made.placed else values[g] for g in grads]
        del values  # each gradient is freed once it is in another order
        if launched:  # those of a replay are copies, in the order of their parameters
            found = _apart(found)
            kernels = launcher(tensors[0].device).kernels
            for i in range(len(graph.inputs), len(found)):
                if found[i] is not None:
                    found[i] = as_it_lies(found[i], tensors[i], kernels)
        if ctx.flat is not None:
            numbers = {name: i for i, name in enumerate(graph.parameters, len(graph.inputs))}
            there = {name: i for name, i in numbers.items() if name in ctx.flat.grads}
            there = {name: i for name, i in there.items() if found[i] is not None}
            ctx.flat.add({name: found[i] for name, i in there.items()})
            for i in there.values():
                found[i] = None
        return *[None] * 5, *found


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody wants to see or change its gradient, or to know that it is there."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _apart(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients, of which no two begin at one place: the biases of two layers whose results are
    added have one gradient. autograd keeps the first gradient of a parameter as it is and adds the
    next to it in place, which would add to both."""
    places: set[int] = set()
    apart = []
    for x in grads:
        if x is not None and x.layout is torch.strided and x.numel():  # others have no place
            known = len(places)
            places.add(x.data_ptr())
            x = x.clone() if len(places) == known else x
        apart.append(x)
    return apart


def _launch_again(ctx: Any, tensors: Sequence[Tensor]) -> None:
    """What backward reads is in memory that the graph of backward writes over: for more than one of
    them it is made anew."""
    count = len(ctx.made.graph.inputs)
    given = list(tensors[:count]), list(tensors[count:])
    _, ctx.values = evaluate(ctx.made, *given, ctx.launch)
    ctx.results, ctx.versions = [], []  # of the graphs these are copies
    ctx.replay.is_done, ctx.replay = True, None


def _launched_backward(
    ctx: Any, dys: Sequence[Tensor | None], device: torch.device, keeps: bool
) -> dict[Value, Tensor]:
    """The values that the backward pass makes, launched one by one."""
    made: Plan = ctx.made
    values, ctx.values = ctx.values, dict(ctx.values) if keeps else None
    _refuse_written(made, values, ctx.results, ctx.versions)
    for value, dy in zip(made.graph.outputs, dys, strict=True):
        seed = made.backward.seeds.get(value)
        if seed is not None:
            zeros = torch.zeros(value.shape, dtype=value.dtype, device=device)
            values[seed] = zeros if dy is None else dy.to(value.dtype).contiguous()
    launch = ctx.launch or launcher(device)
    if isinstance(launch, Launcher):
        launch = launch.of_backward(made.tables, device)
    if ctx.flat is not None:
        accumulates = ctx.flat.begin({name for at in made.placed.values() for name in at.names})
        launch = replace(launch, in_places=True, accumulates=accumulates)
        values |= {value: at.of(ctx.flat.grads[at.name]) for value, at in made.placed.items()}
    with torch.autocast(device.type, enabled=False):
        run_moves(made.schedule.backward, values, _streams(device), launch)
        _streams(device).join()
    return values
