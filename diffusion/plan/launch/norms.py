"""Rows of norms in parts, forward and backward."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from triton_kernels.conv.upsampled import UpsampledFilters
from triton_kernels.norm.sums import SUM_PROGRAMS
from triton_kernels.norm.tables import After, NormGrads, Statistics
from triton_kernels.reductions.row_sums import RowSums

from ..graph import Node, many
from ..ops import AFTER, SUMS_OF_NORM
from ..schedule.streams import rounded
from .table import Inputs, Launcher, image, images, launches, mask_of


def film(given: Inputs) -> dict[str, Tensor]:
    """The scale and the shift of a norm, where it has them."""
    return {name: given[name] for name in ("scale", "shift") if name in given}


def statistics(node: Node, given: Inputs, prefix: str = "") -> Statistics:
    """Sums, and what a table is made of besides."""
    a, sums = node.attrs, tuple(many(given, "partials"))
    affine = given[f"{prefix}weight"], given[f"{prefix}bias"], a["eps"]
    return Statistics(sums, a["pixels"], a["groups"], *affine, **film(given))


# --- forward --------------------------------------------------------------------------------------


@launches("moments")
def _moments(run, node, given):
    return run.kernels.tensor_partials(image(given["x"]).contiguous(), SUM_PROGRAMS)


@launches("norm_table")
def _norm_table(run, node, given):
    return run.kernels.norm_table(*statistics(node, given))


def _of_type(node: Node) -> dict[str, torch.dtype]:
    """The type of a norm's result, if it is not that of the images."""
    dtype = node.out.dtype
    return {} if dtype == node.inputs["x0"].dtype else {"dtype": dtype}


def _after(given: Inputs) -> dict[str, After]:
    """What comes behind the activation of a norm, where something does."""
    add = image(given["after_add"]) if "after_add" in given else None
    after = After(*map(given.get, AFTER), add)
    return {} if all(part is None for part in after) else {"after": after}


@launches("norm_apply")
def _norm_apply(run, node, given):
    how = {"mask": mask_of(node, given)} | _of_type(node) | _after(given)
    y = run.kernels.apply(*images(given), given["table"], node.attrs["activation"], **how)
    return y.view(node.out.shape)


@launches("norm", makes=("y", "table", "words"))
def _norm(run, node, given):
    how = statistics(node, given), node.attrs["activation"]
    mask = mask_of(node, given)
    if "words" in node.outputs:
        words = node.outputs["words"]
        words = torch.empty(words.shape, dtype=words.dtype, device=given["x0"].device)
        mask = mask._replace(words=words)
    y, table = run.kernels.norm_apply(
        *images(given), *how, mask=mask, **_of_type(node), **_after(given)
    )
    return y.view(node.out.shape), table, mask and mask.words


@launches("norm_of_upsampled", makes=("y", "table", "second", "large"))
def _norm_of_upsampled(run, node, given):
    how = statistics(node, given), node.attrs["activation"]
    y, tables, large = run.kernels.norm_apply_upsampled(*images(given), *how)
    return y, *tables, large


# --- backward -------------------------------------------------------------------------------------


@launches("norm_act_grad", makes=("dz", "partials", *AFTER))
def _norm_act_grad(run, node, given):
    how = *images(given), given["table"], node.attrs["activation"], given.get("after_scale")
    dz, partials, after = run.kernels.activation_grad(image(given["da"]), *how)
    sums = (None, None)
    if after is not None:  # of each chunk of an image
        sums = after[:, 0] if after.shape[1] == 1 else after.sum(1)
        sums = sums.to(node.outputs["after_scale"].dtype).unbind(1)
    return dz.view(given["da"].shape), partials, *sums


@launches("conv_upsampled_dx", makes=("dz1", "dz2", "partials"))
def _conv_upsampled_dx(run, node, given):
    return run.kernels.conv_upsampled_input_grad(
        given["dy"],
        UpsampledFilters(given["taps"], given["rest"]),
        inputs=images(given),
        tables=(given["table"], given["second"]),
        activation=node.attrs["activation"],
    )


def _gradients(run: Launcher, node: Node, given: Inputs) -> tuple[dict[str, Tensor], dict]:
    """Where gradients go that follow from the sums, by their roles in `NormGrads`: in a step to
    their places; and the options that they need."""
    into, has_film = dict(given.into), "scale" in given or "shift" in given
    if not run.is_step:
        n, _, c = given["table"].shape
        roles = (*(("scale", "shift") if has_film else ()), *(["emb"] * ("emb" in node.outputs)))
        into = {role: given["table"].new_empty(n, c) for role in roles}
    options: dict = {"input_partials": given.get("input_partials")}
    if has_film:
        scale = given["scale"] if "scale" in given else torch.zeros_like(given["table"][:, 0])
        options["film"] = given["weight"], given["bias"], scale
    return into, options


def _sums(run: Launcher, given: Inputs) -> RowSums | Tensor:
    """Where rows go that are summed to gradients of a norm's parameters."""
    if run.is_step:
        return run.sums
    n, _, c = given["table"].shape
    shape = n, (3 if "input_partials" in given else 2) * c
    return given["table"].new_empty(shape) if run.sums is None else run.sums.rows(*shape)


