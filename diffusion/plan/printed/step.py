"""Prints a training step: the moves that `train.py` makes, in their order.

The step runs over host tensors for which launchers assume a GPU, and its launches are recorded. It
runs once more to count its memory, since sums of rows find theirs from the second step on.
"""

import torch
from torch import Tensor

from triton_kernels.registry.chips import Chip

from ...models.conditions import Given, parts_of
from ...models.flat_parameters import FlatParameters
from ...models.unet import UNet
from ..embedding import TOGETHER
from ..graph import PlanError, Value
from ..schedule.moves import Move
from ..step.network import TrainingUNet, step_kernels
from ..step.plan import StepPlan
from .kernels import Launched, Notes, is_interpreted, noting
from .memory import ACTIVATIONS, LAUNCHES, ROWS, STEP, Allocations, Memory
from .page import Page, Writer

_EMBEDDING = 3  # its stream, on the page


def step_page(
    model: UNet,  # in host memory, of the Triton backend, training
    x: Tensor,  # [N, H, W, CI]
    labels: Given,
    gpu: Chip,
    recompute: bool = False,  # as `train.recompute`
) -> Page:
    """The page of a step of the network: without the loss in front of backward, and the update.
    PlanError: the step has no plan, and why."""
    refusal, kernels = TrainingUNet.refusal(model), step_kernels(model.backend)
    if refusal is not None:
        raise PlanError(f"a step has the plan of accelerate: {refusal}")
    t, rng = torch.zeros(len(x), dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    x = x.to(model.backend.dtype)  # as the objective hands it over
    with noting(gpu) as notes:
        flat = FlatParameters(model, together=TOGETHER)
        # one process's, whose norm of the gradient is taken beside backward
        network = TrainingUNet(model, flat, kernels, recompute, ready=lambda start: None)
        made = network.plan_of(x, *network.tokens(parts_of(labels)))
        notes.taken()  # the tokens, which the call makes again
        written = _Step(network, notes, gpu, made)
        network.watch = written.add
        network.forget_gradients()  # as a step does whose gradient is of one pass
        y = network(x, t, labels, rng=rng)
        y.backward(torch.empty_like(y))
        memory = _memory(network, x, labels)
    return Page(written.writer.lines, memory, gpu.gpu)


def _memory(
    network: TrainingUNet,  # which has made a step
    x: Tensor,  # [N, H, W, CI], in the precision of the arithmetic
    labels: Given,
) -> Memory:
    """What a step takes at its peak, by another one in which every tensor is counted."""
    values: set[int] = set()  # of the plan
    t, rng = torch.zeros(len(x), dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with Allocations() as counted:

        def watch(move: Move, made: dict[Value, Tensor]) -> None:
            values.update(counted.numbers(made.values()))
            if move.nodes:
                counted.has_made(move.nodes[0].out.name)

        network.watch = watch
        network.forget_gradients()
        noised = torch.empty_like(x)
        y = network(noised, t, labels, rng=rng)
        dy = torch.empty_like(y)
        ends = counted.numbers((noised, y, dy))
        y.backward(dy)
    network.watch = None
    parts = {
        "parameters, gradients and the optimizer's state": network.flat.nbytes,
        ACTIVATIONS: counted.at_peak(values - ends),
        ROWS: network.sums.nbytes,
        "noised images, the output and its gradient": counted.at_peak(ends),
        LAUNCHES: counted.peak - counted.at_peak(values | ends),
    }
    return Memory(STEP, "the data set if the GPU holds it", parts, counted.at)


class _Step:
    """Writes what the moves of a step launch, as they are made."""

    def __init__(self, network: TrainingUNet, notes: Notes, gpu: Chip, made: StepPlan) -> None:
        self.network, self.notes, self.made = network, notes, made
        self.backward = set(made.schedule.backward)
        self.writer = Writer(gpu, made.graph.why)

    def add(self, move: Move, values: dict[Value, Tensor]) -> None:
        found, writer = self.notes.taken(), self.writer
        for value in (*move.reads, *move.made):
            if value in values and value not in self.made.placed:
                value.shape = tuple(values[value].shape)  # as the kernels have made it
        pass_ = "backward" if move in self.backward else "forward"
        with writer.of(move):
            if move.nodes:
                found = Launched((move.nodes[0].op,)) if is_interpreted() else found
                if move.nodes[0].op == "bias_grad" and not move.before:
                    found = Launched(())  # in `sums`
                fixed = pass_ == "forward" and all(v in self.made.low for v in move.reads)
                which = "parameters" if fixed else pass_
                writer.write_nodes(move.all_nodes, which, found, move.stream)
            elif move.what == "wait":
                writer.write(move.what, move.what, pass_, Launched(()), move.stream)
            elif found.kernels != ("PyTorch",):
                self._other(move, pass_, found)

    def _other(self, move: Move, pass_: str, found: Launched) -> None:
        """What is no node: sums for norms and biases, and the embedding's layers."""
        name, stream, read = move.what, move.stream, 0
        if move.what in ("begin", "finish"):
            weight = self.network.embedding.projection.weight
            name, stream, read = f"embedding, {pass_}", _EMBEDDING, weight.nbytes
        made = Launched(found.kernels, found.config)
        self.writer.write(name, move.what, pass_, made, stream, read)
