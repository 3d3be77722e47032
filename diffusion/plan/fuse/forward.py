"""Rows of the forward pass: epilogues of convolutions, and norms."""

from ..graph import Node, Value
from .rewrite import HALF, Fusing, Row


def _has_epilogue(f: Fusing, node: Node | None) -> bool:
    """Whether a node is a convolution whose kernels have an epilogue."""
    if node is None or node.op == "conv_fused":
        return node is not None
    is_image = node.op == "conv" or node.op == "linear" and len(node.out.shape) == 4
    return is_image and node.keeps_size and not f.is_exact(node.out)


def _becomes_fused(node: Node) -> None:
    if node.op == "linear":
        node.attrs = {"stride": (1, 1), "padding": (0,) * 4}
    node.op = "conv_fused"


def _epilogue_add(f: Fusing, node: Node) -> Value | None:
    """conv + b, where b is of the embedding, another tensor, or a 1x1 convolution of one"""
    a, b = node.inputs["a"], node.inputs["b"]
    if a is b or a.dtype != b.dtype or node.out.dtype != a.dtype:
        return None
    for y, other in ((a, b), (b, a)):
        conv = f.maker(y, "conv", "linear", "conv_fused")
        if not _has_epilogue(f, conv) or f.reader(y, "add") is None:
            continue
        if y.shape != node.out.shape or "partials" in conv.outputs:
            continue
        partner = f.maker(other, "conv", "conv_fused")
        if conv.op == "linear" and _has_epilogue(f, partner) and f.reader(other, "add"):
            continue  # the larger one takes the smaller
        if other.shape == node.out.shape:
            if not _take_term(f, node, conv, other):
                continue
        elif (emb := _embedding_of(f, node, other)) is not None and "emb" not in conv.inputs:
            conv.inputs["emb"] = emb
        else:
            continue
        _becomes_fused(conv)
        f.write(conv, node.out, node)
        return node.out
    return None


def _take_term(f: Fusing, node: Node, conv: Node, other: Value) -> bool:
    """Add `other` in the epilogue: as 1x1 terms where it is that, or as it is."""
    linear = f.maker(other, "linear")
    alone = linear is not None and f.reader(other, "add") is node
    number = len(conv.many("extra"))
    if alone and len(linear.out.shape) == 4 and number < 2:
        if "bias" in linear.inputs and "extra_bias" in conv.inputs:
            return False
        if "bias" in linear.inputs:
            conv.inputs["extra_bias"] = linear.inputs["bias"]
        conv.inputs[f"extra{number}"] = linear.inputs["x"]
        conv.inputs[f"columns{number}"] = linear.inputs["weight"]
        f.take(conv, linear)
        return True
    if "residual" in conv.inputs:
        return False
    conv.inputs["residual"] = other
    return True


def _embedding_of(f: Fusing, node: Node, value: Value) -> Value | None:
    """emb [N, C] of a summand [N, 1, 1, C], or None."""
    n, c = node.out.shape[0], node.out.shape[-1]
    reshape = f.maker(value, "reshape")
    if reshape is None or value.shape != (n, 1, 1, c) or reshape.inputs["x"].shape != (n, c):
        return None
    cast = f.maker(reshape.inputs["x"], "cast")  # which the epilogue spares: it adds in float32
    return reshape.inputs["x"] if cast is None else cast.inputs["x"]


def _few_inputs(f: Fusing, node: Node) -> Value | None:
    """A convolution of an image with three channels reads one with 16"""
    x, weight = node.inputs["x"], node.inputs["weight"]
    width = f.padded_width(x)
    if width is None or not _has_epilogue(f, node):
        return None
    cast = f.maker(x, "cast")
    source = x if cast is None else cast.inputs["x"]
    spec = {"y": ((*x.shape[:3], width), x.dtype)}
    wide = f.insert(node, "pad_channels", {"x": source}, spec, width=width)
    pads = ((0, 0), (0, width - x.shape[3]), (0, 0), (0, 0))
    spec = {"y": ((weight.shape[0], width, *weight.shape[2:]), weight.dtype)}
    filters = f.insert(node, "pad", {"x": weight}, spec, pads=pads)
    node.inputs |= {"x": wide.out, "weight": filters.out}
    f.take(node)
    return node.out


def _few_outputs(f: Fusing, node: Node) -> Value | None:
    """A convolution to three channels writes 16, of which the others are zeros"""
    y = node.out
    if not f.is_few(y) or not _has_epilogue(f, node):
        return None
    if any(r is not None and r.op not in ("cast", "layout") for r in f.readers(y)):
        return None  # others want pixels side by side
    wide = f.graph.value(f"{y.name}.wide", (*y.shape[:3], f.few), y.dtype)
    spec = {"y": (y.shape, y.dtype)}
    columns = f.insert(node, "columns", {"x": wide}, spec, start=0, stop=y.shape[3])
    _becomes_fused(node)
    node.attrs["width"] = f.few
    f.write(node, wide)
    f.write(columns, y)
    return wide


def _terms_together(f: Fusing, node: Node) -> Value | None:
    """(x1 W1 + x2 W2) + conv -> conv + (x1 W1 + x2 W2), one term after the other"""
    a, b = node.inputs["a"], node.inputs["b"]
    for sum_, other in ((a, b), (b, a)):
        inner = f.maker(sum_, "add")
        if inner is None or f.reader(sum_, "add") is not node or sum_.shape != other.shape:
            continue
        terms = [f.maker(v, "linear") for v in inner.inputs.values()]
        conv = f.maker(other, "conv", "conv_fused")
        if None in terms or not _has_epilogue(f, conv):
            continue
        left, right = inner.inputs["a"], inner.inputs["b"]
        inner.inputs, node.inputs = {"a": other, "b": left}, {"a": sum_, "b": right}
        f.take(inner)
        f.take(node)
        return node.out
    return None


