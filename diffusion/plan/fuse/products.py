"""Rows of gradients of concatenations."""

from ..graph import Node, Value
from .rewrite import Fusing


def halves_of_dx(f: Fusing, node: Node) -> Value | None:
    """The gradients of the halves of a concat are products of their own, with their columns of the
    filters: of one product, or of two that are added"""
    dx = node.inputs["x"]
    add = f.maker(dx, "add")
    whole = [
        f.maker(v, "conv_dx", "linear_dx") for v in ([dx] if add is None else add.inputs.values())
    ]
    halves = f.readers(dx)
    if len(halves) != 2 or not all(r is not None and _is_half(f, r, dx) for r in halves):
        return None
    if not all(p is not None and p.keeps_size and p.out.shape == dx.shape for p in whole):
        return None
    if any(p.inputs["weight"].numel > dx.numel for p in whole):
        return None  # columns of filters are copies, too
    if add is not None and any(f.reader(p.out, "add") is not add for p in whole):
        return None
    for half in halves:
        spec = {"y": (half.out.shape, dx.dtype)}
        ends = half.attrs | {"axis": 1}
        parts = [_with_columns(f, half, product, ends, spec) for product in whole]
        if add is None:
            f.write(parts[0], half.out, half)
        else:
            half.op, half.attrs = "add", {}
            half.inputs = {role: part.out for role, part in zip("ab", parts, strict=True)}
            f.take(half)
    return node.out


def _is_half(f: Fusing, node: Node, dx: Value) -> bool:
    """Whether a node reads channels of an image of which kernels can read the images."""
    if node.op != "slice" or len(dx.shape) != 4 or node.attrs["axis"] != 3:
        return False
    return node.out.shape[3] * node.out.dtype.itemsize % 16 == 0 and not f.is_few(node.out)


def _with_columns(f: Fusing, before: Node, product: Node, ends: dict, spec: dict) -> Node:
    """The product, of these columns of its filters."""
    weight = product.inputs["weight"]
    shape = weight.shape[0], ends["stop"] - ends["start"], *weight.shape[2:]
    columns = f.insert(before, "slice", {"x": weight}, {"y": (shape, weight.dtype)}, **ends).out
    made = f.insert(before, product.op, product.inputs | {"weight": columns}, spec, **product.attrs)
    made.of_matrices = product.of_matrices
    return made
