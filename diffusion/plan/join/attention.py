"""Attention, with the projection to queries, keys and values and the norm in front of that."""

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
    norm = j.norm_of.get(x) if x in j.cheap else None
    if norm is not None and j.others_read(x, linear):
        norm = None
    if norm is None:
        j.need(x)
    source = x if norm is None else norm.inputs["x0"]
    rows = j.dry[source].flatten(1, 2)
    projection = {k: linear.inputs[k] for k in ("weight", "bias") if k in linear.inputs}
    attrs = {"heads": heads, "order": order}
    if j.k.serves_qkv_attention(rows, heads):
        j.need(x)
        j.emit("qkv_attention", {"x": x, **projection}, node.outputs, node, **attrs)
        return None
    given, statistics = {"x": source, **projection}, None
    if norm is not None:
        partials, a = norm.inputs["partials0"], norm.attrs
        affine = [j.dry[norm.inputs[role]] for role in ("weight", "bias")]
        statistics = (
            j.dry[partials], a["pixels"][0], a["groups"], *affine, a["eps"],
        )  # fmt: skip
        given |= {"partials0": partials} | norm_inputs(norm)
        attrs |= {"pixels": a["pixels"][0], "groups": a["groups"], "eps": a["eps"]}
    if j.k.serves_norm_attention(rows, heads, statistics):
        j.emit("norm_attention", given, node.outputs, node, **attrs)
        j.forget(x)
        j.reason(node.out, "attention with the projection and the norm in front of it")
        return None
    few = norm is not None and j.k.serves_norm_linear(
        j.dry[source], statistics[0], norm.attrs["groups"]
    )
    if few:
        small = {key: attrs[key] for key in ("pixels", "groups", "eps")}
        j.emit("norm_linear", given, {"y": qkv}, linear, **small)
        j.forget(x)
    else:
        j.need(x)
        j.emit("conv_few", linear.inputs, linear.outputs, linear)
    attrs = {"heads": heads, "order": order, "scale": node.attrs["scale"]}
    j.emit("attention", {"qkv": qkv}, node.outputs, node, **attrs)
    return None
