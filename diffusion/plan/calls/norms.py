"""Calls of norms, and of convolutions with an epilogue."""

import torch
from torch import Tensor

from ..graph import Node
from .table import Inputs, as_filters, image, launches, many, mask_of


@launches("moments")
def _moments(k, node, given):
    return k.tensor_partials(image(given["x"]), 1)


@launches("norm_table")
def _norm_table(k, node, given):
    a = node.attrs
    film = {name: given.get(name) for name in ("scale", "shift")}
    return k.norm_table(
        tuple(many(given, "partials")),
        a["pixels"],
        a["groups"],
        given["weight"],
        given["bias"],
        a["eps"],
        **film,
    )


def _two(given: Inputs) -> tuple[Tensor, Tensor | None]:
    xs = [image(x) for x in many(given, "x")]
    return xs[0], xs[1] if len(xs) == 2 else None


@launches("norm_apply")
def _norm_apply(k, node, given):
    x1, x2 = _two(given)
    mask = mask_of(node, given)
    y = k.apply(x1, x2, given["table"], node.attrs["activation"], mask=mask)
    return y.view(node.out.shape)


@launches("norm_act_grad")
def _norm_act_grad(k, node, given):
    x = image(torch.cat(many(given, "x"), -1))
    da = image(given["da"])
    dz, partials = k.activation_grad(da, x, given["table"], node.attrs["activation"])
    return {"dz": dz.view(given["da"].shape), "partials": partials}


@launches("norm_grad_table")
def _norm_grad_table(k, node, given):
    """Of what is wanted: weight, bias, scale and shift; with the partials of the input also the
    sums of dx over pixels, `emb`."""
    a, table = node.attrs, given["table"]
    n, _, c = table.shape
    rows = table.new_empty(n, (3 if "emb" in node.outputs else 2) * c)
    total = table.new_empty(rows.shape[1])
    made, options = {"weight": total[:c], "bias": total[c : 2 * c]}, {"rows_out": rows}
    if "scale" in given or "shift" in given:
        options["scale"] = given.get("scale", torch.zeros_like(table[:, 0]))
        options |= {"weight": given["weight"], "bias": given["bias"]}
        made |= {role: table.new_empty(n, c) for role in ("scale", "shift")}
        options |= {f"grad_{role}_out": made[role] for role in ("scale", "shift")}
    if "emb" in node.outputs:
        made["emb"] = table.new_empty(n, c)
        options |= {"input_partials": given["input_partials"], "emb_grad_out": made["emb"]}
    sums = given["partials"], table, a["pixels"], a["groups"], None, None
    coeff = k.norm_grad_table(*sums, **options)
    k.bias_grad(rows, total)
    return {"coeff": coeff, **made}


@launches("norm_dx")
def _norm_dx(k, node, given):
    x1, x2 = _two(given)
    adds = {name: image(given.get(name)) for name in ("add1", "add1_second", "add2")}
    sums = "rows" in node.outputs or None
    made = k.norm_dx(image(given["dz"]), x1, x2, given["coeff"], **adds, sums=sums)
    return _shaped(node, dict(zip(("dx1", "dx2", "rows"), made, strict=True)))


@launches("skip_dx")
def _skip_dx(k, node, given):
    x1, x2 = _two(given)
    sums = "rows" in node.outputs or None
    tensors = given["dy"], as_filters(given["weight"]), given["dz"], x1, x2, given["coeff"]
    made = k.skip_dx(*tensors, add1=given.get("add1"), sums=sums)
    return _shaped(node, dict(zip(("dx1", "dx2", "rows"), made, strict=True)))


def _shaped(node: Node, made: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """What the node gives, under the shapes of its values; but rows, whose number is the kernel's
    affair: it is their sum that counts."""
    return {
        role: made[role] if role == "rows" else made[role].view(value.shape)
        for role, value in node.outputs.items()
    }


@launches("norm")
def _norm(k, node, given):
    x1, x2 = _two(given)
    a = node.attrs
    film = {name: given[name] for name in ("scale", "shift") if name in given}
    y, table = k.norm_apply(
        x1,
        x2,
        tuple(many(given, "partials")),
        a["pixels"],
        a["groups"],
        given["weight"],
        given["bias"],
        a["eps"],
        a["activation"],
        mask=mask_of(node, given),
        **film,
    )
    return {"y": y.view(node.out.shape), "table": table}


@launches("conv_fused")
def _conv_fused(k, node, given):
    extra = tuple(zip(many(given, "extra"), many(given, "columns"), strict=True))
    y, partials = k.conv_forward(
        given["x"],
        as_filters(given["weight"]),
        given.get("bias"),
        emb=given.get("emb"),
        residual=given.get("residual"),
        extra=extra,
        extra_bias=given.get("extra_bias"),
        stats="partials" in node.outputs,
        width=node.attrs.get("width"),
    )
    return {"y": y, "partials": partials}


@launches("conv_input_grad")
def _conv_input_grad(k, node, given):
    dz, partials = k.conv_input_grad(
        given["dy"],
        as_filters(given["weight"]),
        inputs=tuple(many(given, "x")),
        table=given["table"],
        activation=node.attrs["activation"],
        mask=mask_of(node, given),
    )
    return {"dz": dz, "partials": partials}
