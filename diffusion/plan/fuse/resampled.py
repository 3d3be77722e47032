"""Rows of what is halved or upsampled, in both passes of a training step."""

from ..graph import Node, Value
from ..ops import AFTER
from .norms import NORM_DX
from .rewrite import HALF, Fusing


def halved(f: Fusing, node: Node) -> Value | None:
    """A 3x3 convolution that halves the image, with zeros around it or behind it, or the input
    gradient of one"""
    is_grad, a = node.op == "conv_dx", node.attrs
    _, h, w, _ = (node.out if is_grad else node.inputs["x"]).shape
    known = a["stride"] == HALF and a["padding"] in ((1, 1, 1, 1), (0, 1, 0, 1))
    if not known or node.inputs["weight"].shape[2:] != (3, 3) or h % 2 or w % 2:
        return None
    if f.is_exact(node.out) or not (is_grad or "bias" in node.inputs):
        return None
    node.op, node.attrs = "conv_down_dx" if is_grad else "conv_down", {"padding": a["padding"][0]}
    return node.out


def norm_of_upsampled(f: Fusing, node: Node) -> Value | None:
    """What a norm reads is upsampled on its way"""
    up = f.maker(node.inputs["x0"], "upsample")
    if up is None or up.attrs["factor"] != HALF or len(node.many("x")) != 2:
        return None
    if {"rng", "scale", "shift", *AFTER} & set(node.inputs):
        return None
    large, small = up.out, up.inputs["x"]
    if f.reaches(up, *(value for role, value in node.inputs.items() if role != "x0")):
        return None  # these have to be there before the pass
    node.inputs["x0"] = small
    node.op = "norm_of_upsampled"
    c2 = node.inputs["x1"].shape[3]
    table = node.outputs["table"]
    node.outputs["second"] = f.graph.value("second", (table.shape[0], 4, c2), table.dtype)
    node.outputs["large"] = large
    f.take(node, up)
    return node.out


def conv_upsampled(f: Fusing, node: Node) -> Value | None:
    """A convolution multiplies on the small image what was upsampled"""
    if set(node.inputs) - {"x", "weight", "bias", "emb"} or "partials" not in node.outputs:
        return None
    if {"width", "factor"} & set(node.attrs) or "bias" not in node.inputs:
        return None
    x, weight = node.inputs["x"], node.inputs["weight"]
    norm, up = f.maker(x, "norm_of_upsampled"), f.maker(x, "upsample")
    if norm is not None:
        op, role, given = "conv_upsampled", "a", x
        small, second = norm.inputs["x0"], norm.inputs["x1"].shape[3]
    elif up is not None and up.attrs["factor"] == HALF and "emb" not in node.inputs:
        op, role, given = "conv_of_upsampled", "x", up.inputs["x"]
        small, second = given, 0
    else:
        return None
    co, ci, *size = weight.shape
    if size != [3, 3] or not f.serves_upsampled(small, (ci - second, second), co):
        return None
    exact = f.uncast(weight)  # filters are sums of taps of the float32 ones
    sums, others = (16, co, ci - second), (co, second, 3, 3)
    specs = {"taps": (sums, weight.dtype), "rest": (others, weight.dtype)}
    attrs = {"channels": ci - second, "dtype": weight.dtype}
    made = f.insert(norm or node, "upsampled_filters", {"weight": exact}, specs, **attrs)
    kept = {r: node.inputs[r] for r in ("bias", "emb") if r in node.inputs}
    node.op, node.attrs, node.inputs = op, {}, {role: given, **made.outputs, **kept}
    f.take(node)
    return node.out


def pool_grad(f: Fusing, node: Node) -> Value | None:
    """A quarter of the gradient goes to each of 2x2 pixels"""
    quarter = f.maker(node.inputs["x"], "affine")
    if quarter is None or quarter.attrs != {"scale": 0.25, "offset": 0}:
        return None
    if node.attrs["factor"] != HALF or f.is_exact(node.out):
        return None
    node.op, node.attrs, node.inputs = "avg_pool_grad", {}, {"dy": quarter.inputs["x"]}
    f.take(node)
    return node.out


def pooled_dx(f: Fusing, node: Node) -> Value | None:
    """The gradient of what was upsampled is added up over 2x2 pixels while it is written"""
    large = node.inputs["x"]
    norm = f.maker(large, *NORM_DX)
    if norm is None or norm.outputs["dx1"] is not large or f.reader(large, "sum_pool") is not node:
        return None
    source = f.maker(norm.inputs["x0"], "upsample", "norm_of_upsampled")
    if source is None or node.attrs["window"] != HALF or "rows" in norm.outputs:
        return None
    small = source.inputs["x" if source.op == "upsample" else "x0"]
    if small.shape != node.out.shape:
        return None
    norm.inputs["x0"] = small
    norm.attrs["upsample1"] = True
    f.write(norm, node.out, node, role="dx1")
    return node.out


def small_input_grad(f: Fusing, node: Node) -> Value | None:
    """The input gradient behind upsampling is multiplied on the small image"""
    xs = node.many("x")
    norm = f.maker(xs[0], "norm_of_upsampled")
    if norm is None or len(xs) != 2 or "rng" in node.inputs:
        return None
    conv = next((c for c in f.made_by("conv_upsampled") if c.inputs["a"] is norm.out), None)
    dx = f.reader(node.outputs["dz"], "skip_dx")
    if conv is None or dx is None or not dx.attrs.get("upsample1"):
        return None
    small, dz = norm.inputs["x0"], node.outputs.pop("dz")
    del node.inputs["weight"]
    node.inputs |= {"x0": small, "second": norm.outputs["second"]}
    node.inputs |= {role: conv.inputs[role] for role in ("taps", "rest")}
    halves = {"dz1": small, "dz2": xs[1]}
    halves = {role: f.graph.value(dz.name, x.shape, dz.dtype) for role, x in halves.items()}
    node.op, node.attrs = "conv_upsampled_dx", {"activation": node.attrs["activation"]}
    node.outputs = halves | node.outputs
    dx.inputs |= {"dz": halves["dz1"], "dz2": halves["dz2"]}
    f.take(dx)
    f.take(node)
    return halves["dz1"]


def small_plain_grad(f: Fusing, node: Node) -> Value | None:
    """Likewise where it was upsampled alone"""
    grad = f.maker(node.inputs["x"], "conv_dx")
    if grad is None or node.attrs["window"] != HALF or f.reader(grad.out, "sum_pool") is not node:
        return None
    exact = f.uncast(grad.inputs["weight"])
    filters = [n for n in f.made_by("upsampled_filters") if n.inputs["weight"] is exact]
    if not filters:
        return None
    node.inputs = {"dy": grad.inputs["dy"], **filters[0].outputs}
    node.op, node.attrs = "conv_of_upsampled_dx", {}
    f.take(node, grad)
    return node.out
