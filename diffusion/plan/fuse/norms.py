"""Rows of norms, and of their gradients: what their passes over memory compute beside them."""

import torch

from triton_kernels.noise.dropout import WORD

from ..graph import Node, Value
from .rewrite import Fusing

NORM_DX = ("norm_dx", "skip_dx")


def dropped_pass(f: Fusing, node: Node) -> Value | None:
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


def table_and_pass(f: Fusing, node: Node) -> Value | None:
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


def input_grad(f: Fusing, node: Node) -> Value | None:
    """act'(z) and the sums for the norm, in the epilogue of the input gradient before it"""
    da, mask = node.inputs["da"], {}
    if "after_scale" in node.inputs:
        return None
    drops = f.maker(da, "dropout")
    if drops and ("rng" not in drops.inputs or da.shape[-1] % 4 or not f.reader(da, node.op)):
        drops = None
    ended, da = ([drops], drops.inputs["x"]) if drops else ([], da)
    grad = f.maker(da, "conv_dx", "linear_dx")
    if grad is None or len(da.shape) != 4 or not grad.keeps_size or f.is_exact(da, grad):
        return None
    if not f.reader(da, drops.op if drops else node.op):
        return None
    if drops:
        words = _written_words(f, node.inputs["table"], drops, da)
        mask = {"rng": drops.inputs["rng"]} | ({} if words is None else {"words": words})
        node.attrs |= drops.attrs
    del node.inputs["da"]
    node.inputs |= {"dy": grad.inputs["dy"], "weight": grad.inputs["weight"], **mask}
    node.op, node.of_matrices = "conv_input_grad", grad.of_matrices
    node.attrs |= grad.attrs or {"stride": (1, 1), "padding": (0,) * 4}
    f.take(node, grad, *ended)
    return node.outputs["dz"]


def input_grad_of_activation(f: Fusing, node: Node) -> Value | None:
    """act'(x) in the input gradient of a linear layer before it, as that of the norm that changes
    nothing. Of 3x3 filters it is predicted to take as long there as by itself."""
    da, x = node.inputs["dy"], node.inputs["x"]
    grad = f.maker(da, "linear_dx")
    if grad is None or f.is_exact(da, grad):
        return None
    if f.reader(da, "act_grad") is not node or x.dtype != da.dtype:
        return None
    n, c = x.shape[0] if len(x.shape) == 4 else 1, x.shape[-1]  # other rows are of one image
    table = torch.tensor([0, 1, 1, 0], dtype=x.exact)[:, None].repeat(n, 1, c)
    node.inputs = {"dy": grad.inputs["dy"], "weight": grad.inputs["weight"], "x0": x}
    node.inputs["table"] = f.constant(table, f"mean, rstd, g, b of {n}x{c}")
    node.op, node.of_matrices = "conv_input_grad", grad.of_matrices
    node.attrs = {**node.attrs, "stride": (1, 1), "padding": (0,) * 4}
    node.outputs = {"dz": node.out, "partials": f.graph.value("sums", (n, 1, 2, c), x.exact)}
    f.take(node, grad)
    return node.outputs["dz"]


