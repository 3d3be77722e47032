"""Whether a plan may take a module's numbers as tensors.

A plan takes a number among the arguments, such as a timestep, as a tensor, so that another number
needs no other plan. But a module may do something else with a tensor than with a number: diffusers'
UNet2DModel makes an integer of a number, and not of a tensor. So both calls are recorded, what
depends on numbers alone is computed, and what remains has to be the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ..graph import PlanError
from ..record.draws import draws
from ..record.record import record
from ..record.recording import Call, Recording
from ..trace import plain_layers
from ..trees import leaves


def are_tensors(module: nn.Module, fixed: tuple, given: tuple) -> bool:
    """Whether the module does the same with numbers, `fixed`, and with tensors in their place,
    `given`, both (args, kwargs). Errors are those of `record`."""
    numbers = [not isinstance(x, Tensor) for x in leaves(fixed)]
    with plain_layers(module):
        a, b = (_Rest(record(module, *call), numbers, leaves(call)) for call in (given, fixed))
    ends = a.of(a.result), b.of(b.result)
    return len(a.calls) == len(b.calls) and all(
        x.made == y.made and _close(x.args, y.args, x.digits)
        for x, y in (*zip(a.calls, b.calls, strict=True), (_End(ends[0]), _End(ends[1])))
    )


@dataclass(frozen=True)
class _Place:
    """What a tensor is that depends on more than numbers: an input, a state, a call's result."""

    kind: str
    of: int | str
    at: int = 0


@dataclass
class _End:
    """What a module returns, or a call that is left."""

    args: list
    made: tuple = ()  # the op; shapes and dtypes of its results; whether it has gradients
    digits: float = 1e-6  # how far numbers may be apart, relative


class _Rest:
    """What is left of a recording when the calls of numbers alone have been computed."""

    def __init__(self, recording: Recording, numbers: list[bool], given: list) -> None:
        self.calls: list[_End] = []
        self.result = recording.result, recording.written
        self.found: dict[int, _Place | Tensor] = {}  # by ids of tensors
        for i, x in enumerate(recording.inputs):
            if isinstance(x, Tensor):
                self.found[id(x)] = given[i].cpu() if numbers[i] else _Place("input", i)
        for name, x in (recording.parameters | recording.buffers).items():
            self.found[id(x)] = _Place("state", name)
        for x, constant in recording.constants:
            self.found[id(x)] = constant.detach().cpu()
        for call in recording.calls:
            self._call(call)

    def of(self, tree: Any) -> list:
        found = leaves(tree)
        if any(isinstance(x, Tensor) and id(x) not in self.found for x in found):
            raise PlanError("a tensor has numbers that were made unseen")  # `trace` says where
        return [self.found[id(x)] if isinstance(x, Tensor) else x for x in found]

    def _call(self, call: Call) -> None:
        values, results = self.of((call.args, call.kwargs)), call.results
        if draws(call.target) or any(isinstance(v, _Place) for v in values):
            made = [_Place("call", len(self.calls), i) for i in range(len(results))]
            shapes = tuple((x.shape, x.dtype) for x in results)
            op = call.target.overloadpacket  # a number has another overload than a tensor
            exact = any(x.dtype == torch.float64 for x in results)
            digits = 1e-12 if exact else 1e-6
            self.calls.append(_End(values, (op, shapes, call.differentiable), digits))
        else:
            host = torch.device("cpu")
            values = [host if isinstance(v, torch.device) else v for v in values]
            _, spec = pytree.tree_flatten((call.args, call.kwargs))
            args, kwargs = pytree.tree_unflatten(values, spec)
            made = pytree.tree_leaves(call.target(*args, **kwargs))
        self.found |= {id(x): value for x, value in zip(results, made, strict=True)}


def _close(a: list, b: list, digits: float) -> bool:
    """Whether arguments are the same: places and words equal, numbers nearly."""
    return len(a) == len(b) and all(
        _numbers_close(x, y, digits) if isinstance(x, Tensor) or isinstance(y, Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def _numbers_close(a: Any, b: Any, digits: float) -> bool:
    if not all(isinstance(x, Tensor | int | float) for x in (a, b)):
        return False
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    close = {"rtol": digits, "atol": 0.0, "equal_nan": True}
    return a.shape == b.shape and torch.allclose(a, b, **close)
