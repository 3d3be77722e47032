"""Records what a module calls: it runs once over tensors with shapes and dtypes but no numbers, and
every PyTorch call that reaches a kernel is recorded with its source line.

Functionalization turns in-place changes of a tensor into new tensors (`notes`). Layers that are one
op in a plan but several in PyTorch are recorded as one (`functions`).
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import stateless

from triton_kernels.runtime.device import is_rehearsal

from ..graph import PlanError
from ..trees import flatten
from .composites import parametrized_anew, without_hints
from .draws import refused, states
from .functions import ByDevice, Functions, casts
from .kept import refuse_shown
from .module import (
    places_of,
    refuse_changes,
    refuse_parts,
    refuse_replaced,
    refuse_silent_hooks,
)  # fmt: skip
from .notes import Notes, Shapes
from .own_functions import noted_by
from .recording import Recording
from .state import State
from .without_gpu import as_with_gpu, tensor_there


def record(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    forward: Callable | None = None,
    earlier: Recording | None = None,
) -> Recording:
    """What module(*args, **kwargs) calls, or a function of the module in its place. Tensors of the
    recording are on the `meta` device; under autocast, also of the module's own, they say that they
    are on that of the arguments, on which its casts depend. What the module keeps of the call
    (`state`) is forgotten; it begins with what an `earlier` one has left.

    PlanError: the forward pass writes to a parameter or an argument, depends on numbers
    that are not known before, asks which tensors have gradients, or has gradients of its own: of
    tensors that are no parameters, through hooks, or by writing where none are recorded; or a hook
    or the forward pass does what no plan does, such as to append to a list that it was given.
    ValueError and TypeError are the module's own.
    """
    # a module that is compiled may be planned in its first call
    run = _uncompiled if "torch._dynamo" in sys.modules else _record
    call = module, args, kwargs, forward or module, earlier
    by_device, drawn = casts(), states()
    context = copy_context()  # in whose variables no tensor without numbers is left
    try:
        found = context.run(run, *call, by_device)
    except ByDevice:
        by_device, context = True, copy_context()
        found = context.run(run, *call, by_device)
    if states() != drawn:  # this thread may have drawn, or another
        context = copy_context()
        found = context.run(run, *call, by_device, draws=False)
    refuse_shown(found)
    return found


@torch._disable_dynamo
def _uncompiled(*args: Any, **kwargs: Any) -> Recording:
    """`_record`, in which what the module has compiled runs as it was written."""
    with torch.compiler.set_stance("force_eager"):
        return _record(*args, **kwargs)


def _record(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    forward: Callable,
    earlier: Recording | None,
    by_device: bool,
    draws: bool = True,  # may generators of the host be asked; False: PlanError
) -> Recording:
    leaves, spec = flatten((args, kwargs))
    differentiable = torch.is_grad_enabled()
    refuse_parts(module)
    with ExitStack() as stack:
        state = stack.enter_context(State(module))
        # in inference mode PyTorch takes nothing apart, and writes in place
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(differentiable))
        if is_rehearsal():
            stack.enter_context(as_with_gpu())
        fakes = FakeTensorMode(allow_non_fake_inputs=True) if by_device else None
        place = _place_of(module, leaves)
        shapes = Shapes(stack.enter_context(fakes) if by_device else None, place)
        states = [
            {name: shapes.of(x) for name, x in named()}
            for named in (module.named_parameters, module.named_buffers)
        ]
        inputs = [shapes.of(x) if isinstance(x, Tensor) else x for x in leaves]
        found = Recording(inputs, *states, differentiable)
        refuse_silent_hooks(module, found.calls)
        notes, places = Notes(module, found, shapes), places_of(module)
        if earlier is not None:
            # its tables have numbers here as well, of which some calls are made at once
            numbers = {id(twin): x for twin, x in earlier.constants}
            found.last = state.begin(earlier.left, lambda x: numbers.get(id(x), shapes.of(x)))
            state = State(module)
        made, result_spec = [], None

        def run(given: dict[int, Tensor], states: dict[str, Tensor]) -> dict[int, Tensor]:
            nonlocal made, result_spec  # since functionalization's trees make a tuple of a shape
            leaves = [given.get(i, x) for i, x in enumerate(inputs)]
            notes.states = {id(x): name for name, x in states.items()}
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            states = {place: states[name] for place, name in places.items()}
            before = dict(states)
            with (
                stateless._reparametrize_module(module, states),
                Functions(notes) as functions,
                noted_by(functions.own),
                without_hints(),
                parametrized_anew(),
                nullcontext() if draws else refused(notes.lines.of),
            ):
                result = forward(*args, **kwargs)
            found.left, found.beside = state.changes(functions.inner)
            found.made = functions.forget()
            refuse_replaced(before, states)  # in which the call leaves what is there behind it
            refuse_changes(leaves, spec, (args, kwargs))
            made, result_spec = flatten(result)
            return _tensors_of(made)

        with notes:
            try:
                tensors = torch.func.functionalize(run)(_tensors_of(inputs), states[0] | states[1])
                made = [tensors.get(i, x) for i, x in enumerate(made)]
                found.result = pytree.tree_unflatten(made, result_spec)
            except (ValueError, TypeError, PlanError, ByDevice):
                raise
            except Exception as error:
                what, where = type(module).__name__, notes.lines.of_error(error, sys._getframe())
                raise PlanError(f"{what} cannot be traced: {_reason(error)} ({where})") from error
    return found


def _tensors_of(leaves: list[Any]) -> dict[int, Tensor]:
    return {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}


def _place_of(module: nn.Module, leaves: list[Any]) -> Tensor | None:
    """A tensor where the arguments and the module's own are, in a rehearsal on a GPU; None: these
    are on several devices."""
    if is_rehearsal():
        return tensor_there()
    tensors = (x for x in leaves if isinstance(x, Tensor))
    devices = {x.device for x in (*tensors, *module.parameters(), *module.buffers())}
    return torch.empty(0, device=next(iter(devices), None)) if len(devices) < 2 else None


def _reason(error: Exception) -> str:
    """What PyTorch said, or what it meant."""
    text = str(error).strip()
    if "setup_context" in text:
        return "it calls an autograd.Function of PyTorch's, whose backward a trace does not see"
    return text.splitlines()[0] if text else type(error).__name__