def _partials(f: Fusing, node: Node) -> Value | None:
    """The sums of a convolution's result, taken while it is written"""
    conv = f.maker(node.inputs["x"], "conv", "linear", "conv_fused")
    if not _has_epilogue(f, conv) or "partials" in conv.outputs:
        return None
    _becomes_fused(conv)
    conv.outputs["partials"] = node.out
    f.take(conv, node)
    return conv.out


def _dropped_pass(f: Fusing, node: Node) -> Value | None:
    """dropout in the pass of the norm before it"""
    norm = f.maker(node.inputs["x"], "norm_apply")
    if norm is None or "rng" not in node.inputs or f.reader(norm.out, "dropout") is not node:
        return None
    if "rng" in norm.inputs or node.out.shape[-1] % 4:  # a draw is of four channels
        return None
    norm.inputs["rng"] = node.inputs["rng"]
    norm.attrs |= node.attrs
    f.write(norm, node.out, node)
    return node.out


def _table_and_pass(f: Fusing, node: Node) -> Value | None:
    """The table of a norm is made by the launch that applies it"""
    table = f.maker(node.inputs["table"], "norm_table")
    if table is None or table.out.shape[0] != node.out.shape[0]:
        return None
    del node.inputs["table"]
    node.inputs |= table.inputs
    node.op = "norm"
    node.attrs |= table.attrs
    node.outputs["table"] = table.out
    f.take(node, table)
    return node.out


# --- of a training step ---------------------------------------------------------------------------


def _conv_down(f: Fusing, node: Node) -> Value | None:
    """A 3x3 convolution that halves the image"""
    if not f.halves_image(node, node.inputs["x"]) or "bias" not in node.inputs:
        return None
    node.op, node.attrs = "conv_down", {"padding": node.attrs["padding"][0]}
    return node.out


def _norm_of_upsampled(f: Fusing, node: Node) -> Value | None:
    """What a norm reads is upsampled on its way"""
    up = f.maker(node.inputs["x0"], "upsample")
    if up is None or up.attrs["factor"] != HALF or len(node.many("x")) != 2:
        return None
    if {"rng", "scale", "shift"} & set(node.inputs):
        return None
    large, small = up.out, up.inputs["x"]
    sums = [f.maker(value, "moments") for value in node.many("partials")]
    if any(each is not None and each.inputs["x"] is large for each in sums):
        return None  # which have to be there before the pass
    node.inputs["x0"] = small
    node.op = "norm_of_upsampled"
    c2 = node.inputs["x1"].shape[3]
    table = node.outputs["table"]
    node.outputs["second"] = f.graph.value("second", (table.shape[0], 4, c2), table.dtype)
    node.outputs["large"] = large
    f.take(node, up)
    return node.out


def _conv_upsampled(f: Fusing, node: Node) -> Value | None:
    """A convolution multiplies on the small image what was upsampled"""
    if set(node.inputs) - {"x", "weight", "bias", "emb"} or "partials" not in node.outputs:
        return None
    if "width" in node.attrs or "bias" not in node.inputs:
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
    cast = f.maker(weight, "cast")  # filters are sums of taps of the float32 ones
    exact = weight if cast is None else cast.inputs["x"]
    sums, others = (16, co, ci - second), (co, second, 3, 3)
    specs = {"taps": (sums, weight.dtype), "rest": (others, weight.dtype)}
    attrs = {"channels": ci - second, "dtype": weight.dtype}
    made = f.insert(norm or node, "upsampled_filters", {"weight": exact}, specs, **attrs)
    kept = {r: node.inputs[r] for r in ("bias", "emb") if r in node.inputs}
    node.op, node.attrs, node.inputs = op, {}, {role: given, **made.outputs, **kept}
    f.take(node)
    return node.out


FORWARD_ROWS = (
    Row(
        "few channels of an image padded", ("conv",), _few_inputs,
        "2.2 to 3.0 % of an evaluation, 0.3 of a step of 32 images, 1.1 of 128 (H100)",
        ("sample", "step")
    ),
    Row(
        "few channels of a result padded", ("conv",), _few_outputs,
        "0.5 to 1.5 % of an evaluation of 1 to 64 images (H100)",
        ("sample", "step")
    ),
    Row(
        "1x1 terms one after the other", ("add",), _terms_together,
        "2.1 % of a pass of 32 images"
    ),
    Row(
        "embedding, residual and 1x1 skip in the epilogue", ("add",), _epilogue_add,
        "16.0 % of a pass of 32 images"
    ),
    Row("sums in the epilogue", ("moments",), _partials, "4.9 % of a pass of 32 images"),
    Row(
        "dropout in the norm's pass", ("dropout",), _dropped_pass,
        "0.2 % of a step of adm64 at 32 images (H100)", ("train",)
    ),
    Row(
        "table and pass of a norm in one launch", ("norm_apply",), _table_and_pass,
        "0.65 % of a step of 32 images, 0.4 of 128"
    ),
    Row(
        "a convolution that halves the image", ("conv",), _conv_down,
        "1.7 % of a step of ddpm_cifar10 at 64 images: where zeros are behind the image", ("step",)
    ),
    Row(
        "upsampling in the norm's pass", ("norm",), _norm_of_upsampled,
        "1.8 % of a step of 32 images, 4.3 of 128 (H100)", ("step",)
    ),
    Row(
        "multiplied on the small image", ("conv_fused",), _conv_upsampled,
        "1.3 % of a step of 32 images, 2.9 of 128", ("step",)
    )
)  # fmt: skip
