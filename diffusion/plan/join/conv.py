"""Convolutions: split-K, and fused with the norm before or after them."""

from triton_kernels.conv.split import split_spec

from ..graph import Node
from .attention import waits_for_projection
from .resample import of_upsampled
from .state import TERMS, Joining, factor_of, norm_attrs, norm_inputs

_NORM_NEXT_PIXELS = 64  # of an image at most, whose norm may be in the launch of its convolution


def linear(j: Joining, node: Node) -> None:
    """Of images, a convolution; to q, k and v, it waits for the attention."""
    if len(node.out.shape) != 4:
        return j.other(node)
    reader = j.first_reader(node.out)
    alone = reader is not None and not j.others_read(node.out, reader)
    if alone and reader.op == "attention" and waits_for_projection(reader):
        return None
    return conv(j, node)


def conv(j: Joining, node: Node) -> None:
    r, s = j.filters(node).shape[2:]
    odd = r == s and r % 2 == 1  # as the filters of all kernels that join anything are
    if odd and r > 1 and _halves(node) and _down(j, node):
        return None
    if not node.keeps_size or not odd:
        return j.other(node)
    y, x = node.out, node.inputs["x"]
    norm = j.late(x, "norm")
    if norm is not None and _norm_conv(j, node, norm):
        return None
    if j.late(x, "upsample") and of_upsampled(j, node):
        return None
    j.need(x)
    terms = {role: node.inputs[role] for role in TERMS if role in node.inputs}
    j.need(*terms.values())
    reader = j.first_reader(y)
    if reader is not None and reader.op in ("upsample", "avg_pool"):
        _take_sums(j, node)
    stats, width = "partials" in node.outputs, node.attrs.get("width")
    usual = stats and width is None
    splits = usual and j.joins("conv_split", j.spec(node, x))
    if reader is not None and usual:
        if reader.op == "norm" and _conv_then_norm(j, node, reader, splits):
            return None
    if splits:
        return _in_parts(j, node)
    j.emit("conv_few", node.inputs, node.outputs, node, **node.attrs)
    return None


def _in_parts(j: Joining, node: Node, **how: int) -> None:
    y = node.out
    parts = j.graph.value(f"{y.name}.parts", y.shape, y.exact)
    extra = {r: v for r, v in node.inputs.items() if r[:-1] in ("extra", "columns")}
    inputs = {"x": node.inputs["x"], "weight": node.inputs["weight"], **extra}
    split = j.emit("conv_split", inputs, {"parts": parts}, node, **how)
    j.parts[y] = node
    node.inputs["parts"] = split.out
    if "partials" in node.outputs:
        j.measured[node.outputs["partials"]] = y


def _halves(node: Node) -> bool:
    """Whether it is of stride 2, to images half as high and wide, with as many zeros above as left
    of them."""
    above, _, left, _ = node.attrs.get("padding", (0,) * 4)
    x, y = node.inputs["x"].shape, node.out.shape
    stride = node.attrs.get("stride") == (2, 2) and above == left
    return node.op == "conv" and stride and x[1:3] == (2 * y[1], 2 * y[2])


def _down(j: Joining, node: Node) -> bool:
    """In parts, whose sum the norm behind it takes too."""
    x, how = node.inputs["x"], {"stride": 2, "padding": node.attrs["padding"][0]}
    j.need(x)
    spec = split_spec(j.dry[x], j.filters(node), **how, allow_tf32=j.tf32)
    if not j.joins("conv_split", spec):
        return False
    sums = next((r for r in j.readers(node.out) if r.op == "moments"), None)
    if sums is not None:
        node.outputs["partials"] = sums.out
    _in_parts(j, node, **how)
    return True


def _take_sums(j: Joining, node: Node) -> None:
    """Kernels are measured with their sums."""
    if node.op == "conv_fused" and "partials" not in node.outputs:
        n, _, _, c = node.out.shape
        sums = j.graph.value(f"{node.out.name}.sums", (n, 1, 2, c), node.out.exact)
        node.outputs["partials"] = sums


def _conv_then_norm(j: Joining, node: Node, norm: Node, splits: bool) -> bool:
    """conv and the norm that reads it first in one launch."""
    y, x = node.out, node.inputs["x"]
    n, h, w, co = y.shape
    if norm.inputs["x0"] is not y or "scale" in norm.inputs or "shift" in norm.inputs:
        return False
    if not j.ready(norm, "x1", "weight", "bias"):
        return False
    x2, groups = norm.inputs.get("x1"), norm.attrs["groups"]
    second = 0 if x2 is None else x2.shape[3]
    pixels = h * w
    factor = factor_of(node)
    spec = j.spec(node, x, groups=groups, beside=second, factor=bool(factor))
    keep = j.others_read(y, norm)
    if splits or pixels > _NORM_NEXT_PIXELS or not j.joins("conv_norm", spec):
        return False
    j.need(x2)
    affine = {f"norm_{role}": norm.inputs[role] for role in ("weight", "bias")}
    outputs = {"a": norm.out}
    if keep:
        outputs["y"] = y
    if keep and not j.reads_whole(2 * n * pixels * co, pixels):
        outputs["partials"] = node.outputs["partials"]
    elif keep:
        j.measured[node.outputs["partials"]] = y
    attrs = norm_attrs(norm) | factor
    j.emit("conv_norm", {**node.inputs, **affine, "x2": x2}, outputs, node, **attrs)
    j.graph.reason(norm.out, "a norm in the launch of its convolution")
    j.done.add(norm)
    return True


def _norm_conv(j: Joining, node: Node, norm: Node) -> bool:
    """act(norm(x)) made on the way by the convolution that reads it."""
    h, w = norm.out.shape[1:3]
    if any(pixels != h * w for pixels in norm.attrs["pixels"]) or j.others_read(norm.out, node):
        return False
    if "partials" not in node.outputs or "width" in node.attrs or "x1" in norm.inputs:
        return False
    inputs = dict(node.inputs)
    for role in ("extra0", "extra1"):  # what is added may be upsampled there, too
        if up := j.late(inputs.get(role), "upsample"):
            inputs[role] = up.inputs["x"]
    j.need(*(v for role, v in inputs.items() if role in TERMS))
    x, partials = norm.inputs["x0"], norm.inputs["partials0"]
    factor, sums = factor_of(node), (j.dry[partials].shape[1],)
    spec = j.spec(node, x, groups=norm.attrs["groups"], tiles=sums, factor=bool(factor))
    if not j.joins("norm_conv", spec):
        return False
    del inputs["x"]
    inputs |= {"x": x, "partials0": partials} | norm_inputs(norm)
    attrs = norm_attrs(norm) | factor | {"pixels": norm.attrs["pixels"]}
    j.emit("norm_conv", inputs, node.outputs, node, **attrs)
    j.graph.reason(node.out, "a norm made by the convolution that reads it")
    j.forget(norm.out)
    return True
