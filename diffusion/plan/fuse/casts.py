"""Rows of casts that a norm's kernels make themselves: they compute in float32, and read and write
each tensor in its own type."""

from ..graph import Node, Value
from .rewrite import NOT_IN_A_STEP, Fusing, Row

# what is read so, by op; images of a norm in forward are of one type
_OF_NORM = "norm", "norm_table", "norm_grad_table", "norm_backward"
_PARAMETERS = dict.fromkeys(_OF_NORM, ("scale", "shift"))
_GRADIENTS = {
    "norm_act_grad": ("da",),
    "norm_dx": ("dz", "add1", "add1_second", "add2"),
    "channel_norm_grad": ("dy", "add"),
}


def _cast_where_it_is_read(f: Fusing, node: Node) -> Value | None:
    """A norm's kernels read what was cast for them: numbers that were widened, and gradients"""
    if not node.casts_floats:
        return None
    x, y, changed = node.inputs["x"], node.out, False
    read = _GRADIENTS | _PARAMETERS if node.widens else _GRADIENTS
    for reader in filter(None, f.readers(y)):
        roles = [r for r in read.get(reader.op, ()) if reader.inputs.get(r) is y]
        if reader.op == "norm_act_grad" and roles:
            dz = reader.outputs["dz"]
            if any(r is None or r.op != "norm_dx" for r in f.readers(dz)):
                continue
            dz.dtype = x.dtype
        reader.inputs |= dict.fromkeys(roles, x)
        f.take(reader)
        changed = changed or bool(roles)
    return y if changed else None


WHERE_IT_IS_READ = Row(
    "norms read what was cast for them", ("cast",), _cast_where_it_is_read,
    "2.6 % of a step of DiffAE's UNet at 16 images of 128x128 (predicted)", NOT_IN_A_STEP,
)  # fmt: skip


def cast_where_it_is_made(f: Fusing, node: Node) -> Value | None:
    """A norm's pass writes what its result is cast to"""
    x = node.inputs["x"]
    maker = f.maker(x, "norm", "norm_apply", "norm_dx", "channel_norm")
    if maker is None or f.reader(x, "cast") is not node or not node.casts_floats:
        return None
    role = next(role for role, value in maker.outputs.items() if value is x)
    if role not in ("y", "dx1"):
        return None  # a norm of two halves writes the second in its own type
    f.write(maker, node.out, node, role=role)
    return node.out
