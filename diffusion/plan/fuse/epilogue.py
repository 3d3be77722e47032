"""Rows of epilogues: what a launch adds, and which sums it takes, while it writes."""

from ..graph import Node, Value, rows_beside
from .rewrite import HALF, Fusing


def has_epilogue(f: Fusing, node: Node | None) -> bool:
    """Whether a node is a convolution whose kernels have an epilogue."""
    if node is None or node.op == "conv_fused":
        return node is not None
    is_image = node.op == "conv" or node.op == "linear" and len(node.out.shape) == 4
    return is_image and node.keeps_size and not f.is_exact(node.out, node)


def becomes_fused(node: Node) -> None:
    if node.op == "linear":
        node.attrs = {"stride": (1, 1), "padding": (0,) * 4}
    node.op = "conv_fused"


def epilogue_add(f: Fusing, node: Node) -> Value | None:
    """conv + b, where b is of the embedding, another tensor, or a 1x1 convolution of one"""
    a, b = node.inputs["a"], node.inputs["b"]
    if a is b or a.dtype != b.dtype or node.out.dtype != a.dtype:
        return None
    for y, other in ((a, b), (b, a)):
        conv = f.maker(y, "conv", "linear", "conv_fused")
        if not has_epilogue(f, conv) or f.reader(y, "add") is None:
            continue
        if y.shape != node.out.shape or "partials" in conv.outputs:
            continue
        partner = f.maker(other, "conv", "conv_fused")
        if conv.op == "linear" and has_epilogue(f, partner) and f.reader(other, "add"):
            continue  # the larger one takes the smaller
        if other.shape == node.out.shape:
            if not _take_term(f, node, conv, other):
                continue
        elif (emb := _embedding_of(f, node, other)) is not None and "emb" not in conv.inputs:
            conv.inputs["emb"] = emb
        else:
            continue
        becomes_fused(conv)
        f.write(conv, node.out, node)
        return node.out
    return None


def _take_term(f: Fusing, node: Node, conv: Node, other: Value) -> bool:
    """Add `other` in the epilogue: as 1x1 terms where it is that, or as it is."""
    linear = f.maker(other, "linear")
    alone = linear is not None and f.reader(other, "add") is node
    alone = alone and not f.is_exact(other, linear)
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
    rows = node.out.shape[0], node.out.shape[-1]
    if value.shape != rows_beside(node.out.shape):
        return None
    reshape = f.maker(value, "reshape")
    emb = value if reshape is None else reshape.inputs["x"]
    if emb.shape != rows:  # that of one token, or the sums over an image
        emb = f.insert(node, "reshape", {"x": emb}, {"y": (rows, emb.dtype)}).out
    return f.uncast(emb)  # the epilogue adds in float32


def epilogue_factor(f: Fusing, node: Node) -> Value | None:
    """factor (conv + terms): the number that the sum of a block and its skip is multiplied with"""
    conv = f.maker(node.inputs["x"], "conv", "linear", "conv_fused")
    if node.attrs["offset"] or not has_epilogue(f, conv) or f.reader(conv.out, node.op) is None:
        return None
    if "partials" in conv.outputs or node.out.dtype != conv.out.dtype:
        return None
    becomes_fused(conv)
    factor = float(node.attrs["scale"]) * conv.attrs.get("factor", 1.0)
    conv.attrs = conv.attrs | {"factor": factor}
    f.write(conv, node.out, node)
    return node.out


# by op, of each result: the inputs that are added to it
_ADDED = {
    "channel_norm": {"y": ("residual",)},
    "norm": {"y": ("after_add",)},
    "norm_apply": {"y": ("after_add",)},
    "norm_dx": {"dx1": ("add1", "add1_second"), "dx2": ("add2",)},
    "channel_norm_grad": {"x": ("add",)},
    "avg_pool_grad": {"y": ("add",)},
    "conv_down_dx": {"y": ("add",)},
}


def added(f: Fusing, node: Node) -> Value | None:
    """A summand is added by the launch that makes the other one"""
    for y, other in f.summands(node):
        made = f.maker(y, *_ADDED)
        if made is None or made in f.before or f.reader(y, "add") is not node:
            continue
        if made.op in ("norm", "norm_apply") and f.mode != "train":
            continue  # a UNet's blocks end in convolutions, and `join` has no place for it
        role = next(r for r, v in made.outputs.items() if v is y)
        places = _ADDED[made.op].get(role, ())
        place = next((p for p in places if p not in made.inputs), None)
        if place is None or f.reaches(made, other):
            continue
        cast = f.maker(other, "cast") if made.op == "channel_norm" else None  # which reads any type
        made.inputs[place] = cast.inputs["x"] if cast is not None and cast.widens else other
        f.write(made, node.out, node, role=role)
        return node.out
    return None


def terms_together(f: Fusing, node: Node) -> Value | None:
    """(x1 W1 + x2 W2) + conv -> conv + (x1 W1 + x2 W2), one term after the other"""
    a, b = node.inputs["a"], node.inputs["b"]
    for sum_, other in ((a, b), (b, a)):
        inner = f.maker(sum_, "add")
        if inner is None or f.reader(sum_, "add") is not node or sum_.shape != other.shape:
            continue
        terms = [f.maker(v, "linear") for v in inner.inputs.values()]
        conv = f.maker(other, "conv", "conv_fused")
        if None in terms or not has_epilogue(f, conv):
            continue
        left, right = inner.inputs["a"], inner.inputs["b"]
        inner.inputs, node.inputs = {"a": other, "b": left}, {"a": sum_, "b": right}
        f.take(inner)
        f.take(node)
        return node.out
    return None


def partials(f: Fusing, node: Node) -> Value | None:
    """The sums of a convolution's result, or of 2x2 means, taken while it is written"""
    maker = f.maker(node.inputs["x"], "conv", "linear", "conv_fused", "avg_pool")
    if maker is None or "partials" in maker.outputs:
        return None
    if maker.op == "avg_pool":
        _, h, w, _ = maker.inputs["x"].shape
        if maker.attrs["window"] != HALF or h % 2 or w % 2:
            return None  # PyTorch takes these means
    elif has_epilogue(f, maker):
        becomes_fused(maker)
    else:
        return None
    maker.outputs["partials"] = node.out
    f.take(maker, node)
    return maker.out
