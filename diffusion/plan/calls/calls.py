"""The plans of a module's calls: one for each kind of call, which the first of its kind makes."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from triton_kernels import fused_ops
from triton_kernels.runtime.device import describe, on_gpu

from ...models.layers import Layer
from ...runtime.backend import ready_kernels
from ...runtime.precompile import compile_recorded, compiles_ahead
from ..build import Plan, plan
from ..graph import PlanError
from ..launch.table import launch_kernels
from ..record.own_functions import autocasts
from ..trees import flatten, holds_tensors, leaves
from . import planned
from .dry_passes import launches_of
from .module_states import ModuleStates
from .numbers_as_tensors import are_tensors
from .planned import FlatGradients, Planned, evaluate
from .replay import Replays

log = logging.getLogger(__name__)

# Held while a module is recorded, when its parameters are others, and while they are read
_MODULES = threading.RLock()

_KEPT = 8  # plans of calls that differ in the module's attributes alone
_MANY = 16  # plans of calls with numbers that cannot be tensors, after which the log says so
_ONE_EACH = (
    "%s treats a number among its arguments differently from a tensor, so each number needs a plan"
    " of its own (%d so far), which takes a second or more to make; give it a tensor if you can"
)


class Calls:
    """The plans of the calls of one module, which comes with each call.

    There is a plan for every combination of shapes, dtypes, modes, arguments that are no tensors,
    and attributes that the forward pass reads; the first call of each makes it. PlanError, with the
    reason: the module has none.
    """

    def __init__(
        self,
        launch: Callable | None = None,  # how nodes are launched; None: as the device has it
        capture: bool = True,  # calls that come again become CUDA graphs, see `replay`
        flat: FlatGradients | None = None,  # where gradients are added; None: autograd does
    ) -> None:
        self._launch, self._flat = launch, flat
        self._replays = Replays() if capture and launch is None else None
        self.plans: dict[tuple, list[Plan]] = {}  # which differ in what the module read of itself
        # names of the module that it does not have, which its forward pass may ask for
        self.asked: set[str] = set()
        self._apart: set[tuple] = set()  # of calls whose numbers cannot be tensors
        self._of_numbers = 0  # plans that are of these
        self._states = ModuleStates()

    def __getstate__(self) -> dict[str, Any]:
        new = {"plans": {}, "_apart": set(), "_states": ModuleStates()}  # plans are made again
        return vars(self) | new

    def run(self, made: Plan, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What a plan makes of arguments, both as `plan_of` has just given them."""
        inputs, tensors = made.traced.leaves(args, kwargs), self._states.by_name
        written = made.traced.written
        parameters = [
            tensors[name].clone() if name in written else tensors[name]
            for name in made.graph.parameters
        ]
        given = [*inputs, *parameters]
        replay = None if self._replays is None else self._replays.of(made, given)
        if made.backward is not None:
            outputs = Planned.apply(made, self._launch, self._flat, replay, len(inputs), *given)
        elif replay is not None:
            outputs = replay.forward(given)
        else:
            with torch.no_grad():
                outputs, _ = evaluate(made, inputs, parameters, self._launch)
        with torch.no_grad():
            for name, y in zip(written, outputs[len(outputs) - len(written) :], strict=True):
                tensors[name].copy_(y)
        return made.traced.assemble(list(outputs))

    def plan_of(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Plan, tuple, dict]:
        """The plan of a call of the module, and its arguments as the plan takes them: a number,
        such as a timestep, is a tensor to it, so that another number needs no other plan, unless
        the module does something else with a tensor."""
        with _MODULES:
            self._states.read(module)
            return self._plan_of(module, args, kwargs)

    def _plan_of(
        self, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Plan, tuple, dict]:
        leaves, spec = flatten((args, kwargs))
        device = next((x.device for x in leaves if isinstance(x, Tensor)), torch.device("cpu"))
        numbers = [torch.tensor(x, device=device) if _is_number(x) else x for x in leaves]
        as_tensors = pytree.tree_unflatten(numbers, spec)
        # a plan of tensors is that of numbers only where both have been compared
        which = tuple(type(x) for x, y in zip(leaves, numbers, strict=True) if x is not y)
        key = self._key(numbers, spec), which
        made = self._found(key)
        if made is not None:
            return made, *as_tensors
        if not which:
            return self._new_plan(module, key, as_tensors), *as_tensors
        given, fixed = pytree.tree_unflatten(leaves, spec), (self._key(leaves, spec), ())
        made = self._found(fixed)
        if made is None:
            made = self._with_tensors(module, key, (args, kwargs), as_tensors)
            if made is not None:
                return made, *as_tensors
            made = self._new_plan(module, fixed, (args, kwargs))
            self._of_numbers += 1
            if self._of_numbers == _MANY:
                log.warning(_ONE_EACH, type(module).__name__, _MANY)
        return made, *given

    def _found(self, key: tuple) -> Plan | None:
        """The plan of a call like this, if the module is what it was then."""
        states = self._states.by_name
        return next(
            (
                p
                for p in self.plans.get(key, ())
                if p.traced.reads.hold() and p.traced.buffers.hold(states)
            ),
            None,
        )

    def _with_tensors(
        self, module: nn.Module, key: tuple, call: tuple, as_tensors: tuple
    ) -> Plan | None:
        """The plan of a call with tensors in the place of its numbers, if there is one, and it is
        that of numbers."""
        if key in self._apart:
            return None
        with suppress(PlanError, ValueError, TypeError):  # which the call itself may not raise
            if are_tensors(module, call, as_tensors):
                return self._new_plan(module, key, as_tensors)
        self._apart.add(key)
        return None

    def _new_plan(self, module: nn.Module, key: tuple, call: tuple) -> Plan:
        """A new plan, which the next call finds."""
        device = _device(module, call)
        if device.type == "cuda":
            ready_kernels(device)
        made = self._made(module, device, *call)
        if self._launch is None and compiles_ahead(device):
            self._compile(made, device, *call)
        self.plans[key] = [*self.plans.get(key, [])[1 - _KEPT :], made]
        self.asked |= made.traced.reads.missing_of(module)
        return made

    def _compile(self, made: Plan, device: torch.device, args: tuple, kwargs: dict) -> None:
        """Have many processes compile what the plan launches."""
        states = self._states.by_name
        tensors = [*made.traced.leaves(args, kwargs), *map(states.get, made.graph.parameters)]
        try:
            compile_recorded(lambda: launches_of(made, tensors, describe(device)), device)
        except Exception as error:  # of what has been recorded or written: nothing depends on it
            log.info("kernels are compiled at their first launch, one at a time: %s", error)

    def _made(
        self, module: nn.Module, device: torch.device, args: tuple, kwargs: dict[str, Any]
    ) -> Plan:
        gradients = torch.is_grad_enabled()
        trains = gradients and any(p.requires_grad for p in module.parameters())
        tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        of_inputs = tuple(i for i, x in enumerate(tensors) if gradients and x.requires_grad)
        tf32, kernels = self._tf32(), None
        exact = any(p.dtype == torch.float64 for p in module.parameters())
        if on_gpu(device) and not exact:
            kernels = fused_ops, describe(device)
        options = {"trains": trains, "of_inputs": of_inputs, "tf32": tf32, "kernels": kernels}
        options |= {"rounds": planned.launcher(device) is launch_kernels}
        if self._flat is not None:
            options["flat"] = self._flat.grads, self._flat.low
        made = plan(module, args, kwargs, **options)
        constants = made.graph.constants
        made.graph.constants = {value: x.to(device) for value, x in constants.items()}
        return made

    def _key(self, leaves: list, spec: pytree.TreeSpec) -> tuple:
        """Everything that a plan depends on."""
        gradients = torch.is_grad_enabled()
        described = tuple(
            (x.shape, x.dtype, x.device, gradients and x.requires_grad)
            if isinstance(x, Tensor)
            else (type(x), _hashable(x))
            for x in leaves
        )
        states = self._states.kind(gradients)
        # what a forward pass may ask, and hooks of every module
        hooks = nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks
        beside = gradients, torch.get_default_dtype(), *(tuple(hook.values()) for hook in hooks)
        return described, str(spec), states, tuple(autocasts()), self._tf32(), beside

    def _tf32(self) -> tuple[bool, bool]:
        """Whether convolutions, and other products, may be in TF32: as PyTorch has been told, and
        the framework's layers."""
        ours = [m.backend.allow_tf32 for m in self._states.parts if isinstance(m, Layer)]
        # `allow_tf32` raises where somebody has set these
        flags = torch.backends.cudnn.conv, torch.backends.cuda.matmul
        convs, others = (flag.fp32_precision == "tf32" for flag in flags)
        return (all(ours), all(ours)) if ours else (convs, others)


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) or isinstance(x, np.number)


def _device(module: nn.Module, call: tuple) -> torch.device:
    """Where the arguments are, or else the parameters."""
    tensors = (x for x in leaves(call) if isinstance(x, Tensor))
    found = next((x.device for x in (*tensors, *module.parameters())), None)
    return torch.device("cpu") if found is None else found


def _hashable(x: Any) -> Any:
    """An argument that is no tensor, and the state of an object that may change."""
    name = type(x).__name__
    if isinstance(x, Iterator):
        raise PlanError(f"an argument is a {name}, of which each call takes others; give a list")
    if holds_tensors(x):
        raise PlanError(f"an argument is a {name} with tensors in it; give tensors or dataclasses")
    try:
        hash(x)
    except TypeError:
        raise PlanError(f"an argument is of {name}; give tensors, numbers or words") from None
    changes = type(x).__hash__ is object.__hash__ and not callable(x)
    state = vars(x) if changes and hasattr(x, "__dict__") else {}
    return x, *((key, _hashable(value)) for key, value in state.items())
