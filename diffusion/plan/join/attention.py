"""Attention, with the projection to queries, keys and values and the norm before it."""

from triton_kernels.attention.projected import projected_spec

from ..graph import Node
from .state import Joining, norm_inputs


def waits_for_projection(node: Node) -> bool:
    """Whether the kernels know this attention: of packed channels, and of the usual scale."""
    d = node.out.shape[-1] // node.attrs["heads"]
    return "qkv" in node.inputs and abs(node.attrs["scale"] * d**0.5 - 1) < 1e-6


def attention(j: Joining, node: Node) -> None:
    qkv = node.inputs.get("qkv")
    if not waits_for_projection(node) or qkv in j.made:
        return j.other(node)
    linear = next(n for n in j.order if qkv in n.outputs.values())
    x, heads, order = linear.inputs["x"], node.attrs["heads"], node.attrs["order"]
    norm = j.late(x, "norm") if x in j.cheap else None
    if norm is not None and j.others_read(x, linear):
        norm = None
    source = x if norm is None else norm.inputs["x0"]
    if norm is None:
        j.need(x)
    given = {k: linear.inputs[k] for k in ("weight", "bias") if k in linear.inputs}
    attrs, rows = {"heads": heads, "order": order}, j.dry[source].flatten(1, 2)
    sums = {}
    if norm is not None:
        sums = {"partials0": norm.inputs["partials0"]} | norm_inputs(norm)
        of_norm = {"pixels": norm.attrs["pixels"][0]}
        of_norm |= {key: norm.attrs[key] for key in ("groups", "eps")}
        statistics = j.dry[sums["partials0"]], of_norm["pixels"], of_norm["groups"]
        if j.joins("projected_attention", projected_spec(rows, heads, statistics)):
            inputs = {"x": source, **given, **sums}
            j.emit("projected_attention", inputs, node.outputs, node, **attrs, **of_norm)
            j.forget(x)
            j.graph.reason(node.out, "attention with the projection and the norm in front of it")
            return None
    if j.joins("projected_attention", projected_spec(rows, heads)):
        j.need(x)
        j.emit("projected_attention", {"x": x, **given}, node.outputs, node, **attrs)
        j.graph.reason(node.out, "attention with the projection in front of it")
        return None
    j.need(x)
    j.emit("conv_few", linear.inputs, linear.outputs, linear)
    attrs["scale"] = node.attrs["scale"]
    j.emit("attention", {"qkv": qkv}, node.outputs, node, **attrs)
    return None
