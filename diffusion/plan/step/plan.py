"""From a UNet to the moves of a training step, by applying the passes in order.

The embedding is not in the graph: its layers are `EmbeddingLayers`, whose kernels run beside the
stem. The graph begins with the image and each block's projection of the embedding. It ends with
gradients in their places: those of parameters in the flat buffer, those of projections side by
side.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from triton_kernels.runtime.device import describe

from ...models.unet import UNet
from ..differentiate import differentiate
from ..embedding import projection_columns, projections
from ..fuse.rows import fuse, prepare
from ..graph import Graph, Node, Value
from ..norms import split_norms
from ..rounding import round_where_made
from ..schedule.schedule import Schedule, schedule
from ..trace import trace
from .memory import keep_less, write_over
from .order import InStep, backward_moves, forward_moves
from .places import EMB, Place, place

_PRODUCTS = (  # whose weights are read as `FlatParameters.low` has them
    "conv", "conv_fused", "linear", "conv_down", "conv_dx", "linear_dx", "conv_down_dx",
    "conv_input_grad", "skip_dx", "skip_backward",
)  # fmt: skip
_SHAPING = ("reshape", "slice", "pad")  # of weights, for those


@dataclass
class StepPlan:
    """What runs in a training step, and what it begins with."""

    graph: Graph
    image: Value  # [N, H, W, CI]
    emb: dict[Value, slice]  # columns of the projections
    rng: Value | None
    context: tuple[Value, ...]  # a row of tokens, and which are present, if the network has them
    low: dict[Value, str]  # parameters in the precision of the arithmetic
    seed: Value  # the gradient of the result
    placed: dict[Value, Place]
    schedule: Schedule


def body(model: UNet) -> Callable[..., Tensor]:
    """What is traced of it."""

    def forward(
        x: Tensor, emb: Tensor, rng: Tensor, context: Tensor | None = None, *present: Tensor
    ) -> Tensor:
        tokens = () if context is None else (context[:, 0], *present)
        return model.forward_embedded(x, emb, *tokens, rng=rng)

    return forward


def step_plan(
    model: UNet,
    x: Tensor,  # [N, H, W, CI], for its shape, dtype and device
    emb_channels: int,
    kernels: ModuleType,
    ends: Mapping[str, int],  # where filters end in the flat buffer, by name
    recompute: bool = False,
    urgent: bool = False,  # others wait for gradients of filters
    listens: bool = False,  # somebody wants to know how far backward is
    context: Sequence[Tensor] = (),  # [N, 1, 1 + L, D], and [N, 1 + L] of what is present
) -> StepPlan:
    """The plan of a step of `model` over such images. PlanError: it has none, and why."""
    dtype = torch.float64 if model.backend.dtype == torch.float64 else torch.float32
    example = {"dtype": dtype, "device": x.device}
    rng = torch.zeros(2, dtype=torch.int64, device=x.device)
    arguments = torch.empty_like(x), torch.empty(len(x), emb_channels, **example), rng
    arguments += tuple(torch.empty_like(part) for part in context)
    graph = trace(model, arguments, forward=body(model)).graph
    split_norms(graph)
    prepare(graph, "step")
    image, _, draws, *tokens = graph.inputs
    parts = _cut_embedding(graph, projection_columns(model))
    graph.inputs = [image, draws, *tokens, *parts]
    graph.prune()

    wanted = {name: v for name, v in graph.parameters.items() if name in graph.trainable}
    backward = differentiate(graph, [*wanted.values(), *parts])
    (seed,) = backward.seeds.values()

    fuse(graph, backward, kernels=(kernels, describe(x.device)), step=True)
    result, forward = graph.outputs, set(graph.nodes[: backward.start])
    places = {
        backward.grads[v]: Place(name, v.shape) for name, v in wanted.items() if v in backward.grads
    }
    for value, part in parts.items():
        at = Place(EMB, value.shape, ((1, part.start, part.stop),))
        places[backward.grads[value]] = at
    placed = place(graph, places)
    graph.outputs = [*result, *placed]
    keep_less(graph, forward, recompute)
    graph.prune()
    round_where_made(graph, kernels)
    low = _low_parameters(graph, forward)
    names = {value: name for name, value in graph.parameters.items()} | low
    kept = {*placed, *result, *names, *graph.constants, *graph.inputs}
    names |= _of_parameters(graph, names)
    graph.check([seed, *low])
    ahead = [node for node in graph.nodes if node in forward]
    behind = [node for node in graph.nodes if node not in forward]
    write_over(behind, set(placed))
    graph.nodes = [*ahead, *behind]
    step = InStep(x[..., 0].numel(), parts, names, placed, ends, urgent)
    moves = forward_moves(ahead, step), backward_moves(behind, step)
    made = schedule(graph, *moves, kept, set(placed), listens)
    graph.rename()
    graph.constants = {value: c.to(x.device) for value, c in graph.constants.items()}
    tokens = tuple(tokens)
    return StepPlan(graph, image, parts, draws, tokens, low, seed, placed, made)


def _cut_embedding(graph: Graph, columns: dict[str, slice]) -> dict[Value, slice]:
    """The blocks' parts of the embedding's projections, or halves of them, which become inputs: of
    each its columns in the projections side by side."""
    found, readers = projections(graph, columns), graph.consumers()
    graph.nodes = [node for node in graph.nodes if node not in found]
    read = {node for node in found if any(r not in found for r in readers.get(node.out, ()))}
    return {node.out: part for node, part in found.items() if node in read}


def _low_parameters(graph: Graph, forward: set[Node]) -> dict[Value, str]:
    """Parameters as products read them, which the optimizer makes once for each update; by name.
    Columns of their matrices are read where they are."""
    names = {v: name for name, v in graph.parameters.items()}
    low, copies, fixed, nodes = {}, {}, set(names), []
    for node in graph.nodes:
        if node.op == "cast" and node.inputs["x"] in names:
            low[node.out] = names[node.inputs["x"]]
            fixed.add(node.out)
            continue
        for role, value in node.inputs.items():
            is_operand = role.startswith(("weight", "columns")) or node.op in _SHAPING
            if value in names and node.op in _PRODUCTS + _SHAPING and is_operand:
                if value not in copies:
                    copies[value] = graph.value(value.name, value.shape, value.dtype)
                    low[copies[value]] = names[value]
                    fixed.add(copies[value])
                node.inputs[role] = copies[value]
        if node in forward and all(v in fixed for v in node.inputs.values()):
            fixed.update(node.outputs.values())
            if node.op == "slice" and node.attrs["axis"] == len(node.out.shape) - 1:
                node.op, node.attrs = "columns", {k: node.attrs[k] for k in ("start", "stop")}
        nodes.append(node)
    graph.nodes = nodes
    return low


def _of_parameters(graph: Graph, names: dict[Value, str]) -> dict[Value, str]:
    """What is made of one parameter alone, and its name."""
    found: dict[Value, str] = {}
    for node in graph.nodes:
        of = {names.get(v, found.get(v)) for v in node.inputs.values()}
        if len(of) == 1 and None not in of:
            found.update(dict.fromkeys(node.outputs.values(), *of))
    return found
