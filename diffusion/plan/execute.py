"""A list of launches, and what each of them calls.

`LAUNCHES` has a line an op: how it is called of a module of kernels, `triton_kernels.fused_ops` or
`triton_kernels.reference.fused`, which have the same names. `run` goes through a list and lets go
of each value behind its last reader.
"""

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_kernels import reference
from triton_kernels.noise.dropout import Mask
from triton_kernels.reference import ACTIVATION_FUNCTIONS, fused

from .graph import Node, Value
from .lower import call_arguments

Inputs = dict[str, Any]
LAUNCHES: dict[str, Callable[[ModuleType, Node, Inputs], Any]] = {}


def launches(op: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        LAUNCHES[op] = function
        return function

    return register


def run(
    nodes: Iterable[Node],
    values: dict[Value, Tensor],
    last: Mapping[Node, tuple[Value, ...]] | None = None,  # what each node is the last to read
    launch: Callable[[Node, Mapping], dict] | None = None,  # None: on the reference kernels
) -> dict[Value, Tensor]:
    """Launch the nodes in their order. `values` has what they begin with, and gets what they make,
    but for what `last` says nobody reads any more."""
    launch = launch or launch_reference
    for node in nodes:
        values.update(launch(node, values))
        for value in last.get(node, ()) if last is not None else ():
            values.pop(value, None)
    return values


def launch_reference(
    node: Node, values: Mapping[Value, Tensor], kernels: ModuleType = fused
) -> dict[Value, Tensor]:
    """On the reference kernels, which compute in the dtype of what they are given: in float32 or
    more."""
    inputs = {role: _widened(values[value]) for role, value in node.inputs.items()}
    return results(node, LAUNCHES[node.op](kernels, node, inputs))


def results(node: Node, made: Any) -> dict[Value, Tensor]:
    """What a launch gave, by the node's values and in their dtypes; nothing where it gave none."""
    made = made if isinstance(made, dict) else {next(iter(node.outputs)): made}
    given = {value: made[role] for role, value in node.outputs.items()}
    return {value: x.to(value.dtype) for value, x in given.items() if x is not None}


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def many(inputs: Inputs, role: str) -> list[Tensor]:
    """inputs role0, role1, ..."""
    return [v for k, v in inputs.items() if k.startswith(role) and k[len(role) :].isdigit()]


def image(x: Tensor | None) -> Tensor | None:
    """[N, ..., C] as [N, H, W, C]"""
    return x if x is None or x.ndim == 4 else x.reshape(x.shape[0], 1, -1, x.shape[-1])


# --- forward --------------------------------------------------------------------------------------


def _padded(x: Tensor, padding: tuple[int, int, int, int]) -> tuple[Tensor, tuple[int, int]]:
    """x with zeros where the padding is not the same on both sides, and the padding of the rest."""
    y0, y1, x0, x1 = padding
    if (y0, x0) == (y1, x1):
        return x, (y0, x0)
    return F.pad(x, (0, 0, x0, x1, y0, y1)), (0, 0)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride, padding) -> Tensor:
    x, padding = _padded(x, padding)
    bias = None if bias is None else bias.to(x.dtype)
    y = F.conv2d(x.permute(0, 3, 1, 2), weight.to(x.dtype), bias, stride, padding)
    return y.permute(0, 2, 3, 1).contiguous()


@launches("conv")
def _conv(k, node, given):
    return convolve(given["x"], given["weight"], given.get("bias"), **node.attrs)


@launches("linear")
def _linear(k, node, given):
    return F.linear(given["x"], given["weight"], given.get("bias"))


@launches("act")
def _act(k, node, given):
    return ACTIVATION_FUNCTIONS[node.attrs["activation"]](given["x"])


