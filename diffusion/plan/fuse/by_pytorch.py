"""Rows of what PyTorch computes: casts, parts, copies and concatenations that need no pass of their
own, because its kernels read and write any type and any steps through memory."""

import torch

from ..graph import Node, Value, numbered
from ..ops import AFTER
from .rewrite import NOT_IN_A_STEP, Fusing, Row

# of rows that lie apart
_READERS = ("act", "add", "affine", "cast", "cat", "columns", "mul", "slice", "sum")
# which have gradients of it
_OF_EMBEDDING = ("norm_act_grad", "norm_backward", "norm_grad_table", "skip_backward")
_ROWS = {"emb", "scale", "shift", *AFTER}  # one for each image, which our kernels read so, too


def cast_of_parts(f: Fusing, node: Node) -> Value | None:
    """A tensor of which only parts are read is cast part by part, where they are read"""
    cast = f.maker(node.inputs["x"], "cast")
    if cast is None or not cast.widens:
        return None
    if any(reader is None or reader.op != "slice" for reader in f.readers(cast.out)):
        return None
    before = cast.inputs["x"]
    spec = {"y": (node.out.shape, before.dtype)}
    small = f.insert(node, "slice", {"x": before}, spec, **node.attrs).out
    node.op, node.inputs, node.attrs = "cast", {"x": small}, {}
    f.take(node)
    return node.out


def cat_as_it_is_read(f: Fusing, node: Node) -> Value | None:
    """A concatenation that only a cast reads is written in that type"""
    cat = f.maker(node.inputs["x"], "cat")
    if cat is None or f.reader(cat.out, "cast") is not node or not node.casts_floats:
        return None
    each = dict.fromkeys(cat.inputs.values())
    parts = {part: _in_type(f, part, node.out.dtype) for part in each}
    cat.inputs = {role: parts[part] for role, part in cat.inputs.items()}
    f.write(cat, node.out, node)
    return node.out


def side_by_side(f: Fusing, node: Node) -> Value | None:
    """Concatenations of concatenations are one; gradients of scales and shifts, which a norm's
    kernels make in float32, are cast behind it, all at once"""

    def is_inner(cat: Node | None) -> bool:
        reader = None if cat is None else f.reader(cat.out, "cat")
        return reader is not None and _kind(reader) == _kind(cat)

    def parts_of(cat: Node) -> list[Value]:
        found = []
        for part in cat.many("x"):
            maker = f.maker(part, "cat")
            found += parts_of(maker) if is_inner(maker) else [part]
        return found

    if is_inner(node):
        return None
    parts = parts_of(node)
    made = [f.uncast(part) for part in parts]
    low = node.out.dtype != node.out.exact and all(
        len(x.shape) == 2
        and f.maker(x, *_OF_EMBEDDING)
        and f.reader(x, "cat", "cast")
        and f.reader(part, "cat")
        for x, part in zip(made, parts, strict=True)
    )
    if not low and len(parts) == len(node.inputs):
        return None
    node.inputs = numbered("x", made if low else parts)
    f.take(node)
    if low:
        for x in made:
            x.dtype = x.exact
        spec = {"y": (node.out.shape, node.out.exact)}
        together = f.insert(node, "cat", node.inputs, spec, **node.attrs).out
        node.op, node.inputs, node.attrs = "cast", {"x": together}, {}
        f.take(node)
    return node.out


def _kind(cat: Node) -> tuple:
    return cat.attrs["axis"], cat.out.dtype


def _in_type(f: Fusing, part: Value, dtype: torch.dtype) -> Value:
    """What a concatenation in a type reads of a part: the numbers before they were widened, what a
    norm over channels writes for it alone, a cast of it that there is, or the part itself."""
    before, norm = f.unwidened(part), f.maker(part, "channel_norm")
    if before.dtype == dtype:
        return before
    if norm is not None and f.reader(part, "cat") is not None:
        alone = f.graph.value(part.name, part.shape, dtype)
        f.write(norm, alone)
        return alone
    casts = (r.out for r in f.readers(part) if r is not None and r.op == "cast")
    return next((y for y in casts if y.dtype == dtype), part)


def _copy_as_it_is_read(f: Fusing, node: Node) -> Value | None:
    """A copy in another order reads what a cast before it does, and writes what one behind it does,
    if nothing else reads what is between them"""
    if not node.out.dtype.is_floating_point:
        return None
    behind, before = f.reader(node.out, "cast"), f.maker(node.inputs["x"], "cast")
    if behind is not None and behind.out.dtype.is_floating_point:
        f.write(node, behind.out, behind)
    elif before not in (None, *f.before) and f.reader(before.out, "layout") is node:
        x = before.inputs["x"]
        moves = x.dtype.is_floating_point and x.numel == node.out.numel
        if not moves or f.maker(x, "slice"):  # whose cast reads it where it lies
            return None
        node.inputs["x"] = x
        f.take(node, before)
    else:
        return None
    return node.out


def _part_where_it_lies(f: Fusing, node: Node) -> Value | None:
    """Channels that PyTorch alone reads, or rows of an embedding, are no copy"""
    if node.attrs["axis"] != len(node.out.shape) - 1 or not _is_read_apart(f, node.out):
        return None
    node.op, node.attrs = "columns", {end: node.attrs[end] for end in ("start", "stop")}
    f.take(node)
    return node.out


def _is_read_apart(f: Fusing, value: Value) -> bool:
    """Whether all that read a value read rows that lie apart."""
    return all(r is not None and _reads_apart(f, r, value) for r in f.readers(value))


def _reads_apart(f: Fusing, node: Node, value: Value) -> bool:
    if node.op == "reshape" and node.out.shape[-1] == value.shape[-1]:
        return _is_read_apart(f, node.out)
    roles = {role for role, v in node.inputs.items() if v is value}
    return node.op in _READERS or len(value.shape) == 2 and roles <= _ROWS


def attention_without_kernels(f: Fusing, node: Node) -> Value | None:
    """Attention is PyTorch's if the GPU has no kernel for its gradient"""
    attention = f.maker(node.inputs["o"], "attention")
    if attention is None or f.serves_attention_grad(node):
        return None
    for of_pass in (attention, node):
        of_pass.attrs = of_pass.attrs | {"by_pytorch": True}
    return node.out


# of both passes
AS_IT_IS_READ = Row(
    "copies as they are read",
    ("layout",),
    _copy_as_it_is_read,
    "6.6 % of the bytes of a step of AnimateDiff's temporal layers, 7.5 of WaveGrad (counted)",
    NOT_IN_A_STEP,
)
WHERE_IT_LIES = Row(
    "parts read where they lie", ("slice",), _part_where_it_lies,
    "1.7 % of a step of denoising_diffusion at 64 images, with PyTorch's AdamW; of FiLM 0.9 of "
    "improved-diffusion at 128 and 1.0 of DeepFloyd IF at 8 (predicted)", NOT_IN_A_STEP
)  # fmt: skip
