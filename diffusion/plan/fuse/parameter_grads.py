"""Rows of gradients of parameters."""

from ..graph import Node, Value
from .rewrite import Fusing


def exact_weight_grad(f: Fusing, node: Node) -> Value | None:
    """The gradient of a weight in 16 bits, in the parameter's own dtype"""
    x = node.inputs["x"]
    reshape = f.maker(x, "reshape")  # of a weight that has had another shape
    before = x if reshape is None else reshape.inputs["x"]
    grad = f.maker(before, "conv_dw", "linear_dw")
    if grad is None or f.reader(x, "cast") is not node:
        return None
    if reshape is None:
        f.write(grad, node.out, node)
        return node.out
    if f.reader(before, "reshape") is not reshape:
        return None
    wide = f.graph.value(before.name, before.shape, node.out.dtype)
    f.write(grad, wide)
    reshape.inputs["x"] = wide
    f.write(reshape, node.out, node)
    return wide


def bias_sums(f: Fusing, node: Node) -> Value | None:
    """Gradients of biases are added up together, behind all others"""
    rows = node.inputs["x"]
    maker = f.maker(rows)
    if node.attrs["axes"] != (0,) or maker is None or len(rows.shape) != 2:
        return None
    role = next(r for r, v in maker.outputs.items() if v is rows)
    if role == "emb" and "input_bias" not in maker.outputs:
        maker.outputs["input_bias"] = node.out
        f.take(maker, node)
        if not f.readers(rows):
            del maker.outputs["emb"]
        return node.out
    if maker.op == "sum" and maker.attrs["axes"] == (*range(1, len(maker.inputs["x"].shape) - 1),):
        if any(r is None or r.op not in ("sum", "bias_grad") for r in f.readers(rows)):
            return None
        maker.op, maker.attrs = "row_sums", {}
    elif role != "rows" and maker.op != "row_sums":
        return None
    node.op, node.attrs, node.inputs = "bias_grad", {}, {"rows": rows}
    return node.out