def _written_words(f: Fusing, table: Value, dropout: Node, y: Value) -> Value | None:
    """Which elements dropout has kept, as bits, by the pass of the norm of this table that drops
    them. Convolutions in 16 bits read them; None: whoever drops again draws again."""
    norm = f.maker(table, "norm")
    if norm is None or norm.inputs.get("rng") is not dropout.inputs["rng"]:
        return None
    if norm.attrs["layer"] != dropout.attrs["layer"]:
        return None
    if y.dtype.itemsize != 2 or any(x.shape[-1] % 8 for x in norm.many("x")):
        return None
    if "words" not in norm.outputs:
        shape = *y.shape[:-1], -(-y.shape[-1] // WORD)
        norm.outputs["words"] = f.graph.value("words", shape, torch.int64)
    return norm.outputs["words"]


def coefficients(f: Fusing, node: Node) -> Value | None:
    """The coefficients of a norm's backward are made by the launch of dx"""
    table = f.maker(node.inputs["coeff"], "norm_grad_table")
    if table is None or f.reader(node.inputs["coeff"], node.op) is not node:
        return None
    given, images = table.inputs, [v for r, v in node.inputs.items() if r != "coeff"]
    if "factor" in node.attrs or len({v.dtype for v in (*images, node.out)}) > 1:
        return None  # which the other launch has alone
    if node.op == "norm_dx" and len(node.many("x")) > 1:
        return None
    if node.op == "skip_dx":
        if "scale" in given or "shift" in given or "emb" in table.outputs:
            return None
        given = {role: given[role] for role in ("partials", "table")}
    del node.inputs["coeff"]
    node.inputs |= given
    node.op = node.op.replace("_dx", "_backward")
    node.attrs |= table.attrs
    node.outputs |= {role: value for role, value in table.outputs.items() if role != "coeff"}
    f.take(node, table)
    return node.out


def embedding_sums(f: Fusing, node: Node) -> Value | None:
    """The sums of dx over pixels follow from the norm's sums, where nothing is added to it"""
    norm = f.maker(node.inputs["x"], "norm_dx") if _is_of_pixels(node) else None
    if norm is None or len(norm.many("x")) > 1 or "add1" in norm.inputs:
        return None
    if f.mode == "step" and _for_biases(f, node) and len(f.readers(node.out)) > 1:
        return None  # the norm's launch adds to one bias alone
    table = f.maker(norm.inputs["coeff"], "norm_grad_table")
    convs = ("conv_fused", "conv_upsampled", "conv_of_upsampled")
    conv = f.maker(norm.inputs["x0"], *convs)
    if table is None or "emb" in table.outputs or conv is None or "partials" not in conv.outputs:
        return None
    table.inputs["input_partials"] = conv.outputs["partials"]
    table.outputs["emb"] = node.out
    f.take(table, node)
    return node.out


def rows_of_dx(f: Fusing, node: Node) -> Value | None:
    """The sums of dx over pixels, taken while it is written"""
    x = node.inputs["x"]
    ops = (*NORM_DX, "channel_norm_grad", "attention_grad", "avg_pool_grad")
    made = f.maker(x, *ops) if _is_of_pixels(node) else None
    if made is None or "rows" in made.outputs or made.out is not x:
        return None
    if made.op == "attention_grad" and "qkv" not in made.outputs:
        return None
    if not _for_biases(f, node):
        return None  # rows are sums over any pixels: they say nothing of one image
    made.outputs["rows"] = node.out
    f.take(made, node)
    return node.out


def _for_biases(f: Fusing, node: Node) -> bool:
    """Whether sums [N, C] are only added up further, over images."""
    readers = f.readers(node.out)
    return all(r is not None and r.op == "sum" and r.attrs["axes"] == (0,) for r in readers)


def _is_of_pixels(node: Node) -> bool:
    """Whether a sum of an image is over its pixels: [N, C]"""
    return node.attrs["axes"] == (1, 2) and len(node.out.shape) == 2


def factor_of_dx(f: Fusing, node: Node) -> Value | None:
    """The number that a gradient is multiplied with, in the launch that adds it up"""
    dx = node.inputs["x"]
    made = f.maker(dx, *NORM_DX)
    if made is None or made.outputs["dx1"] is not dx or f.reader(dx, node.op) is not node:
        return None
    if node.attrs["offset"] or node.out.dtype != dx.dtype or "rows" in made.outputs:
        return None
    made.attrs = made.attrs | {"factor": node.attrs["scale"] * made.attrs.get("factor", 1)}
    f.write(made, node.out, node, role="dx1")
    return node.out


def two_summands(f: Fusing, node: Node) -> Value | None:
    """Of a sum that dx gets, each summand is added by itself"""
    total = f.maker(node.inputs.get("add1"), "add")
    if total is None or "add1_second" in node.inputs or "rows" in node.outputs:
        return None
    a, b = total.inputs["a"], total.inputs["b"]
    alike = a is not b and a.shape == b.shape == total.out.shape
    if not alike or f.reader(total.out, node.op) is not node:
        return None
    node.inputs |= {"add1": a, "add1_second": b}
    f.take(node, total)
    return node.out


def skip_dx(f: Fusing, node: Node) -> Value | None:
    """The input gradient of a 1x1 skip, in the pass that makes the norm's dx"""
    places = ["add1", "add2"][: len(node.many("x"))]
    found = {}
    for place in places:
        for role in (place, f"{place}_second"):
            linear = f.maker(node.inputs.get(role), "linear_dx")
            if place not in found and linear and f.reader(linear.out, "norm_dx") is node:
                found[place] = role, linear
    linears = [linear for _, linear in found.values()]
    if len(found) < len(places) or "dy" in node.inputs:
        return None
    if any(f.is_exact(node.inputs["dz"], linear) for linear in linears):
        return None
    weight = _whole_weight(f, [linear.inputs["weight"] for linear in linears])
    dys = {linear.inputs["dy"] for linear in linears}
    if weight is None or len(dys) > 1 or len(linears[0].out.shape) != 4:
        return None
    taken = {role for role, _ in found.values()}
    left = {role: v for role, v in node.inputs.items() if role not in taken}
    left |= {"dy": dys.pop(), "weight": weight}
    if len({v.dtype for role, v in left.items() if role != "coeff"}) > 1:
        return None  # its kernels read one type
    if "add1_second" in left:
        left["add1"] = left.pop("add1_second")
    node.inputs = left
    node.op, node.of_matrices = "skip_dx", linears[0].of_matrices
    f.take(node, *linears)
    return node.out


def _whole_weight(f: Fusing, columns: list[Value]) -> Value | None:
    """The matrix of which these are the columns, one after the other, or None."""
    if len(columns) == 1:
        return columns[0]
    slices = [f.maker(value, "slice") for value in columns]
    if None in slices or len({s.inputs["x"] for s in slices}) > 1:
        return None
    whole, end = slices[0].inputs["x"], 0
    for part in slices:
        if part.attrs["axis"] != 1 or part.attrs["start"] != end:
            return None
        end = part.attrs["stop"]
    return whole if end == whole.shape[1] else None
