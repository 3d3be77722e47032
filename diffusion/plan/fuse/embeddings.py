"""Rows of products of an embedding, and of what they multiply and are added to."""

from itertools import pairwise

import torch

from ..graph import Node, Value, numbered, rows_beside
from ..ops import AFTER
from .products import side_by_side_product
from .rewrite import Fusing

# numbers of filters that are padded. That was timed with 18 million; fewer than this are read in
# about the time of a launch, however they lie
_LARGE = 2**20


def products_of_an_embedding(f: Fusing, node: Node) -> Value | None:
    """x W1, x W2, ... of vectors -> columns of x [W1, W2, ...]"""
    x = node.inputs["x"]
    if len(x.shape) != 2:
        return None  # columns of an image would be copies
    alike = [r for r in f.readers(x) if r is not None and _is_beside(f, r, node)]
    operands = {p: [p.inputs[role] for role in p.inputs if role != "x"] for p in alike}
    products = [p for p in alike if not any(f.reaches(q, *operands[p]) for q in alike)]
    few = x.shape[0] <= sum(p.out.shape[1] for p in products)  # not the rows of a sequence
    if len(products) < 2 or node not in products or not few:
        return None
    together, start = side_by_side_product(f, products), 0
    for p in products:
        stop = start + p.out.shape[1]
        spec, ends = {"y": (p.out.shape, p.out.dtype)}, {"axis": 1, "start": start, "stop": stop}
        f.write(f.insert(p, "slice", {"x": together}, spec, **ends), p.out, p)
        start = stop
    return together


def rows_of_16_bytes(f: Fusing, node: Node) -> Value | None:
    """x W of vectors -> [x, 0] [W, 0], where rows of 16 bits then begin at multiples of 16 bytes"""
    x, weight = node.inputs["x"], node.inputs["weight"]
    ci, size = weight.shape[1], weight.dtype.itemsize
    if size != 2 or not ci * size % 16 or not len(x.shape) == len(weight.shape) == 2:
        return None
    if weight.numel < _LARGE:
        return None
    zeros = -ci % (16 // size)
    for role, value in (("x", x), ("weight", weight)):
        spec = {"y": ((value.shape[0], ci + zeros), value.dtype)}
        made = f.insert(node, "pad", {"x": value}, spec, pads=((0, 0), (0, zeros)))
        node.inputs[role] = made.out
    f.take(node)
    return node.out


def _is_beside(f: Fusing, node: Node, other: Node) -> bool:
    """Whether these products of the same vectors can be one: who uses some of the network's results
    expects no gradients of what the others alone depend on."""

    def what(n: Node) -> tuple:
        results = [f.reaches(n, y) for y in f.graph.outputs] if len(f.graph.outputs) > 1 else []
        return n.op, "bias" in n.inputs, n.of_matrices, n.inputs["x"], n.out.dtype, results

    return node is other or node.op == other.op and what(node) == what(other)


def pass_of_an_embedding(f: Fusing, node: Node) -> Value | None:
    """act(x g + b), or x g + b, with g and b of an embedding: in the pass of a norm before it, or
    one pass as of a norm whose table has mean 0, rstd 1, g and b"""
    if node.op == "add" and f.reader(node.out, "act") is not None:
        return None  # that pass has it all
    y = node.inputs["x"] if node.op == "act" else node.out
    total = f.maker(y, "add")
    offset = _of_images(total)
    product = f.maker(y if offset is None else total.inputs["a"], "mul")
    gain = _of_images(product)
    steps = [product, node] if offset is None or node is total else [product, total, node]
    if gain is None or any(f.reader(a.out, b.op) is not b for a, b in pairwise(steps)):
        return None
    x = product.inputs["a"]
    if not (x.dtype == node.out.dtype and x.shape == node.out.shape) or x.dtype.is_complex:
        return None
    n, c, exact = x.shape[0], x.shape[-1], x.exact
    norm = f.maker(x, "norm_apply")
    if _ends_in(f, norm, product) and offset is not None and node.op == "add":
        norm.inputs |= {
            role: _row(f, node, part, (n, c))
            for role, part in zip(AFTER, (gain, offset), strict=True)
        }
        f.write(norm, node.out, *steps)
        return node.out
    first = torch.tensor([0, 1], dtype=exact)[:, None].repeat(n, 1, c)
    rows = [f.constant(first, f"mean, rstd of {n}x{c} in {exact}")]
    if offset is None:
        offset = f.constant(torch.zeros(n, 1, c, dtype=exact), f"no b of {n}x{c} in {exact}")
    rows += [_row_of_table(f, node, part, (n, 1, c)) for part in (gain, offset)]
    table = f.insert(node, "cat", numbered("x", rows), {"y": ((n, 4, c), exact)}, axis=1).out
    node.attrs = {"activation": node.attrs["activation"] if node.op == "act" else "identity"}
    node.op, node.inputs = "norm_apply", {"x0": x, "table": table}
    f.take(node, *steps[:-1])
    return node.out


def _ends_in(f: Fusing, norm: Node | None, product: Node) -> bool:
    """Whether a product alone reads what the pass of a norm writes, which may multiply itself."""
    if f.mode != "train" or norm is None or f.reader(norm.out, "mul") is not product:
        return False
    of_norm = f.maker(norm.inputs["table"], "norm_table")
    return of_norm is not None and norm.inputs.keys().isdisjoint(("rng", *AFTER))


def _of_images(node: Node | None) -> Value | None:
    """What a sum or product reads beside a tensor, if it is a vector of channels of each image."""
    if node is None or len(node.out.shape) < 3:
        return None
    a, b = node.inputs["a"], node.inputs["b"]
    shape, rows = node.out.shape, rows_beside(node.out.shape)
    return b if a.shape == shape and b.shape == rows != shape else None


def _row(f: Fusing, before: Node, value: Value, shape: tuple[int, ...]) -> Value:
    if value.shape != shape:
        spec = {"y": (shape, value.dtype)}
        value = f.insert(before, "reshape", {"x": value}, spec).out
    return value


def _row_of_table(f: Fusing, before: Node, value: Value, shape: tuple[int, ...]) -> Value:
    exact, value = before.out.exact, _row(f, before, value, shape)
    if value.dtype != exact:
        value = f.insert(before, "cast", {"x": value}, {"y": (shape, exact)}).out
    return value
