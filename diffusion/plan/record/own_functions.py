"""An autograd.Function that a module brings along, as one call of a recording.

Where its gradient is that of its forward (`own_gradients`), what it calls is recorded instead. A
plan calls any other function itself, forward in place of the module, and once more for its
gradient, as of other calls that are left to PyTorch. What it does within is not looked at, but for
draws.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils.checkpoint import CheckpointFunction

from triton_kernels.runtime.device import is_rehearsal

from ..graph import PlanError
from .own_checkpoints import checkpointed, is_function


class OwnFunction:
    """A function, named as an op of PyTorch is."""

    namespace, tags = "autograd", ()

    def __init__(
        self, function: type[Function], dtypes: list[torch.dtype], written: list[int]
    ) -> None:
        self.overloadpacket, self.casts = function, autocasts()
        self.dtypes = dtypes  # of its results
        self.written = written  # of its arguments
        self._opname, self._overloadname = function.__name__, ""
        # which may be an argument, or a part of one
        returns = [SimpleNamespace(alias_info=True)] * len(dtypes)
        self._schema = SimpleNamespace(returns=returns, arguments=[], is_mutable=False)

    def __call__(self, *args: Any) -> Any:
        args = [x.clone() if i in self.written else x for i, x in enumerate(args)]
        with ExitStack() as stack:
            for kind, dtype in self.casts:
                kind = "cpu" if is_rehearsal() else kind
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            result = self.overloadpacket.apply(*args)
        if not is_rehearsal():
            return result
        # the host's autocast casts others
        made = [result] if isinstance(result, Tensor) else result
        made = [y.to(dtype) for y, dtype in zip(made, self.dtypes, strict=True)]
        return made[0] if isinstance(result, Tensor) else made


def autocasts() -> list[tuple[str, torch.dtype]]:
    """Where autocast casts, and to what. It does so in the forward of a function alone."""
    kinds = (kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    return [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]


class Context(SimpleNamespace):
    """What the forward of a function is given, while it is recorded."""

    dirty: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = self.to_save = tensors

    save_for_forward = save_for_backward

    def set_materialize_grads(self, value: bool) -> None:
        pass

    def mark_dirty(self, *tensors: Tensor) -> None:
        self.dirty = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        if any(x.is_floating_point() for x in tensors):
            raise PlanError("an autograd.Function marks a result, which a plan would differentiate")


def forward_of(function: type[Function], args: Sequence[Any]) -> tuple[Any, tuple[Tensor, ...]]:
    """What it returns, and the arguments that it says it has written to. PlanError: a plan could
    not call it."""
    if any(map(is_function, args)):
        raise PlanError(
            f"{function.__name__}, an autograd.Function that is given a function and has not its"
            " gradient, has no place in a plan (checkpoints have one)"
        )
    with torch.no_grad():
        return called(function, args)


def called(function: type[Function], args: Sequence[Any]) -> tuple[Any, tuple[Tensor, ...]]:
    """The same, with what it calls."""
    needs = tuple(isinstance(x, Tensor) and x.is_floating_point() for x in args)
    context = Context(needs_input_grad=needs)
    if function.setup_context == Function.setup_context:
        return function.forward(context, *args), context.dirty
    result = function.forward(*args)
    function.setup_context(context, args, result)
    return result, context.dirty


@contextmanager
def noted_by(note: Callable[[type[Function], tuple], Any]) -> Iterator[None]:
    """Within the block this thread's functions, but PyTorch's own, are not applied, but noted; what
    is checkpointed runs as it is, for a plan keeps what it needs."""
    applied, thread = Function.__dict__["apply"], threading.get_ident()

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        theirs = cls.__module__.split(".")[0] == "torch"
        if cls is CheckpointFunction and threading.get_ident() == thread:
            run, _, *given = args
            return run(*given)
        if kwargs or theirs or threading.get_ident() != thread:
            return applied.__get__(None, cls)(*args, **kwargs)
        run = checkpointed(cls, args)
        return note(cls, args) if run is None else run()

    Function.apply = classmethod(apply)
    try:
        yield
    finally:
        Function.apply = applied
