"""Makes launchers ops of PyTorch, torch.ops.triton_kernels.NAME: one node in a torch.compile graph.
An op has

    a schema           taken from the annotations of its implementation
    an implementation  launches kernels; its results share no memory with its arguments, and
                       arguments that it changes in place are named
    a fake             shapes, dtypes and strides of the results, for tracing
    a derivative       an autograd.Function around the op; without one, results have no gradient.
                       Its backward is `once_differentiable`

Kernels are launched on the GPU of the tensors, even if it is not the current one (1.3 us more).

This replaces torch.library.custom_op and register_autograd, with one difference: without tracing or
dispatch modes, a call does not pass PyTorch's dispatcher. A custom_op takes 26 us of host time, and
56 us with its backward, beyond a plain autograd.Function; this takes 3 us and 9 us (one CPU, an op
without kernels).
"""

import inspect
import sys
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor
from torch.autograd import Function

_library = torch.library.Library("triton_kernels", "FRAGMENT")
_PLAIN = (Tensor, torch.nn.Parameter)


class Op:
    """A registered op, to be called with positional arguments; `op` and `derivative` make it."""

    def __init__(self, overload: torch._ops.OpOverload, implementation: Callable) -> None:
        self.overload = overload
        self.implementation = implementation
        self.direct = implementation  # or the derivative, which calls `below_autograd`

    def __call__(self, *args):
        return self.overload(*args) if is_traced(args) else self.direct(*args)

    def below_autograd(self, *args):
        """The op without its derivative, for that derivative's forward."""
        if not is_traced(args):
            return self.implementation(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return self.overload(*args)


def is_traced(args: tuple) -> bool:
    """Whether anybody but autograd has to see the op: a compiler, a mode such as FakeTensorMode,
    the subclass that a tensor has, or the device "meta", which has shapes alone."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or any(isinstance(a, Tensor) and (type(a) not in _PLAIN or a.is_meta) for a in args)
    )


def op(
    name: str,
    fake: Callable,
    *,
    differentiable: bool = False,
    mutates: tuple[str, ...] = (),
) -> Callable[[Callable], Op]:
    """Decorator of an implementation, which becomes the op."""

    def register(implementation: Callable) -> Op:
        schema = torch.library.infer_schema(implementation, mutates_args=mutates)
        # strides are checked when a graph is traced, so they have to be the same when it runs
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        _library.define(name + schema, tags=tags)
        implementation = _where_tensors_are(implementation)
        hidden = torch._disable_dynamo(implementation)

        def launch(*args):
            # Dynamo is not to look inside. Telling it loads it, and that takes two seconds.
            return hidden(*args) if "torch._dynamo" in sys.modules else implementation(*args)

        _library.impl(name, launch, "CompositeExplicitAutograd")
        torch.library.register_fake(f"triton_kernels::{name}", fake, lib=_library)
        if not differentiable:
            _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        return Op(getattr(torch.ops.triton_kernels, name).default, implementation)

    return register


def _where_tensors_are(implementation: Callable) -> Callable:
    """The same on the device of its tensors, as PyTorch's own ops are: Triton launches on the
    current one. Raises ValueError if tensors are on several."""
    names = tuple(inspect.signature(implementation).parameters)

    @wraps(implementation)
    def run(*args):
        device = None
        for i, a in enumerate(args):
            if isinstance(a, Tensor):
                if device is None:
                    device, first = a.device, names[i]
                elif a.device != device:
                    raise ValueError(
                        f"{names[i]} is on {a.device}; expected {device}, where {first} is"
                    )
        if device.type != "cuda" or device.index == torch._C._cuda_getDevice():
            return implementation(*args)
        with torch.cuda.device(device):
            return implementation(*args)

    return run


def derivative(of: Op) -> Callable[[type[Function]], type[Function]]:
    """Decorator of the autograd.Function that is run in place of a differentiable op; its forward
    calls `of.below_autograd`."""

    def register(function: type[Function]) -> type[Function]:
        _library.impl(of.overload, function.apply, "Autograd")
        of.direct = function.apply
        return function

    return register


_NO_SECOND = (
    b"this gradient cannot be differentiated again (create_graph=True, as for a gradient penalty):"
    b" no kernel and no plan computes second derivatives. The layers of backend=torch have them,"
    b" and so has a module without accelerate"
)


def once_differentiable(backward: Callable) -> Callable:
    """Decorator of the backward of an autograd.Function whose gradients have no derivative: under
    create_graph=True they raise where somebody differentiates them, by whatever `backward` reads:
    incoming gradients, and tensors that it has saved.

    PyTorch's decorator of this name returns constants instead if the incoming gradient is one, as
    that of y.sum() is, and a gradient penalty has no effect without a word. By what its gradients
    are not made of, autograd does not differentiate, and torch.autograd.functional takes zeros."""

    @wraps(backward)
    def once(ctx, *dys):
        with torch.no_grad():
            grads = backward(ctx, *dys)
        if not torch.is_grad_enabled():
            return grads
        grads = grads if isinstance(grads, tuple) else (grads,)
        aliases = [None if g is None else g.detach().requires_grad_() for g in grads]
        made_of = *aliases, *dys, *ctx.saved_tensors
        return torch._C._functions.DelayedError(_NO_SECOND, len(made_of))(*made_of)[: len(grads)]

    return once
