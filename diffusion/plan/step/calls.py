"""Launches of the ops of a training step: one entry per op, as a call of a module of kernels
(`triton_kernels.fused_ops` or its reference), with the places where results are written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from triton_kernels.conv.upsampled import UpsampledFilters

from ..calls.table import LAUNCHES, Inputs, as_filters, many
from ..execute import results
from ..graph import Node, Value
from ..join import launches as _joined  # noqa: F401  they fill the table
from ..schedule import WEIGHT_GRADS

_SUM_PROGRAMS = 128  # that take the sums of a tensor, at least


@dataclass
class Launcher:
    """Launches nodes on a module of kernels."""

    kernels: ModuleType
    sums: Any  # RowSums of the flat gradient
    accumulates: bool = True  # gradients of filters are added to what is there
    first: int = 0  # global index of sample 0, in this call

    def __call__(self, node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        """What the node makes, but for what it writes to a place."""
        given: Inputs = {role: values[value] for role, value in node.inputs.items()}
        if "rng" in given:
            given["first"] = node.attrs["first"] + self.first
        into = {role: values[v] for role, v in node.outputs.items() if v in values}
        call = STEP.get(node.op)
        if call is None:
            return results(node, LAUNCHES[node.op](self.kernels, node, given))
        made = call(self, node, given, into)
        made = made if isinstance(made, dict) else {next(iter(node.outputs)): made}
        wanted = {role: value for role, value in node.outputs.items() if role not in into}
        return {value: made[role] for role, value in wanted.items() if role in made}

    def weights(self, nodes: list[Node], values: Mapping[Value, Tensor], share: float) -> None:
        """Gradients of weights of one size, over images of one size, in one launch."""
        group = [
            (values[n.inputs["x"]], values[n.inputs["dy"]], _filters(n, values)) for n in nodes
        ]
        self.kernels.conv_weight_grads(*group, accumulate=self.accumulates, share=share)

    def weight(self, node: Node, values: Mapping[Value, Tensor]) -> None:
        """One, of any kind."""
        tensors = *_operands(node, values), _filters(node, values)
        options = {}
        if node.attrs.get("stride", (1, 1)) != (1, 1):
            options = {"stride": node.attrs["stride"][0], "padding": node.attrs["padding"][0]}
        self.kernels.conv_weight_grad(*tensors, accumulate=self.accumulates, **options)


def _operands(node: Node, values: Mapping[Value, Tensor]) -> tuple[Tensor, Tensor]:
    return values[node.inputs["x"]], values[node.inputs["dy"]]


def _filters(node: Node, values: Mapping[Value, Tensor]) -> Tensor:
    return as_filters(values[node.out])


STEP: dict[str, Callable[[Launcher, Node, Inputs, dict[str, Tensor]], Any]] = {}


def step(*ops: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        STEP.update(dict.fromkeys(ops, function))
        return function

    return register


def _xs(given: Inputs) -> tuple[Tensor, Tensor | None]:
    xs = many(given, "x")
    return xs[0], xs[1] if len(xs) == 2 else None


def _taps(given: Inputs) -> UpsampledFilters:
    return UpsampledFilters(given["taps"], given["rest"])


# --- forward --------------------------------------------------------------------------------------


@step("linear")
def _linear(run, node, given, into):
    return run.kernels.conv_forward(given["x"], as_filters(given["weight"]), given["bias"])[0]


@step("pad")
def _pad(run, node, given, into):
    """Of filters, in their memory."""
    weight, width = given["x"].permute(0, 2, 3, 1), node.out.shape[1]
    return run.kernels.pad_channels(weight, width, node.out.dtype).permute(0, 3, 1, 2)


@step("moments")
def _moments(run, node, given, into):
    return run.kernels.tensor_partials(given["x"], _SUM_PROGRAMS)


@step("norm_of_upsampled")
def _norm_of_upsampled(run, node, given, into):
    a = node.attrs
    statistics = tuple(many(given, "partials")), a["pixels"], a["groups"]
    affine = given["weight"], given["bias"], a["eps"], a["activation"]
    made = run.kernels.norm_apply_upsampled(given["x0"], given["x1"], *statistics, *affine)
    y, (table, second), large = made
    return {"y": y, "table": table, "second": second, "large": large}


@step("upsample")
def _upsample(run, node, given, into):
    return run.kernels.upsample(given["x"])


@step("avg_pool")
def _avg_pool(run, node, given, into):
    return run.kernels.avg_pool(given["x"])


@step("sum_pool")
def _sum_pool(run, node, given, into):
    return run.kernels.upsample_grad(given["x"])


@step("conv_down")
def _conv_down(run, node, given, into):
    tensors = given["x"], given["weight"], given["bias"]
    return run.kernels.conv_down(*tensors, node.attrs["padding"])


@step("attention")
def _attention(run, node, given, into):
    a = node.attrs
    if "qkv" in given:
        qkv = given["qkv"].flatten(1, -2)
        o, state = run.kernels.attention_forward(qkv, a["heads"], a["order"])
    else:
        tensors = given["q"].flatten(1, -2), given["kv"].flatten(1, -2), given.get("mask")
        o, state = run.kernels.cross_attention_forward(*tensors, a["heads"])
    return {"y": o.view(node.out.shape), "state": state}


# --- backward -------------------------------------------------------------------------------------


@step("conv_dx", "linear_dx")
def _conv_dx(run, node, given, into):
    return run.kernels.conv_plain_input_grad(given["dy"], as_filters(given["weight"]))


@step("conv_down_dx")
def _conv_down_dx(run, node, given, into):
    padding, add = node.attrs["padding"], given.get("add")
    return run.kernels.conv_down_input_grad(given["dy"], given["weight"], padding, add)


@step("conv_upsampled_dx")
def _conv_upsampled_dx(run, node, given, into):
    made = run.kernels.conv_upsampled_input_grad(
        given["dy"],
        _taps(given),
        inputs=_xs(given),
        tables=(given["table"], given["second"]),
        activation=node.attrs["activation"],
    )
    return dict(zip(("dz1", "dz2", "partials"), made, strict=True))


@step("conv_of_upsampled_dx")
def _conv_of_upsampled_dx(run, node, given, into):
    return run.kernels.conv_of_upsampled_input_grad(given["dy"], _taps(given))


@step("norm_act_grad")
def _norm_act_grad(run, node, given, into):
    x1, x2 = _xs(given)
    x = x1 if x2 is None else torch.cat((x1, x2), -1)
    made = run.kernels.activation_grad(given["da"], x, given["table"], node.attrs["activation"])
    return dict(zip(("dz", "partials"), made, strict=True))


def _outputs(node: Node, given: Inputs, into: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Where a norm's coefficients come from, and what is made of its sums besides."""
    options = {"emb_grad_out": into.get("emb"), "bias_grad_out": into.get("input_bias")}
    if any(out is not None for out in options.values()):
        options["input_partials"] = given["input_partials"]
    if "scale" in given:
        options |= {role: given[role] for role in ("weight", "bias", "scale")}
        options |= {f"grad_{role}_out": into[role] for role in ("scale", "shift")}
    return options


