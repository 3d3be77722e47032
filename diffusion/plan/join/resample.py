"""Upsampling and 2x2 means, fused into other launches."""

from triton_kernels.conv.upsampled import upsampled_spec

from ..graph import Node, Value
from .state import TERMS, Joining, factor_of

_POOLED_IMAGES = 4  # at most, of which a norm makes the means that it reads


def moments(j: Joining, node: Node) -> None:
    """Sums that somebody may have taken on the way, or that nobody may want."""
    if node.out not in j.made:
        j.measured[node.out] = node.inputs["x"]


def _resample_parts(j: Joining, node: Node) -> None:
    x = node.inputs["x"]
    conv = j.parts.pop(x)
    outputs = conv.outputs | {"resampled": node.out}
    how = {"up": node.op == "upsample"} | factor_of(conv)
    j.emit("resample_parts", j.sum_inputs(conv), outputs, conv, **how)


def upsample(j: Joining, node: Node) -> None:
    x = node.inputs["x"]
    if node.attrs["factor"] != (2, 2):
        return j.other(node)
    if x in j.parts:
        return _resample_parts(j, node)
    j.need(x)
    return j.put_off(node)


def of_upsampled(j: Joining, node: Node) -> bool:
    """conv(upsample(x)), multiplied on the small image."""
    small = j.late(node.inputs["x"], "upsample").inputs["x"]
    terms = [role for role in TERMS if role in node.inputs]
    if terms or "partials" not in node.outputs or j.others_read(node.inputs["x"], node):
        return False
    co, c, *size = j.filters(node).shape
    spec = upsampled_spec(j.dry[small], c, 0, co, factor="factor" in node.attrs)
    if size != [3, 3] or not j.joins("conv_upsampled", spec):
        return False
    inputs = {"x": small, "bias": node.inputs["bias"]} | upsampled_filters(j, node, c)
    j.emit("conv_of_upsampled", inputs, node.outputs, node)
    j.graph.reason(node.out, "multiplied on the small image")
    j.forget(node.inputs["x"])
    return True


def upsampled_filters(j: Joining, node: Node, channels: int) -> dict[str, Value]:
    """Sums of taps, of the float32 filters."""
    weight = node.inputs["weight"]
    maker = next((n for n in j.nodes if weight in n.outputs.values()), None)
    exact = maker.inputs["x"] if maker is not None and maker.op == "cast" else weight
    outputs = {
        "taps": j.graph.value(f"{weight.name}.taps", (16,), weight.dtype),
        "rest": j.graph.value(f"{weight.name}.rest", (0,), weight.dtype),
    }
    attrs = {"channels": channels, "dtype": weight.dtype}
    j.emit("upsampled_filters", {"weight": exact}, outputs, node, **attrs)
    return outputs


def avg_pool(j: Joining, node: Node) -> None:
    x = node.inputs["x"]
    n, h, w, c = node.out.shape
    if node.attrs["window"] != (2, 2):
        return j.other(node)
    even = x.shape[1] % 2 == x.shape[2] % 2 == 0  # else a row or column is in no mean
    in_parts = even and x in j.parts
    waits = even and n <= _POOLED_IMAGES and j.reads_whole(n * h * w * c, h * w)
    if "partials" in node.outputs:
        norms = j.readers(node.outputs["partials"])
        whole = all(j.reads_whole(norm.out.numel, h * w) for norm in norms)
        if in_parts or waits or whole:  # nobody takes them, or wants them
            j.measured[node.outputs.pop("partials")] = node.out
    if in_parts:
        return _resample_parts(j, node)
    j.need(x)
    if waits:
        return j.put_off(node)
    j.keep(node)
    return None
