"""Scales and shifts (FiLM) of all blocks: one product for each of their inputs.

They are linear layers of the concatenation mish([a, b, ...]), and mish([a, b]) [Wa, Wb]^T is
mish(a) Wa^T + mish(b) Wb^T: the term of each input is computed when that input is known. A layer is
then a range of the sum's columns.
"""

from dataclasses import dataclass

import torch

from ..graph import Graph, Node, PlanError, Value, numbered


@dataclass
class Films:
    """The products, and where in their columns each layer lies."""

    nodes: list[Node]
    table: Value  # the product of the input that is tabulated, with the biases
    other: Value | None  # of the other input
    columns: dict[Value, slice]  # of each linear layer's result


def films(
    graph: Graph,
    inputs: list[Value],  # what they may read: of the first the product has the biases
    dtype: torch.dtype,  # of what is multiplied
    tf32: bool,
) -> Films | None:
    """The linear layers that read inputs of the graph alone; None: there is none. PlanError: they
    do not read all of them the same, or read something else."""
    producers = graph.producers()
    layers = [n for n in graph.nodes if n.op == "linear" and len(n.out.shape) == 2]
    if not layers:
        return None
    first = layers[0]
    act = producers.get(first.inputs["x"])
    if act is None or act.op != "act" or act.attrs["activation"] != "mish":
        raise PlanError(f"{first.op} of something that is no Mish ({first.source})")
    for layer in layers:
        if layer.inputs["x"] is not act.out or "bias" not in layer.inputs:
            raise PlanError(f"linear layers differ in what they read ({layer.source})")
    cat = producers.get(act.inputs["x"])
    parts = [act.inputs["x"]] if cat is None else cat.many("x")
    wrong = cat is not None and (cat.op != "cat" or cat.attrs["axis"] != 1)
    tabulated = inputs[0] if inputs else None
    if wrong or not {*parts} <= {*inputs} or len(parts) > 2 or parts.count(tabulated) != 1:
        raise PlanError(f"the embedding is more than two inputs side by side ({act.source})")
    columns, rows = {}, 0
    for layer in layers:
        columns[layer.out] = slice(rows, rows + layer.out.shape[1])
        rows += layer.out.shape[1]
    roles = [f"part{i}" for i in range(len(parts))]
    wide = first.out.dtype
    weights = graph.new(
        "film_weights",
        numbered("weight", [layer.inputs["weight"] for layer in layers])
        | numbered("bias", [layer.inputs["bias"] for layer in layers]),
        {
            **{role: ((rows, z.shape[1]), dtype) for role, z in zip(roles, parts, strict=True)},
            "bias": ((rows,), wide),
        },
        first.source,
        widths=tuple(part.shape[1] for part in parts),
        dtype=dtype,
    )
    nodes, made = [weights], {}
    for role, z in zip(roles, parts, strict=True):
        bias = weights.outputs["bias"] if z is tabulated else None
        given = {"z": z, "weight": weights.outputs[role], "bias": bias}
        shape = {"y": ((z.shape[0], rows), wide)}
        nodes.append(graph.new("project", given, shape, first.source))
        made[z] = nodes[-1].out
    for node in nodes:
        node.tf32 = tf32
    other = next((y for z, y in made.items() if z is not tabulated), None)
    return Films(nodes, made[tabulated], other, columns)
