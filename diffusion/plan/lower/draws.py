"""Draws of PyTorch's generator, besides dropout: noise, timesteps, labels that are dropped.

Each is a node, which draws anew in every call, in the order in which the module draws. So a plan
has the module's numbers where it starts from the same state of the generator, has no dropout and
draws nothing like a tensor in channels_last: the module fills that in another order.
It draws on the device of its images, also what a module draws on the host and moves there.
"""

from typing import Any

import torch

from ..graph import Value, numbered
from ..views import View, whole
from .shapes import detached
from .table import Lowering, call_arguments


def draw(low: Lowering, *args: Any, **options: Any) -> View:
    """Of no gradient."""
    if options.pop("generator", None) is not None:
        raise low.refuse("of a generator of the module's own")
    inputs: list[Value] = []

    def placed(arg: Any) -> Any:  # as in `arithmetic`
        if isinstance(arg, View):
            inputs.append(low.gather(detached(low, arg)))
            return len(inputs) - 1
        return ("number", arg)

    arguments = tuple(map(placed, args))
    options = {k: v for k, v in options.items() if k not in ("pin_memory", "layout", "device")}
    given = numbered("x", inputs) or {"beside": _beside(low)}
    attrs = {"target": low.target, "arguments": arguments, "options": options}
    return whole(low.make("draw", given, low.meta.shape, low.meta.dtype, **attrs))


def _beside(low: Lowering) -> Value:
    """An image among the arguments, or another tensor of the call."""
    graph = low.graph
    found = [*(v for v in graph.inputs if v.shape), *graph.parameters.values(), *graph.inputs]
    if not found:
        raise low.refuse("where no tensor says on which device")
    return found[0]


def drawn(attrs: dict[str, Any], tensors: list[torch.Tensor], beside: torch.Tensor | None) -> Any:
    """The numbers of a node with these attributes."""
    options = attrs["options"] | ({} if beside is None else {"device": beside.device})
    return attrs["target"](*call_arguments(attrs["arguments"], tensors), **options).contiguous()
