"""The plan of the UNet for sampling: its forward pass, for launches one after the other."""

from types import ModuleType

import torch
from torch import Tensor

from triton_kernels.runtime.device import Device, describe

from ..models.blocks import CrossAttentionBlock
from ..models.conditions import Conditions
from ..models.unet import UNet
from .build import Plan, evaluated, states_of
from .embedding import linears, projection_columns, projections
from .fuse.rows import fuse, prepare
from .graph import Graph, Value
from .join.rules import join
from .norms import split_norms
from .rounding import round_where_made
from .trace import trace


def sampling_plan(
    model: UNet,
    shape: torch.Size,  # N, H, W, CI
    device: torch.device,
    kernels: ModuleType,  # `triton_kernels.fused_ops` or its reference
    tokens: int,  # of a context, if the model has one, with the null token
    gpu: Device | None = None,  # None: what is there
) -> Plan:
    """The plan of `model.forward_nhwc` for images of this shape. Its inputs are

    - the image [N, H, W, C], as it is multiplied, with zeros behind its channels,
    - every block's projection of the embedding, float32 [N, E],
    - of a network with a context the mask of its tokens, and keys and values of each block."""

    def forward(x: Tensor, t: Tensor, *given: Tensor | None) -> Tensor:
        labels, vector, context, present = given
        context = None if context is None else context[:, 0]  # which was an image of one row
        conditions = Conditions(labels, None, vector, context, present)
        return model.forward_nhwc(x, t, conditions.shortest())

    n, dim, vector, context, present = shape[0], model.context_dim, None, None, None
    x = torch.empty(shape, device=device)
    t = torch.zeros(n, dtype=torch.int64, device=device)
    if model.vector_dim:
        vector = torch.empty(n, model.vector_dim + 1, device=device)
    if dim:
        context = torch.empty(n, 1, tokens, dim, device=device)
        present = torch.empty(n, tokens, device=device)
    labels = None if model.num_classes is None else t
    traced = trace(model, (x, t, labels, vector, context, present), forward=forward)
    graph = traced.graph
    split_norms(graph)
    emb = _cut_embedding(graph, projection_columns(model), shape[0])
    prepare(graph, "sample")
    fuse(graph, None)
    image = _cut_image(graph)
    beside = _cut_context(graph, context_blocks(model))
    graph.inputs = [image, emb, *beside]
    graph.prune()
    gpu = describe(device) if gpu is None else gpu
    tf32 = model.backend.allow_tf32 or model.backend.dtype != torch.float32
    join(graph, states_of(model), kernels, gpu, tf32=tf32)
    round_where_made(graph, kernels)
    graph.check()
    for node in graph.nodes:
        node.tf32 = tf32
    return evaluated(traced)


def _cut_image(graph: Graph) -> Value:
    """What the stem reads, which `begin_step` makes of x."""
    value = graph.inputs[0]
    for op in ("cast", "pad_channels"):
        reader = next((n for n in graph.nodes if n.op == op and n.inputs["x"] is value), None)
        if reader is not None:
            graph.nodes.remove(reader)
            value = reader.out
    return value


def _cut_embedding(graph: Graph, columns: dict[str, slice], n: int) -> Value:
    """Every block's projection of the embedding, which come as one matrix."""
    width = max(part.stop for part in columns.values())
    emb = graph.value("emb", (n, width), torch.float32)
    for node, part in projections(graph, columns).items():
        node.op, node.inputs = "columns", {"x": emb}
        node.attrs = {"start": part.start, "stop": part.stop}
    return emb


def _cut_context(graph: Graph, blocks: list[str]) -> tuple[Value, ...]:
    """What is made of a context alone: the mask of its tokens, and of each block keys and values.
    Nobody makes them any more."""
    if not blocks:
        return ()
    made = linears(graph)
    found = [made[f"{name}.kv.weight"] for name in blocks]
    (mask,) = {node.inputs["mask"] for node in graph.nodes if "mask" in node.inputs}
    gone = {*found, graph.producers()[mask]}
    graph.nodes = [node for node in graph.nodes if node not in gone]
    return mask, *(node.out for node in found)


def context_blocks(model: UNet) -> list[str]:
    """The names of those that attend to a context, in order."""
    found = model.named_modules()
    return [name for name, module in found if isinstance(module, CrossAttentionBlock)]
