"""Rows of gradients of parameters."""

from ..graph import Node, Value
from ..ops import WEIGHT_GRADS
from .rewrite import Fusing

# of weights that were parts of one product, or became parts
_MOVES = ("reshape", "cat", "slice", "layout")


def exact_weight_grad(f: Fusing, node: Node) -> Value | None:
    """A gradient of a weight in 16 bits, or parts of some, in the parameter's own dtype"""
    wide, moved, stack = {}, [], [node.inputs["x"]]
    while stack:
        value = stack.pop()
        maker = f.maker(value, *WEIGHT_GRADS, *_MOVES)
        if maker is None:
            return None
        if value in wide:
            continue
        readers = f.readers(value)
        casts = [r for r in readers if r and r.op == "cast" and r.out.dtype == node.out.dtype]
        moves = [r for r in readers if r and r.op in _MOVES]
        if len(casts) > 1 or len(casts) + len(moves) < len(readers):
            return None
        moved.append((maker, value, *casts))
        made = casts[0].out if casts else f.graph.value(value.name, value.shape, node.out.dtype)
        wide[value] = made
        stack += [r.out for r in moves] + ([*maker.inputs.values()] if maker.op in _MOVES else [])
    for maker, value, *casts in moved:
        maker.inputs = {role: wide.get(x, x) for role, x in maker.inputs.items()}
        f.write(maker, wide[value], *casts)
    return node.out


def exact_weight_grad_of_norm(f: Fusing, node: Node) -> Value | None:
    """Likewise of filters that a norm has made of a parameter in 32 bits"""
    dw, dtype = node.inputs["dy"], node.inputs["x"].dtype
    product = f.maker(dw, *WEIGHT_GRADS)
    if product is None or dw.dtype == dtype or f.reader(dw, "channel_norm_grad") is not node:
        return None
    node.inputs["dy"] = f.graph.value(dw.name, dw.shape, dtype)
    f.write(product, node.inputs["dy"])
    f.take(node)
    return node.out


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