@launches("group_norm")
def _group_norm(k, node, given):
    x = given["x"]
    film = {name: given.get(name) for name in ("scale", "shift")}
    a = node.attrs
    y = reference.group_norm(
        image(x),
        a["groups"],
        given.get("weight"),
        given.get("bias"),
        eps=a["eps"],
        activation=a["activation"],
        **film,
    )
    return y.view(x.shape)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[N, ..., C] as [N, heads, T, d]"""
    return x.reshape(x.shape[0], -1, heads, x.shape[-1] // heads).transpose(1, 2)


def attend(given: Inputs, heads: int, scale: float, order: str | None = None) -> Tensor:
    if "qkv" in given:
        qkv = given["qkv"]
        n, c3 = qkv.shape[0], qkv.shape[-1]
        d = c3 // 3 // heads
        if order == "qkv_heads":
            q, k, v = qkv.reshape(n, -1, 3, heads, d).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = qkv.reshape(n, -1, heads, 3, d).permute(3, 0, 2, 1, 4)
        shape = (*qkv.shape[:-1], c3 // 3)
    else:
        q, k, v = (_heads(given[role], heads) for role in "qkv")
        shape = given["q"].shape
    o = F.scaled_dot_product_attention(q, k, v, scale=scale)
    return o.transpose(1, 2).reshape(shape)


@launches("attention")
def _attention(k, node, given):
    """The reference needs nothing for its backward pass."""
    made = {"y": attend(given, **node.attrs)}
    if "state" in node.outputs:
        made["state"] = made["y"].new_zeros(node.outputs["state"].shape)
    return made


@launches("cat")
def _cat(k, node, given):
    return torch.cat(many(given, "x"), node.attrs["axis"])


@launches("add")
def _add(k, node, given):
    return given["a"] + given["b"]


@launches("mul")
def _mul(k, node, given):
    return given["a"] * given["b"]


@launches("affine")
def _affine(k, node, given):
    return given["x"] * node.attrs["scale"] + node.attrs["offset"]


@launches("upsample")
def _upsample(k, node, given):
    fy, fx = node.attrs["factor"]
    return given["x"].repeat_interleave(fy, 1).repeat_interleave(fx, 2)


def _blocks(x: Tensor, window: tuple[int, int]) -> Tensor:
    """[N, H, W, C] as [N, H / y, y, W / x, x, C], without what is left over."""
    n, h, w, c = x.shape
    y, z = window
    return x[:, : h // y * y, : w // z * z].reshape(n, h // y, y, w // z, z, c)


@launches("avg_pool")
def _avg_pool(k, node, given):
    return _blocks(given["x"], node.attrs["window"]).mean((2, 4))


@launches("sum_pool")
def _sum_pool(k, node, given):
    return _blocks(given["x"], node.attrs["window"]).sum((2, 4))


@launches("slice")
def _slice(k, node, given):
    a = node.attrs
    return given["x"].narrow(a["axis"], a["start"], a["stop"] - a["start"]).contiguous()


@launches("pad")
def _pad(k, node, given):
    amounts = [n for pair in reversed(node.attrs["pads"]) for n in pair]
    return F.pad(given["x"], amounts)


@launches("dropout")
def _dropout(k, node, given):
    a, x = node.attrs, given["x"]
    if "rng" in given:
        return reference.dropout(x, a["p"], given["rng"], layer=a["layer"], first=a["first"])
    if a["p"] == 1:
        mask = torch.zeros_like(x)
    else:
        mask = torch.empty_like(x).bernoulli_(1 - a["p"]).div_(1 - a["p"])
    return {"y": x * mask, "mask": mask}


def mask_of(node: Node, given: Inputs) -> Mask | None:
    """What the fused kernels drop by, or None."""
    if "rng" not in given:
        return None
    a = node.attrs
    return Mask(a["p"], given["rng"], a["layer"], a["first"])


@launches("cast")
def _cast(k, node, given):
    return given["x"].to(node.out.dtype)


@launches("embedding")
def _embedding(k, node, given):
    return F.embedding(given["index"], given["weight"])


@launches("reshape")
def _reshape(k, node, given):
    return given["x"].reshape(node.out.shape)


@launches("columns")
def _columns(k, node, given):
    return given["x"][..., node.attrs["start"] : node.attrs["stop"]]


@launches("pad_channels")
def _pad_channels(k, node, given):
    return k.pad_channels(given["x"], node.out.shape[-1], node.out.dtype)


@launches("layout")
def _layout(k, node, given):
    return _pieces(given["x"].contiguous(), node).reshape(node.out.shape).contiguous()


def _pieces(x: Tensor, node: Node) -> Tensor:
    """What a layout node reads of x."""
    pieces = node.attrs["pieces"]
    sizes, steps = [n for n, _ in pieces], [step for _, step in pieces]
    return x.as_strided(sizes, steps, x.storage_offset() + node.attrs["offset"])


@launches("arith")
def _arith(k, node, given):
    a = node.attrs
    return a["target"](*call_arguments(a["arguments"], list(given.values())), **a["options"])


# --- norms ----------------------------------------------------------------------------------------


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
    made = {role: torch.zeros_like(table[0, 0]) for role in ("weight", "bias")}
    options = {}
    if "scale" in given or "shift" in given:
        options["scale"] = given.get("scale", torch.zeros_like(table[:, 0]))
        options |= {"weight": given["weight"], "bias": given["bias"]}
        made |= {role: table.new_empty(n, c) for role in ("scale", "shift")}
        options |= {f"grad_{role}_out": made[role] for role in ("scale", "shift")}
    if "emb" in node.outputs:
        made["emb"] = table.new_empty(n, c)
        options |= {"input_partials": given["input_partials"], "emb_grad_out": made["emb"]}
    sums = given["partials"], table, a["pixels"], a["groups"], made["weight"], made["bias"]
    return {"coeff": k.norm_grad_table(*sums, **options), **made}


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


def as_filters(weight: Tensor) -> Tensor:
    """[CO, CI] as [CO, CI, 1, 1]"""
    return weight if weight.ndim == 4 else weight[:, :, None, None]


def filters(weight: Tensor) -> Tensor:
    """[CO, CI, R, S], or [CO, CI], as kernels see them: in [CO, R, S, CI] memory."""
    inner = as_filters(weight).permute(0, 2, 3, 1)
    return inner.contiguous().permute(0, 3, 1, 2)


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


# --- backward -------------------------------------------------------------------------------------


def _grads(outputs: Tensor, inputs: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, inputs, dy)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


@launches("conv_dx")
def _conv_dx(k, node, given):
    dy, weight = given["dy"], given["weight"]
    with torch.enable_grad():
        x = dy.new_zeros(node.out.shape).requires_grad_()
        y = convolve(x, weight.detach(), None, **node.attrs)
    return _grads(y, [x], dy)[0].contiguous()


@launches("conv_dw")
def _conv_dw(k, node, given):
    with torch.enable_grad():
        weight = given["x"].new_zeros(node.out.shape).requires_grad_()
        y = convolve(given["x"].detach(), weight, None, **node.attrs)
    return _grads(y, [weight], given["dy"])[0]


@launches("linear_dx")
def _linear_dx(k, node, given):
    return given["dy"] @ given["weight"]


@launches("linear_dw")
def _linear_dw(k, node, given):
    x, dy = given["x"], given["dy"]
    return dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])


@launches("act_grad")
def _act_grad(k, node, given):
    with torch.enable_grad():
        x = _leaf(given["x"])
        y = ACTIVATION_FUNCTIONS[node.attrs["activation"]](x)
    return _grads(y, [x], given["dy"])[0]


@launches("attention_grad")
def _attention_grad(k, node, given):
    roles = ["qkv"] if "qkv" in given else ["q", "k", "v"]
    with torch.enable_grad():
        leaves = {role: _leaf(given[role]) for role in roles}
        o = attend(leaves, **node.attrs)
    grads = _grads(o, list(leaves.values()), given["dy"])
    return dict(zip(roles, grads, strict=True))


@launches("sum")
def _sum(k, node, given):
    return given["x"].sum(node.attrs["axes"]).reshape(node.out.shape)


@launches("embedding_grad")
def _embedding_grad(k, node, given):
    dy, index = given["dy"], given["index"]
    out = dy.new_zeros(node.out.shape)
    return out.index_add_(0, index.reshape(-1), dy.reshape(-1, dy.shape[-1]))


@launches("layout_grad")
def _layout_grad(k, node, given):
    pieces = node.attrs["pieces"]
    dy = given["dy"].reshape([n for n, _ in pieces])
    repeated = [i for i, (_, step) in enumerate(pieces) if step == 0]
    dy = dy.sum(repeated, keepdim=True) if repeated else dy
    out = dy.new_zeros(node.out.shape)
    sizes = [n if step else 1 for n, step in pieces]
    out.as_strided(sizes, [s for _, s in pieces], node.attrs["offset"]).copy_(dy)
    return out


@launches("arith_grad")
def _arith_grad(k, node, given):
    a = node.attrs
    tensors = many(given, "x")
    with torch.enable_grad():
        tensors[a["of"]] = x = _leaf(tensors[a["of"]])
        y = a["target"](*call_arguments(a["arguments"], tensors), **a["options"])
    return _grads(y, [x], given["dy"])[0]
