"""Notes every call that PyTorch makes while a module runs over tensors without numbers."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from triton_kernels.runtime.device import is_rehearsal

from ..graph import PlanError
from ..trees import tensors_in
from .draws import draws, is_draw
from .lines import Lines
from .recording import Call, Recording
from .results import known_result
from .without_gpu import GPU

META = torch.device("meta")
_ATEN = torch.ops.aten


class Shapes:
    """Tensors without numbers: of the meta device, or in a mode that lets them say that they are on
    another. `there` is a tensor where those are that they stand for; None: these are on several."""

    def __init__(self, mode: FakeTensorMode | None, there: Tensor | None) -> None:
        self.mode, self.by_device, self.there = mode, mode is not None, there
        # of them all; None: that of what each stands for
        self.device = META if mode is None else GPU if is_rehearsal() else None

    def of(self, x: Tensor, device: torch.device | None = None) -> Tensor:
        with self.mode or nullcontext():
            device = device or self.device or x.device
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    def has(self, x: Tensor) -> bool:
        fake = torch._subclasses.FakeTensor
        return isinstance(x, fake) if self.by_device else x.device.type == "meta"


class Notes(TorchDispatchMode):
    """Notes every call that comes out of functionalization."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: PyTorch would import Dynamo to hide the mode from it; `record` does, if it is
        there."""
        return False

    def __init__(self, module: nn.Module, found: Recording, shapes: Shapes) -> None:
        super().__init__()
        self.found, self.shapes = found, shapes
        self.lines = Lines(module)
        self.given = {id(x): f"its argument {i}" for i, x in enumerate(found.inputs)}
        states = found.parameters | found.buffers
        self.given |= {id(x): name for name, x in states.items()}
        # of constants, by their ids and where else than `shapes` has them they are
        self.twins: dict[tuple[int, torch.device | None], Tensor] = {}
        # ids of tensors that are views or have some, are constants, or come with the call
        self.shared: set[int] = set(self.given)
        # names of parameters and buffers, by the ids of those that the forward pass has
        self.states: dict[int, str] = {}
        self.function = ""  # the one that Python called
        self.differentiable = found.differentiable  # whether its result has gradients
        self.within = False  # a call that is noted whole
        self.own = False  # and is a function of the module's own

    def __torch_dispatch__(self, target, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():  # by which `Functions` would see what is read here
            return self._seen(target, args, kwargs or {})

    def _seen(self, target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        if self._is_known(target, tensors):
            if kwargs.get("device") == self.shapes.device:  # the recording's: numbers stay
                kwargs = {k: v for k, v in kwargs.items() if k != "device"}
            with torch._C._DisableTorchDispatch():
                return target(*args, **kwargs)
        if self.own and draws(target):
            raise PlanError(f"{target} in an autograd.Function, which is called twice, draws twice")
        if not all(map(self.shapes.has, tensors)):
            shaped = partial(self.shaped, beside={x.device for x in tensors if self.shapes.has(x)})
            args, kwargs = pytree.tree_map_only(Tensor, shaped, (args, kwargs))
        if is_draw(target) and not self.shapes.by_device and _has_device(target):
            kwargs = {**kwargs, "device": META}  # of the host's, no numbers either
        if target is _ATEN.copy_.default and id(args[0]) in self.given:
            # of what the forward pass has written to, once it is over
            name = self.given[id(args[0])]
            if name not in self.found.buffers and name not in self.found.rewritten.values():
                raise PlanError(f"the module changes {name} in its forward")
            self.found.written[name] = args[1]
            return args[0]
        result = None if self.shapes.by_device else known_result(target, args, kwargs)
        result = target(*args, **kwargs) if result is None else result
        if any(r.alias_info for r in target._schema.returns) or "view" in target._opname:
            same = isinstance(result, Tensor) and args and result is args[0]
            target = self._anew(target, result) if same else target
            if not same:
                self.shared.update(map(id, tensors_in((args, result))))
        if not self.within and isinstance(result, Tensor | list | tuple):
            self.note(target, args, kwargs, result)
        return result

    def _is_known(self, target: torch._ops.OpOverload, tensors: list[Tensor]) -> bool:
        """Whether the call's result is the same in each call of the module, so that it is made now:
        of tensors with numbers alone, such as an array of numpy's."""
        fixed = not any(self.shapes.has(x) or x.requires_grad for x in tensors)
        return bool(tensors) and fixed and not draws(target) and not target._schema.is_mutable

    def shaped(self, x: Tensor, beside: Collection[torch.device] = ()) -> Tensor:
        """x, or in place of a constant a tensor without its numbers. What a call has `beside` it
        may be on the host also in a rehearsal, as what the forward makes there is."""
        if self.shapes.has(x):
            return x
        device = x.device if beside == {x.device} else None
        if (id(x), device) not in self.twins:
            if x.requires_grad:
                line = self.lines.of(sys._getframe(1))
                raise PlanError(
                    f"a tensor {list(x.shape)} that requires a gradient, and is neither an argument"
                    f" nor a parameter of the module, has no place in a plan ({line})"
                )
            with self.whole():
                twin = self.shapes.of(x, device)
            if torch._is_functional_tensor(twin):  # made where functionalization sees it
                twin = unwrapped(twin)
            self.twins[id(x), device] = twin
            self.shared.add(id(twin))
            self.found.constants.append((twin, x))
        return self.twins[id(x), device]

    def _anew(self, target: torch._ops.OpOverload, written: Tensor) -> torch._ops.OpOverload:
        """In place of an op that writes to its first argument, as some ops of PyTorch do within,
        the op whose result is new, if nothing else sees what it writes."""
        if id(written) in self.shared or torch.Tag.inplace_view in target.tags:
            return target
        named = getattr(_ATEN, target._opname.removesuffix("_"), None)
        return getattr(named, target._overloadname, target)

    def note(self, target: Any, args: tuple, kwargs: dict, result: Any) -> None:
        source = self.lines.of(sys._getframe(2))
        off = self.found.differentiable and not self.differentiable
        call = Call(target, args, kwargs, result, self.function, source, not off)
        self.found.calls.append(call)

    @contextmanager
    def under(self, name: str) -> Iterator[None]:
        """What is noted within Python has called by this name, with gradients or without."""
        before = self.function, self.differentiable
        self.function, self.differentiable = name, torch.is_grad_enabled()
        try:
            yield
        finally:
            self.function, self.differentiable = before

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What is called within is not noted."""
        before, self.within = self.within, True
        try:
            yield
        finally:
            self.within = before


def _has_device(target: torch._ops.OpOverload) -> bool:
    return any(argument.name == "device" for argument in target._schema.arguments)


def is_recording() -> bool:
    """Whether a module is recorded now, in this thread."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, Notes) for mode in modes)


def unwrapped(x: Tensor) -> Tensor:
    """What a functional tensor has been made of."""
    return torch._C._functorch._unwrap_functional_tensor(x, True)
