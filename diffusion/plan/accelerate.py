"""A module that runs the forward and backward of another module by a plan."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from .build import Plan
from .calls.calls import Calls
from .graph import PlanError
from .record.notes import is_recording


class Accelerated(nn.Module):
    """`module`, run by its plans (`calls`). It has the same parameters (`self.module`'s),
    arguments, results and attributes. It has few names of its own: libraries set theirs on it.
    """

    def __init__(
        self,
        module: nn.Module,
        launch: Callable | None = None,  # how nodes are launched; None: as the device has it
        capture: bool = True,  # calls that come again become CUDA graphs, see `replay`
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"{type(module).__name__} is no torch.nn.Module, which a plan is of")
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            name = type(module).__name__
            raise PlanError(
                f"{name} goes around the accelerated module: {name}(accelerate(module))"
            )
        self._planned_calls = Calls(launch, capture)
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """On the module, if that may compute with it: what has parameters, and names that the
        module, its class or its forward pass knows. Others, such as a library's notes and a
        `forward` that calls this one's, stay here."""
        module = vars(self).get("_modules", {}).get("module")
        if module is None or not _is_of(module, name, value, self):
            super().__setattr__(name, value)
            return
        setattr(module, name, value)
        vars(self).pop(name, None)  # a forward that was here, where the module has its own again

    def __delattr__(self, name: str) -> None:
        if name in vars(self) or name in self._modules:
            super().__delattr__(name)
        else:
            delattr(self.module, name)
            self._planned_calls.asked.add(name)  # which may be set again

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        self.module.register_parameter(*args, **kwargs)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """To the module, but in the place of this one's own part, as tools do that go through all
        parts."""
        if name in self._modules:
            super().add_module(name, module)
        else:
            self.module.add_module(name, module)

    def register_module(self, name: str, module: nn.Module | None) -> None:
        self.add_module(name, module)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's, with its names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of a dict with the module's names, by which missing and unexpected ones are told."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Itself, and the module's by its names, from which parameters and buffers have theirs."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name[len(prefix) :]}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing() or torch.compiler.is_exporting():  # to a file, which has no plans
            return self.module(*args, **kwargs)
        call = _hidden if "torch._dynamo" in sys.modules else _call
        return call(self, args, kwargs)

    def plan_of(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Plan, tuple, dict]:
        """The plan of a call, and its arguments as the plan takes them."""
        found = self._planned_calls.plan_of(self.module, args, kwargs)
        here = self._planned_calls.asked & vars(self).keys()  # set before anybody knew
        if not here:
            return found
        for name in here:
            setattr(self.module, name, vars(self).pop(name))
        return self.plan_of(args, kwargs)


def _call(fast: Accelerated, args: tuple, kwargs: dict[str, Any]) -> Any:
    if is_recording():  # for the plan of a module that this is a part of
        return fast.module(*args, **kwargs)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise PlanError("torch.func cannot transform a plan (vmap, grad, jvp); use `.module`")
    if forward_ad._current_level >= 0:
        raise PlanError("a plan has no forward-mode gradients (dual tensors); use `.module`")
    return fast._planned_calls.run(*fast.plan_of(args, kwargs))


_hidden = torch._disable_dynamo(_call)  # from torch.compile, which would compile the planning


def _is_of(module: nn.Module, name: str, value: Any, around: Accelerated) -> bool:
    """Whether an attribute that is set on the module around it is the module's."""
    if name == "forward":
        return getattr(value, "__self__", None) is module
    if name in vars(around) or name in around._modules or hasattr(Accelerated, name):
        return False
    has_states = isinstance(value, nn.Module | nn.Parameter)
    return has_states or name in around._planned_calls.asked or _knows(module, name)


def _knows(module: nn.Module, name: str) -> bool:
    """Whether it, or a class of its own, has the name."""
    if isinstance(module, Accelerated):
        return _knows(module.module, name)
    kinds = (kind for kind in type(module).__mro__ if kind not in (nn.Module, object))
    parts = vars(module), module._parameters, module._buffers, module._modules
    return any(name in part for part in (*parts, *map(vars, kinds)))
