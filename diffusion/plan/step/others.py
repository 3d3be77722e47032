"""Networks that are no `UNet`, in training: by the plan that `accelerate` makes of them.

Their gradients are tensors of their own, which a few launches add to the flat buffer; parameters in
16 bits are made in every call.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from ...models.conditions import Conditions, Given
from ..calls.calls import Calls
from ..graph import PlanError
from ..launch.table import launch_kernels

log = logging.getLogger(__name__)


class TrainingNetwork:
    """Runs `model.forward_nhwc` by its plan, which the first call for images of a shape makes. If
    there is none, the layers run one by one from there on, and the log says why."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
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
                self.plans[first] = _Call(self.model, first), Calls(launch=launch_kernels, add=_add)
            call, calls = self.plans[first]
            try:
                planned = calls.plan_of(call, (x, t, rng), given)
            except (PlanError, ValueError, TypeError) as error:
                log.warning("the layers run one by one, without a plan: %s", error)
                self.plans = None
            else:
                return calls.run(*planned)
        return self.model.forward_nhwc(x, t, labels, rng=rng, first=first)


class _Call(nn.Module):
    """A call of a network, its tensors by name."""

    def __init__(self, model: nn.Module, first: int) -> None:
        super().__init__()
        self.model, self.first = model, first

    def forward(self, x: Tensor, t: Tensor, rng: Tensor | None, **given: Any) -> Tensor:
        labels = Conditions(**given).shortest()
        return self.model.forward_nhwc(x, t, labels, rng=rng, first=self.first)


def _add(parameters: list[Tensor], gradients: list[Tensor]) -> None:
    """Add gradients to those in the flat buffer; autograd would need a launch for each."""
    torch._foreach_add_([parameter.grad for parameter in parameters], gradients)
