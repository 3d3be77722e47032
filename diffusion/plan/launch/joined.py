"""Rows of what `join` makes of an evaluation, and of convolutions after upsampling."""

import torch
from torch import Tensor

from triton_kernels.conv.conv_norm import NextNorm
from triton_kernels.conv.upsampled import UpsampledFilters
from triton_kernels.reductions.conv_parts import SplitConv

from .norms import film, statistics
from .table import Inputs, bias_of, extra, launches, rounding, terms


def _conv(run, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return given["x"], run.filters(given["weight"]), bias_of(given)


def _norm_of(node, given: Inputs, prefix: str = "norm_") -> tuple:
    """Groups, weight, bias, eps and activation of the norm that is in the launch."""
    a, affine = node.attrs, (given[f"{prefix}{role}"] for role in ("weight", "bias"))
    return a["groups"], *affine, a["eps"], a.get("activation", "identity")


def _rows(run, given: Inputs) -> Tensor:  # [CO, CI]
    return run.filters(given["weight"])[:, :, 0, 0]


@launches("conv_few", makes=("y", "partials"))
def _conv_few(run, node, given):
    options = {key: value for key, value in terms(node, given).items() if value is not None}
    options |= {"width": node.attrs["width"]} if "width" in node.attrs else {}
    options |= {"stats": "partials" in node.outputs} | rounding(node)
    y, partials = run.kernels.conv_few(*_conv(run, given), **options)
    return y.view(node.out.shape), partials


@launches("conv_split")
def _conv_split(run, node, given):
    operands = given["x"], run.filters(given["weight"])
    return run.kernels.conv_split(*operands, extra=extra(given), **node.attrs)


def _split(node, given: Inputs, prefix: str = "") -> SplitConv:
    y = node.outputs.get("y")
    roles = ("bias", "extra_bias", "emb", "residual")
    added = {role: given.get(f"{prefix}{role}") for role in roles}
    parts = given["parts"]
    if added["bias"] is None:
        added["bias"] = torch.zeros(parts.shape[2], device=parts.device)
    dtype = node.out.dtype if y is None else y.dtype
    added["factor"] = node.attrs.get("factor")
    return SplitConv(parts, node.attrs.get("shape") or y.shape, dtype, **added)


@launches("sum_parts", makes=("y", "partials"))
def _sum_parts(run, node, given):
    return run.kernels.sum_parts(_split(node, given))


@launches("resample_parts", makes=("y", "resampled", "partials"))
def _resample_parts(run, node, given):
    return run.kernels.resample_parts(_split(node, given), node.attrs["up"])


@launches("norm_single_cta", makes=("y", "x"))
def _norm_single_cta(run, node, given):
    source = _split(node, given, "sum_") if "parts" in given else given["x0"]
    options = {"keep": "x" in node.outputs or "parts" not in given}
    if "pool" in node.attrs:
        options = {"pool": True}
    xs = source, given.get("x1")
    return run.kernels.norm_single_cta(*xs, *_norm_of(node, given, ""), **film(given), **options)


@launches("norm_of_sums", "norm_upsampled", makes=("y", "large"))
def _norm_of_sums(run, node, given):
    options = {"keep": "large" in node.outputs, "corners": node.attrs.get("corners", False)}
    options |= {"up": node.op == "norm_upsampled"}
    tensors = given["x0"], given.get("x1"), statistics(node, given)
    return run.kernels.norm_of_sums(*tensors, node.attrs["activation"], **options)


@launches("conv_norm", makes=("y", "partials", "a"))
def _conv_norm(run, node, given):
    groups, weight, bias, eps, activation = _norm_of(node, given)
    keep, stats = "y" in node.outputs, "partials" in node.outputs
    then = NextNorm(weight, bias, groups, eps, activation, keep, stats)
    options = terms(node, given) | {"x2": given.get("x2")}
    return run.kernels.conv_norm(*_conv(run, given), then, **options)


@launches("norm_conv", makes=("y", "partials"))
def _norm_conv(run, node, given):
    x, *weight = _conv(run, given)
    norm = statistics(node, given, "norm_"), node.attrs["activation"]
    return run.kernels.norm_conv(x, *norm, *weight, **terms(node, given))


@launches("upsampled_filters", makes=("taps", "rest"))
def _upsampled_filters(run, node, given):
    a = node.attrs
    return run.kernels.upsampled_filters(run.filters(given["weight"]), a["channels"], a["dtype"])


@launches("conv_of_upsampled_dx")
def _conv_of_upsampled_dx(run, node, given):
    taps = UpsampledFilters(given["taps"], given["rest"])
    return run.kernels.conv_of_upsampled_input_grad(given["dy"], taps)


@launches("conv_of_upsampled", makes=("y", "partials"))
def _conv_of_upsampled(run, node, given):
    taps = UpsampledFilters(given["taps"], given["rest"])
    return run.kernels.conv_of_upsampled(given["x"], taps, given["bias"])


@launches("conv_upsampled", makes=("y", "partials"))
def _conv_upsampled(run, node, given):
    taps = UpsampledFilters(given["taps"], given["rest"])
    return run.kernels.conv_upsampled(given["a"], taps, given["bias"], emb=given.get("emb"))


@launches("projected_attention")
def _projected_attention(run, node, given):
    a, x, norm = node.attrs, given["x"].flatten(1, 2), None
    if "partials0" in given:
        norm = statistics(node, given, "norm_")
    o = run.kernels.projected_attention(
        x, norm, _rows(run, given), bias_of(given), a["heads"], a["order"]
    )
    return o.view(node.out.shape)
