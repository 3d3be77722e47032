"""`LAUNCHES` has one row per op: how it calls a module of kernels. Every plan runs by it, on a GPU
on `triton_kernels.fused_ops` (or that in TF32 or float32), on a CPU on its reference, which has
the same names. The rules for where plans differ:

- Gradients. In a training step they have places in the flat gradient (`Inputs.into`), elsewhere
  they are tensors of their own. In both, rows that are added up together are in `Launcher.sums`.
- Shapes that the fused kernels lack (strides, rows that are no images, float32 without TF32) go to
  the public ops of `Launcher.public`, and what these lack to PyTorch.
- The reference computes in float32 or more what has 16 bits, unless it stands for a step.
- float64 on a GPU is PyTorch's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import triton_kernels
from triton_kernels import fused_ops, reference
from triton_kernels.fused_float32 import in_float32
from triton_kernels.fused_tf32 import in_tf32
from triton_kernels.noise.dropout import Mask
from triton_kernels.reductions.row_sums import RowSums, Tables
from triton_kernels.reference import fused

from ..graph import Node, Value, many

Kernels = ModuleType | SimpleNamespace


class Inputs(dict[str, Any]):
    """What a node reads, by role; and the places of those of its results that have one."""

    into: dict[str, Tensor]


LAUNCHES: dict[str, Callable[["Launcher", Node, Inputs], Any]] = {}
MAKES: dict[str, tuple[str, ...]] = {}  # of ops whose row returns a tuple, the roles in it
# ops by PyTorch's kernels, which a dry run shows shapes alone; `casts` has some of ours beside them
BY_PYTORCH: set[str] = set()


def launches(*ops: str, makes: tuple[str, ...] = ()) -> Callable[[Callable], Callable]:
    """A row: a function of the launcher, the node and its inputs, which returns its first result, a
    tuple of what it `makes`, or all by role. A result that is None is not made."""

    def register(function: Callable) -> Callable:
        LAUNCHES.update(dict.fromkeys(ops, function))
        MAKES.update(dict.fromkeys(ops, makes))
        return function

    return register


def by_pytorch(*ops: str) -> Callable[[Callable], Callable]:
    """A row that calls PyTorch's kernels."""
    BY_PYTORCH.update(ops)
    return launches(*ops)


