"""The parameters and buffers of a module, which every call of a plan asks for."""

from itertools import chain
from operator import is_

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..build import states_of
from ..graph import PlanError


class ModuleStates:
    """Those of one module, by name. They are looked at anew whenever they are asked for, and named
    only when they are others than before: names take most of the time."""

    def __init__(self) -> None:
        self.parts: list[nn.Module] = []
        self.by_name: dict[str, Tensor] = {}
        self._names: list[str] = []  # within their parts
        self._counts: list[int] = []
        self._tensors: list[Tensor | None] = []
        self._described: list[tuple] | None = None
        self._numbers: dict[tuple, int] = {}
        self._number = 0

    def read(self, module: nn.Module) -> None:
        """Look at the module's."""
        parts = _parts(module)
        held = [states for part in parts for states in (part._parameters, part._buffers)]
        # by methods, which are all that TorchScript's have
        names = [*chain.from_iterable(states.keys() for states in held)]
        counts = [len(states) for states in held]
        tensors = [x for states in held for x in states.values()]
        if (
            names == self._names
            and counts == self._counts
            and _same(parts, self.parts)
            and _same(tensors, self._tensors)
        ):
            return
        lazy = next((name for name, x in states_of(module).items() if is_lazy(x)), None)
        if lazy is not None:
            raise PlanError(f"{lazy} has no shape before a call; call the module once before")
        self.parts, self._names, self._counts, self._tensors = parts, names, counts, tensors
        self._described, self.by_name = None, states_of(module)

    def kind(self, gradients: bool) -> int:
        """A number for their names, shapes, dtypes and devices, and, with `gradients`, which of
        them require gradients."""
        described = [
            (x.shape, x.dtype, x.device, gradients and x.requires_grad)
            for x in self._tensors
            if x is not None
        ]
        if described != self._described:
            self._described = described
            key = (*self.by_name, *described)
            self._number = self._numbers.setdefault(key, len(self._numbers))
        return self._number


def _same(a: list, b: list) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def _parts(module: nn.Module) -> list[nn.Module]:
    """As `module.modules()`, which takes five times as long."""
    found, rest = {}, [module]
    while rest:
        part = rest.pop()
        if id(part) not in found:
            found[id(part)] = part
            rest += [child for child in part._modules.values() if child is not None]
    return list(found.values())
