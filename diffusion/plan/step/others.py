"""Networks that are no `UNet`, in training: by the plan that `accelerate` makes of them.

Gradients of weights are written where the flat buffer has them, and parameters in 16 bits are read
from its shadow, where their memory order is that of the kernels. Other gradients are tensors, which
a few launches add to the buffer.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...models.conditions import Conditions, Given
from ...models.flat_parameters import FlatParameters
from ..calls.calls import Calls
from ..calls.planned import has_hooks
from ..graph import PlanError
from ..launch.table import launch_kernels

log = logging.getLogger(__name__)

_MODEL = "model."  # in front of the names of a `_Call`'s parameters


class TrainingNetwork:
    """Runs `model.forward_nhwc` by its plan, which the first call for images of a shape makes. If
    there is none, the layers run one by one from there on, and the log says why."""

    def __init__(self, model: nn.Module, flat: FlatParameters) -> None:
        self.model, self.gradients = model, _Gradients(model, flat)
        # by `first`; None: it has none
        self.plans: dict[int, tuple[_Call, Calls]] | None = {}

    def __call__(
        self,
        x: Tensor,
        t: Tensor,
        labels: Given = None,
        *,
        rng: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """As `forward_nhwc` of the model."""
        if self.plans is not None:
            given = vars(labels) if isinstance(labels, Conditions) else {"labels": labels}
            if first not in self.plans:
                calls = Calls(launch=launch_kernels, flat=self.gradients)
                self.plans[first] = _Call(self.model, first), calls
            call, calls = self.plans[first]
            try:
                planned = calls.plan_of(call, (x, t, rng), given)
            except (PlanError, ValueError, TypeError) as error:
                log.warning("the layers run one by one, without a plan: %s", error)
                self.plans = None
            else:
                return calls.run(*planned)
        self.gradients.begin(())
        return self.model.forward_nhwc(x, t, labels, rng=rng, first=first)

    def forget_gradients(self) -> None:
        """Zero the flat gradient but for what the next backward pass will write."""
        self.gradients.forget()


class _Call(nn.Module):
    """A call of a network, its tensors by name."""

    def __init__(self, model: nn.Module, first: int) -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, x: Tensor, t: Tensor, rng: Tensor | None, **given: Any) -> Tensor:
        labels = Conditions(**given).shortest()
        return self.model.forward_nhwc(x, t, labels, rng=rng, first=self.first)


def in_flat_buffers(
    model: nn.Module, flat: FlatParameters
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """By the names of parameters, the gradients that plans may write, and parameters in 16 bits, if
    the model computes in these; as `build.plan` takes them."""
    # those with hooks pass through autograd
    free = {name for name, p in model.named_parameters() if not has_hooks(p)}
    grads = {name: view for name, view in flat.views(flat.grad).items() if name in free}
    dtype = model.backend.dtype
    return grads, flat.views(flat.low(dtype)) if dtype.itemsize == 2 else {}


class _Gradients:
    """The flat gradient, and parameters in 16 bits, by their names in a `_Call`."""

    def __init__(self, model: nn.Module, flat: FlatParameters) -> None:
        self._flat, self._all = flat, _named(flat.views(flat.grad))
        self.grads, self.low = map(_named, in_flat_buffers(model, flat))
        self._written: set[str] = set()  # by the first backward pass of the last step
        self._old: set[str] = set()  # which have the last step's gradient
        self._is_first = True

    def forget(self) -> None:
        """Zero all but what the first pass of the last step has written, and this one's will."""
        self._old, self._is_first = self._written, True
        if not self._old:
            self._flat.grad.zero_()
            return
        others = [grad for name, grad in self._all.items() if name not in self._old]
        torch._foreach_zero_(others)

    def begin(self, placed: Collection[str]) -> bool:
        """As of `FlatGradients`. What it does not write is zero from here on."""
        accumulates, stale = not self._old, self._old.difference(placed)
        if stale:
            torch._foreach_zero_([self.grads[name] for name in stale])
        if not accumulates:  # what is zero is written like what is old
            self._old = set()
        if self._is_first:
            self._written, self._is_first = set(placed), False
        return accumulates

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """By a few launches; autograd would need one for each."""
        alike = []
        for name, gradient in gradients.items():
            place = self.grads[name]
            gradient = _as_it_is(gradient, place)
            if (gradient.stride(), gradient.dtype) == (place.stride(), place.dtype):
                alike.append((place, gradient))
            else:  # in the list it would cost a launch for each pair
                place.add_(gradient)
        if alike:
            torch._foreach_add_(*map(list, zip(*alike, strict=True)))


def _named(views: dict[str, Tensor]) -> dict[str, Tensor]:
    return {_MODEL + name: view for name, view in views.items()}


def _as_it_is(x: Tensor, other: Tensor) -> Tensor:
    """x with the strides of the other also along axes of one, without which PyTorch would take a
    launch for each tensor of a list."""
    strides = zip(x.shape, x.stride(), other.stride(), strict=True)
    same = all(mine == its for size, mine, its in strides if size > 1)
    return x.as_strided(other.shape, other.stride(), x.storage_offset()) if same else x
