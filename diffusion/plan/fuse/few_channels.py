"""Rows of images with few channels, and of their gradients: kernels address 16 at least.

Filters of up to 3x3 pixels alone, whose kernels fetch all that a tile reads at once. Others fetch,
and multiply, the zeros for every tap: filters of 7x7, and 64 images of 64x64, took 419 us forward
and 385 for the gradient of the filters, by kernels of any number of channels 131 and 117.
"""

from ..graph import Node, Value
from .epilogue import becomes_fused, has_epilogue
from .rewrite import Fusing

_LARGEST = 3  # pixels of a side


def few_inputs(f: Fusing, node: Node) -> Value | None:
    """A convolution of an image with three channels reads one with 16"""
    x, weight = node.inputs["x"], node.inputs["weight"]
    width = f.padded_width(x)
    if width is None or not has_epilogue(f, node) or _is_large(weight):
        return None
    spec = {"y": ((*x.shape[:3], width), x.dtype)}
    wide = f.insert(node, "pad_channels", {"x": f.uncast(x)}, spec, width=width)
    pads = ((0, 0), (0, width - x.shape[3]), (0, 0), (0, 0))
    spec = {"y": ((weight.shape[0], width, *weight.shape[2:]), weight.dtype)}
    filters = f.insert(node, "pad", {"x": weight}, spec, pads=pads)
    node.inputs |= {"x": wide.out, "weight": filters.out}
    f.take(node)
    return node.out


def few_outputs(f: Fusing, node: Node) -> Value | None:
    """A convolution to three channels writes 16, of which the others are zeros"""
    y = node.out
    if not f.is_few(y) or not has_epilogue(f, node):
        return None
    readers = f.readers(y)
    if any(r is not None and r.op not in ("cast", "layout") for r in readers):
        return None  # others want pixels side by side
    if f.mode == "train" and None in readers:
        return None  # as does who called
    wide = f.graph.value(f"{y.name}.wide", (*y.shape[:3], f.few), y.dtype)
    spec = {"y": (y.shape, y.dtype)}
    columns = f.insert(node, "columns", {"x": wide}, spec, start=0, stop=y.shape[3])
    becomes_fused(node)
    node.attrs["width"] = f.few
    f.write(node, wide)
    f.write(columns, y)
    return wide


def _is_large(filters: Value) -> bool:
    return max(filters.shape[2:], default=1) > _LARGEST


def few_channels(f: Fusing, node: Node) -> Value | None:
    """A gradient with three channels, or an image, is read with 16"""
    changed = False
    if node.op != "sum" and (not node.keeps_size or _is_large(node.inputs.get("weight", node.out))):
        return None  # as a layer without an epilogue, in forward
    for role in {"conv_dw": ("dy", "x"), "conv_input_grad": ("dy",), "sum": ("x",)}[node.op]:
        value = node.inputs[role]
        if node.op == "sum" and (f.mode != "step" or f.maker(value) is not None):
            continue  # of no image, or of a gradient that backward does not begin with
        width = f.padded_width(value)
        padded = None if width is None else _padded(f, node, value, width)
        if padded is not None:
            node.inputs[role] = padded
            changed = True
    if changed and node.op == "sum":  # of which those of the channels that count are read
        wide = f.graph.value(node.out.name, (node.out.shape[0], width), node.out.dtype)
        for reader in filter(None, f.readers(node.out)):
            reader.inputs["x"] = wide
            f.take(reader)
        f.write(node, wide)
    f.take(node)
    return node.out if changed else None


def _padded(f: Fusing, node: Node, value: Value, width: int) -> Value | None:
    """The value with zeros behind its channels, which forward or another node may have made."""
    for other in f.made_by("pad_channels"):
        if other.inputs["x"] is f.uncast(value):
            return other.out
    if value in f.graph.inputs or f.maker(value) in f.before:
        return None  # forward would have made it
    spec = {"y": ((*value.shape[:3], width), value.dtype)}
    return f.insert(node, "pad_channels", {"x": value}, spec, width=width).out