@step("norm_grad_table")
def _norm_grad_table(run, node, given, into):
    a, options = node.attrs, _outputs(node, given, into)
    grads = into.get("weight"), into.get("bias")
    tensors = given["partials"], given["table"], a["pixels"], a["groups"], *grads
    made = run.kernels.norm_grad_table(*tensors, sums=run.sums, **options)
    return {"coeff": made}


@step("norm_dx")
def _norm_dx(run, node, given, into):
    adds = {name: given.get(name) for name in ("add1", "add1_second", "add2")}
    sums = run.sums if "rows" in node.outputs else None
    adds["upsample1"] = node.attrs.get("upsample1", False)
    made = run.kernels.norm_dx(given["dz"], *_xs(given), given["coeff"], sums=sums, **adds)
    return dict(zip(("dx1", "dx2", "rows"), made, strict=True))


@step("norm_backward")
def _norm_backward(run, node, given, into):
    a, options = node.attrs, _outputs(node, given, into)
    options |= {name: given.get(name) for name in ("add1", "add1_second")}
    options |= {"rows": "rows" in node.outputs, "upsample1": a.get("upsample1", False)}
    options["out"] = given.get(a.get("over"))
    dx, rows = run.kernels.norm_backward(
        given["dz"],
        given["x0"],
        given["partials"],
        given["table"],
        a["groups"],
        into.get("weight"),
        into.get("bias"),
        sums=run.sums,
        **options,
    )
    return {"dx1": dx, "rows": rows}


@step("skip_backward")
def _skip_backward(run, node, given, into):
    a = node.attrs
    made = run.kernels.skip_backward(
        given["dy"],
        as_filters(given["weight"]),
        given["dz"],
        *_xs(given),
        given["partials"],
        given["table"],
        a["groups"],
        into.get("weight"),
        into.get("bias"),
        sums=run.sums,
        add1=given.get("add1"),
        dz2=given.get("dz2"),
        upsample1=a.get("upsample1", False),
    )
    return dict(zip(("dx1", "dx2", "rows"), made, strict=True))


@step("attention_grad")
def _attention_grad(run, node, given, into):
    a = node.attrs
    dy, o = (given[role].flatten(1, -2) for role in ("dy", "o"))
    if "qkv" in given:
        qkv = given["qkv"]
        tensors = dy, qkv.flatten(1, -2), o, given["state"]
        made, rows = run.kernels.attention_backward(*tensors, a["heads"], a["order"], run.sums)
        return {"qkv": made.view(qkv.shape), "rows": rows}
    q, kv = given["q"], given["kv"]
    tensors = q.flatten(1, -2), kv.flatten(1, -2), given.get("mask"), o, given["state"]
    dq, dkv = run.kernels.cross_attention_backward(dy, *tensors, a["heads"])
    return {"q": dq.view(q.shape), "kv": dkv.view(kv.shape)}


@step("avg_pool_grad")
def _avg_pool_grad(run, node, given, into):
    sums = run.sums if "rows" in node.outputs else None
    dx, rows = run.kernels.avg_pool_grad(given["dy"], given.get("add"), sums)
    return {"y": dx, "rows": rows}


@step("row_sums")
def _row_sums(run, node, given, into):
    return run.kernels.tensor_rows(given["x"], run.sums)


@step("bias_grad")
def _bias_grad(run, node, given, into):
    run.kernels.bias_grad(given["rows"], into["y"], accumulate=True, sums=run.sums)
    return {}


@step("accumulate")
def _accumulate(run, node, given, into):
    if node.attrs["writes"]:
        into["y"].copy_(given["x"].view_as(into["y"]))
    else:
        into["y"].add_(given["x"].view_as(into["y"]))
    return {}


@step(*WEIGHT_GRADS)
def _weight_grad(run, node, given, into):
    raise AssertionError("gradients of weights are launched in groups, see `order`")