def _summed(run: Launcher, node: Node, rows: RowSums | Tensor) -> dict[str, Tensor]:
    """What a node gives of these rows: themselves, or their sums."""
    if run.is_step or node.outputs.keys().isdisjoint(("sums", *SUMS_OF_NORM)):
        return {}
    if "sums" in node.outputs:
        return {"sums": rows}
    total = rows.new_empty(rows.shape[1])
    run.kernels.bias_grad(rows, total)
    c = node.inputs["table"].shape[2]
    return dict(zip(SUMS_OF_NORM, total.split(c), strict=False))


@launches("norm_grad_table")
def _norm_grad_table(run, node, given):
    a, (into, options) = node.attrs, _gradients(run, node, given)
    tensors, sums = (given["partials"], given["table"]), _sums(run, given)
    grads = a["pixels"], a["groups"], NormGrads(**into)
    coeff = run.kernels.norm_grad_table(*tensors, *grads, sums=sums, **options)
    return {"coeff": coeff} | _summed(run, node, sums) | into


@launches("norm_dx")
def _norm_dx(run, node, given):
    options = _added(node, given, "add1", "add1_second", "add2") | _scaled(run, node)
    tensors = image(given["dz"]), *images(given), given["coeff"]
    x1, dx1 = tensors[1], node.outputs.get("dx1")
    if dx1 is not None and dx1.dtype != node.inputs["x0"].dtype:
        options["out"] = torch.empty_like(x1, dtype=dx1.dtype)
    return _shaped(node, run.kernels.norm_dx(*tensors, **options))


@launches("skip_dx")
def _skip_dx(run, node, given):
    options = _added(node, given, "add1", "dz2") | _scaled(run, node)
    tensors = given["dy"], run.filters(given["weight"]), given["dz"], *images(given), given["coeff"]
    return _shaped(node, run.kernels.skip_dx(*tensors, **options))


@launches("norm_backward")
def _norm_backward(run, node, given):
    a, (into, options) = node.attrs, _gradients(run, node, given)
    sums = _sums(run, given)
    options |= _added(node, given, "add1", "add1_second") | {"rows": run.rows_of(node)}
    options |= {"out": given.get(a.get("over")), "sums": sums}
    tensors = (image(given[role]) for role in ("dz", "x0"))
    norm = given["partials"], given["table"], a["groups"], NormGrads(**into)
    dx, rows = run.kernels.norm_backward(*tensors, *norm, **options)
    return _shaped(node, (dx, None, rows)) | _summed(run, node, sums) | into


@launches("skip_backward")
def _skip_backward(run, node, given):
    into, sums = NormGrads(**given.into), _sums(run, given)
    options = _added(node, given, "add1", "dz2") | {"sums": sums}
    options["rows"] = run.sums if run.is_step else run.rows_of(node)
    tensors = given["dy"], run.filters(given["weight"]), given["dz"], *images(given)
    norm = given["partials"], given["table"], node.attrs["groups"], into
    made = _shaped(node, run.kernels.skip_backward(*tensors, *norm, **options))
    return made | _summed(run, node, sums)


def _added(node: Node, given: Inputs, *roles: str) -> dict[str, Any]:
    """What is added to dx, if it is there, and whether the first half of dx is of a small image."""
    added = {role: image(given.get(role)) for role in roles}
    return added | {"upsample1": node.attrs.get("upsample1", False)}


def _scaled(run: Launcher, node: Node) -> dict[str, Any]:
    """What multiplies the first half of dx, and whether rows of its sums are wanted."""
    return {"factor": node.attrs.get("factor"), "sums": run.rows_of(node) or None}


def _shaped(node: Node, made: tuple[Tensor | None, ...]) -> dict[str, Tensor | None]:
    """What the node gives, under the shapes of its values; but rows, whose number is the kernel's
    affair: it is their sum that counts."""
    named = dict(zip(("dx1", "dx2", "rows"), made, strict=True))
    return {
        role: x if x is None or role == "rows" else x.view(node.outputs[role].shape)
        for role, x in named.items()
        if role in node.outputs
    }


# --- sums -----------------------------------------------------------------------------------------


@launches("row_sums")
def _row_sums(run, node, given):
    return run.kernels.tensor_rows(given["x"].contiguous(), run.sums)


@launches("bias_grad")
def _bias_grad(run, node, given):
    if run.is_step:
        run.kernels.bias_grad(given["rows"], given.into["y"], accumulate=True, sums=run.sums)
        return {}
    total = given["rows"].new_empty(given["rows"].shape[1])
    run.kernels.bias_grad(given["rows"], total)
    return total.view(node.out.shape)


@launches("bias_grads")
def _bias_grads(run, node, given):
    """One launch, if the rows are where `sums` keeps them; others are copied there."""
    rows, parts, wanted = many(given, "rows"), node.attrs["parts"], list(node.outputs.values())
    if run.sums is None:
        totals = [x.new_empty(x.shape[1]) for x in rows]
        for x, total in zip(rows, totals, strict=True):
            run.kernels.bias_grad(x, total)
        places = [totals[i][at:] for i, at in parts]
    else:
        *starts, size = accumulate((rounded(4 * y.numel) // 4 for y in wanted), initial=0)
        run.sums.grad = torch.zeros(size, device=rows[0].device)
        rows = list(map(run.sums.placed, rows))
        places = [run.sums.grad[start:] for start in starts]
    made = [x[: y.numel].view(y.shape) for x, y in zip(places, wanted, strict=True)]
    if run.sums is not None:
        for (i, at), x in zip(parts, made, strict=True):
            run.sums.add(rows[i], at, x)
        run.sums.flush()
    return dict(zip(node.outputs, made, strict=True))
