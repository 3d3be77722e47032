"""Rows of what `join.stages` makes of networks over short rows of positions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_kernels.conv1d.conv1d import PROJECT_BLOCK
from triton_kernels.conv1d.operands import Activation, Film, Norm, Stem, Sums
from triton_kernels.conv1d.weights import Conv, pack_conv
from triton_kernels.tf32 import rounded_to_tf32

from ..graph import Node, many
from .table import Inputs, launches


def _multiplied(node: Node, weight: Tensor) -> Tensor:
    """Weights in the precision in which they are multiplied."""
    weight = weight.to(node.attrs["dtype"])
    return rounded_to_tf32(weight) if weight.dtype == torch.float32 and node.tf32 else weight


@launches("film_weights")
def _film_weights(run, node, given):
    weight = _multiplied(node, torch.cat(many(given, "weight")))  # [F, all that the parts have]
    parts = weight.split(node.attrs["widths"], dim=1)
    padded = [F.pad(w, (0, -w.shape[1] % PROJECT_BLOCK)).contiguous() for w in parts]
    return {f"part{i}": w for i, w in enumerate(padded)} | {"bias": torch.cat(many(given, "bias"))}


@launches("project")
def _project(run, node, given):
    return run.kernels.project(given["z"], given["weight"], given.get("bias"), allow_tf32=node.tf32)


@launches("stem_weights")
def _stem_weights(run, node, given):
    weight = given["weight"]
    taps = weight[:, :, None] if weight.ndim == 2 else weight[:, :, 0]
    return taps.permute(1, 2, 0).contiguous()


@launches("stage_weights", makes=("weight", "by_tap"))
def _stage_weights(run, node, given):
    a, weight, side = node.attrs, given["weight"][:, :, 0], given.get("side")
    if a["transposed"]:  # [2C, C, 3], of which a tap is zero, as [C, C, 4]: see `pack_conv`
        even, odd = weight.chunk(2)
        weight = torch.stack((odd[..., 2], even[..., 1], odd[..., 1], even[..., 0]), 2)
        weight = weight.transpose(0, 1)
    conv = pack_conv(
        _multiplied(node, weight),
        None if side is None else _multiplied(node, side[:, :, None]),
        a["dtype"],
        slice_channels=a["channels"],
        block=a["block"],
        stride=a["stride"],
        transposed=a["transposed"],
        widest=a["widest"],
    )
    return conv.weight, conv.by_tap


def _activation(node: Node, given: Inputs) -> Activation:
    a, norm, film = node.attrs, None, None
    if "partial" in given:
        source = Sums(given["partial"], given["bias"])
    else:
        source = Stem(given["x"][:, 0], given["stem_weight"], given["bias"])
    if "groups" in a:
        norm = Norm(a["groups"], given["norm_weight"], given["norm_bias"], a["eps"])
    if "columns" in a:
        table, other, row = (given.get(role) for role in ("table", "other", "row"))
        film = Film(table, other, a["columns"], a["scale"], row)
    residual = given.get("residual")
    if "residual_partial" in given:
        residual = Sums(given["residual_partial"], given["residual_bias"])
    elif "residual_weight" in given:
        residual = Stem(given["x"][:, 0], given["residual_weight"], given["residual_bias"])
    return Activation(source, norm, film, residual)


@launches("stage", makes=("partial", "side", "kept"))
def _stage(run, node, given):
    a, activation = node.attrs, _activation(node, given)
    taps = (a[key] for key in ("taps", "stride", "transposed", "side", "widest"))
    return run.kernels.conv_stage(
        activation,
        Conv(given["weight"], *taps, given.get("by_tap")),
        skip=given.get("skip"),
        keep="kept" in node.outputs,
        batched=activation.shape[0] >= a["batched_from"],
        allow_tf32=node.tf32,
    )


@launches("head")
def _head(run, node, given):
    return run.kernels.head(_activation(node, given), given["weight"], given["head_bias"])[:, None]