@dataclass
class Launcher:
    """Launches nodes on a module of kernels."""

    kernels: Kernels
    widens: bool = False  # 16 bits to float32
    sums: RowSums | None = None  # which keeps rows of sums; None: they are tensors of their own
    is_step: bool = False  # gradients have places, and `sums` adds to these
    in_places: bool = False  # gradients of weights have places
    accumulates: bool = True  # gradients of filters are added to what is in their places
    first: int = 0  # global index of sample 0, in this call

    def __call__(self, node: Node, values: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
        """What the node makes, but for what it writes to a place."""
        if self.kernels is fused_ops and any(v.dtype == torch.float64 for v in node.values):
            places = {"in_places": self.in_places, "accumulates": self.accumulates}
            return replace(launch_reference, **places)(node, values)
        read = ((role, values[value]) for role, value in node.inputs.items())
        given = Inputs((role, self._read(x)) for role, x in read if x is not None)
        placed = node.outputs.items() if self.is_step or self.in_places else ()
        given.into = {role: values[value] for role, value in placed if value in values}
        if "rng" in given:
            given["first"] = node.attrs["first"] + self.first
        made = LAUNCHES[node.op](self._rounding if node.rounds else self, node, given)
        if not isinstance(made, dict):
            several = MAKES[node.op]
            first = next(iter(node.outputs))
            made = dict(zip(several, made, strict=True)) if several else {first: made}
        wanted = {role: value for role, value in node.outputs.items() if role not in given.into}
        found = {v: made[role] for role, v in wanted.items() if made.get(role) is not None}
        if self.is_step:  # whose rows are float32, whatever the trace said of their sums
            return found
        return {value: x.to(value.dtype) for value, x in found.items()}

    def _read(self, x: Tensor) -> Tensor:
        return x.float() if self.widens and x.dtype in (torch.bfloat16, torch.float16) else x

    def of_backward(self, tables: Tables, device: torch.device) -> "Launcher":
        """The same, for one backward pass, whose sums are added up together."""
        if self.kernels.RowSums is fused.RowSums:
            return self
        return replace(self, sums=RowSums(torch.empty(0, device=device), tables))

    @cached_property
    def public(self) -> ModuleType:
        """The public ops beside these kernels."""
        return reference if self.kernels.RowSums is fused.RowSums else triton_kernels

    @cached_property
    def _rounding(self) -> "Launcher":
        """The same, whose kernels round to TF32 what they write and attention reads. The reference
        computes in float32, and steps have such kernels in any case."""
        return replace(self, kernels=_rounding_kernels()) if self.kernels is fused_ops else self

    def of(self, node: Node) -> Kernels:
        """The kernels in the precision of a node, of a plan in which some products are in TF32."""
        return self.kernels if node.tf32 else self._exact

    def filters(self, weight: Tensor) -> Tensor:
        """`filters` by its kernels."""
        return filters(weight, self.kernels)

    def rows_of(self, node: Node, role: str = "rows") -> RowSums | bool:
        """Where a launch keeps rows of sums, if they are asked for: with others', or, True, in a
        tensor of their own."""
        asked = role in node.outputs
        return self.sums if asked and self.sums is not None else asked

    @property
    def _exact(self) -> Kernels:
        return _exact_kernels() if self.kernels is fused_ops else self.kernels

    def weights(self, nodes: list[Node], values: Mapping[Value, Tensor], share: float) -> None:
        """Gradients of weights of one size, over images of one size, in one launch."""
        group = [(*_operands(node, values), as_filters(values[node.out])) for node in nodes]
        self.kernels.conv_weight_grads(*group, accumulate=self.accumulates, share=share)

    def weight(self, node: Node, values: Mapping[Value, Tensor]) -> None:
        """One, of any kind."""
        tensors = *_operands(node, values), as_filters(values[node.out])
        options = {}
        if node.attrs.get("stride", (1, 1)) != (1, 1):
            options = {"stride": node.attrs["stride"][0], "padding": node.attrs["padding"][0]}
        self.kernels.conv_weight_grad(*tensors, accumulate=self.accumulates, **options)


@cache
def _exact_kernels() -> Kernels:
    return in_float32(fused_ops)


@cache
def _rounding_kernels() -> Kernels:
    return in_tf32(fused_ops)


def _operands(node: Node, values: Mapping[Value, Tensor]) -> tuple[Tensor, Tensor]:
    return values[node.inputs["x"]], values[node.inputs["dy"]]


launch_kernels = Launcher(fused_ops)
launch_reference = Launcher(fused, widens=True)


def launcher_of(kernels: ModuleType) -> Launcher:
    """What launches nodes of plans other than a step's."""
    return launch_kernels if kernels is fused_ops else Launcher(kernels, widens=True)


# --- of inputs ------------------------------------------------------------------------------------


def image(x: Tensor | None) -> Tensor | None:
    """[N, ..., C] as [N, H, W, C]"""
    return x if x is None or x.ndim == 4 else x.reshape(x.shape[0], 1, -1, x.shape[-1])


def images(given: Inputs) -> tuple[Tensor, Tensor | None]:
    """The one or two tensors that a norm is of."""
    xs = [image(x) for x in many(given, "x")]
    return xs[0], xs[1] if len(xs) == 2 else None


def as_filters(weight: Tensor) -> Tensor:
    """[CO, CI] as [CO, CI, 1, 1]"""
    return weight if weight.ndim == 4 else weight[:, :, None, None]


def filters(weight: Tensor, kernels: Kernels = fused) -> Tensor:
    """[CO, CI, R, S], or [CO, CI], as kernels see them: in [CO, R, S, CI] memory."""
    weight = as_filters(weight)
    if weight.is_contiguous(memory_format=torch.channels_last):
        return weight
    out = torch.empty_like(weight, memory_format=torch.channels_last)
    kernels.reorder(weight, out)
    return out


def bias_of(given: Inputs) -> Tensor:
    """The bias, or zeros."""
    bias, weight = given.get("bias"), given["weight"]
    zeros = {"dtype": torch.float32, "device": weight.device}
    return torch.zeros(weight.shape[0], **zeros) if bias is None else bias


def extra(given: Inputs) -> tuple[tuple[Tensor, Tensor], ...]:
    """The 1x1 convolutions that are added: images and filters."""
    return tuple(zip(many(given, "extra"), many(given, "columns"), strict=True))


def terms(node: Node, given: Inputs) -> dict[str, Any]:
    """What is added in an epilogue, beside the bias, and what then multiplies the sum."""
    found = {role: given.get(role) for role in ("emb", "residual", "extra_bias")}
    return found | {"extra": extra(given), "factor": node.attrs.get("factor")}


def rounding(node: Node) -> dict[str, bool]:
    """What kernels in TF32 are told of q, k and v that are rounded where they are made: whether
    this node is to round its result, or what it reads is rounded (`plan.rounding`)."""
    if node.attrs.get("is_rounded"):
        return {"is_rounded": True}
    return {"tf32": True} if node.rounds and node.op in ("linear", "conv_few") else {}


def mask_of(node: Node, given: Inputs) -> Mask | None:
    """What the fused kernels drop by, or None."""
    if "rng" not in given:
        return None
    a = node.attrs
    return Mask(a["p"], given["rng"], a["layer"], given["first"], given.get("words"))
