"""Attention, with the projection to queries, keys and values and the norm before it."""

from triton_kernels.attention.norm_attention import projected_spec
from triton_kernels.norm.tables import Statistics

from ..graph import Node
from ..launch.products import is_of_kernels
from .state import Joining, norm_inputs


def waits_for_projection(node: Node) -> bool:
    """Whether it is of packed channels, and `is_of_kernels`."""
    return "qkv" in node.inputs and is_of_kernels(node)


def attention(j: Joining, node: Node) -> None:
    qkv = node.inputs.get("qkv")
    if not waits_for_projection(node) or qkv in j.made:
        return j.other(node)
    linear = next(n for n in j.order if qkv in n.outputs.values())
    x, attrs = linear.inputs["x"], {key: node.attrs[key] for key in ("heads", "order")}
    given = {k: linear.inputs[k] for k in ("weight", "bias") if k in linear.inputs}
    norm = j.late(x, "norm") if x in j.cheap and not j.others_read(x, linear) else None
    if norm is not None:
        source, sums = norm.inputs["x0"], norm.inputs["partials0"]
        of_norm = {key: norm.attrs[key] for key in ("pixels", "groups", "eps")}
        how = of_norm["pixels"], of_norm["groups"], None, None, of_norm["eps"]
        statistics = Statistics((j.dry[sums],), *how)
        spec = projected_spec(j.dry[source].flatten(1, 2), attrs["heads"], statistics)
        if j.joins("projected_attention", spec):
            inputs = {"x": source, **given, "partials0": sums} | norm_inputs(norm)
            j.emit("projected_attention", inputs, node.outputs, node, **attrs, **of_norm)
            j.forget(x)
            j.graph.reason(node.out, "attention with the projection and the norm in front of it")
            return None
    j.need(x)
    spec = projected_spec(j.dry[x].flatten(1, 2), attrs["heads"])
    if j.joins("projected_attention", spec):
        j.emit("projected_attention", {"x": x, **given}, node.outputs, node, **attrs)
        j.graph.reason(node.out, "attention with the projection in front of it")
        return None
    j.emit("conv_few", linear.inputs, linear.outputs, linear)
    j.emit("attention", {"qkv": qkv}, node.outputs, node, **attrs, scale=node.attrs["scale"])
    return None
