"""What a module calls: it is run once over tensors that have shapes and dtypes and no numbers, and
every call of PyTorch that reaches a kernel is noted, with the line that it came from.

Functionalization turns what changes a tensor in place into what makes a new one. Layers that a
plan has as one op, and PyTorch as several, are noted whole (`_WHOLE`).
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import triton_kernels

from .graph import PlanError

_ATEN = torch.ops.aten
# Linear and matmul would be products of rearranged matrices, attention and dropout what PyTorch
# makes of them for one device.
_WHOLE = {
    F.linear: _ATEN.linear.default,
    torch.matmul: _ATEN.matmul.default,
    Tensor.matmul: _ATEN.matmul.default,
    Tensor.__matmul__: _ATEN.matmul.default,
    F.scaled_dot_product_attention: _ATEN.scaled_dot_product_attention.default,
    F.dropout: _ATEN.dropout.default,
    F.one_hot: _ATEN.one_hot.default,
}
_PASSED = tuple(  # files there are between a module and PyTorch
    os.path.dirname(file) + os.sep for file in (torch.__file__, triton_kernels.__file__, __file__)
)


@dataclass
class Call:
    """One call of PyTorch. Tensors are known by their `id`."""

    target: torch._ops.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    result: Any  # a tensor, or several
    function: str  # what Python called, such as fft_rfft
    source: str  # the line, and the module that the line was run for


@dataclass
class Recording:
    """All calls in their order, and the tensors that they start from. Every tensor is alive, so
    that no two have one `id`."""

    inputs: list[Tensor | Any]  # leaves of (args, kwargs)
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    calls: list[Call] = field(default_factory=list)
    constants: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # in place of which
    result: Any = None


def record(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Recording:
    """What module(*args, **kwargs) calls. Tensors of the recording are on the `meta` device; under
    autocast, also of the module's own, they say that they are on that of the arguments, on which
    its casts depend. What the module keeps of the call in its attributes is forgotten.

    PlanError: the forward pass writes to a parameter, a buffer or an argument, or depends on
    numbers that are not known before. ValueError and TypeError are the module's own.
    """
    try:
        return _record(module, args, kwargs, by_device=_casts())
    except _Casts:
        return _record(module, args, kwargs, by_device=True)


def _record(module: nn.Module, args: tuple, kwargs: dict[str, Any], by_device: bool) -> Recording:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    with ExitStack() as stack:
        stack.enter_context(_attributes_kept(module))
        # in inference mode PyTorch takes nothing apart, and writes in place
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        shapes = _FakeShapes(stack) if by_device else _MetaShapes()
        states = [
            {name: shapes.of(x) for name, x in named()}
            for named in (module.named_parameters, module.named_buffers)
        ]
        inputs = [shapes.of(x) if isinstance(x, Tensor) else x for x in leaves]
        found = Recording(inputs, *states)
        notes = _Notes(module, found, shapes)

        def run(inputs: list, states: dict[str, Tensor]) -> Any:
            args, kwargs = pytree.tree_unflatten(inputs, spec)
            with _Functions(notes):
                return torch.func.functional_call(module, states, args, kwargs)

        with notes:
            try:
                found.result = torch.func.functionalize(run)(inputs, states[0] | states[1])
            except (ValueError, TypeError, PlanError, _Casts):
                raise
            except Exception as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                name = type(module).__name__
                raise PlanError(f"{name} cannot be traced: {lines[0]}") from error
    return found


class _Casts(Exception):
    """The module is, or has begun a block, under autocast."""


def _casts() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Behind the block attributes are what they were: a module may keep tensors from call to call,
    and those of a recording have no numbers."""
    before = [(part, dict(vars(part))) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


class _MetaShapes:
    """Tensors of the meta device."""

    by_device = False

    def of(self, x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    def has(self, x: Tensor) -> bool:
        return x.device.type == "meta"


class _FakeShapes:
    """Tensors of the meta device that say that they are on another."""

    by_device = True

    def __init__(self, stack: ExitStack) -> None:
        self.mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))

    def of(self, x: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    def has(self, x: Tensor) -> bool:
        return isinstance(x, torch._subclasses.FakeTensor)


class _Notes(TorchDispatchMode):
    """Notes every call that comes out of functionalization."""

    def __init__(self, module: nn.Module, found: Recording, shapes: Any) -> None:
        super().__init__()
        self.found, self.shapes = found, shapes
        self.names = {id(part): name for name, part in module.named_modules()}
        self.given = {id(x): f"its argument {i}" for i, x in enumerate(found.inputs)}
        states = found.parameters | found.buffers
        self.given |= {id(x): name for name, x in states.items()}
        self.twins: dict[int, Tensor] = {}  # of constants, by their ids
        self.function = ""  # the one that Python called
        self.within = False  # a call that is noted whole

    def __torch_dispatch__(self, target, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(Tensor, self.shaped, (args, kwargs or {}))
        if target is _ATEN.copy_.default and id(args[0]) in self.given:
            raise PlanError(f"the module changes {self.given[id(args[0])]} in its forward")
        result = target(*args, **kwargs)
        if not self.within and isinstance(result, Tensor | list | tuple):
            self.note(target, args, kwargs, result)
        return result

    def shaped(self, x: Tensor) -> Tensor:
        """x, or in place of a constant a tensor without its numbers."""
        if self.shapes.has(x):
            return x
        if id(x) not in self.twins:
            self.twins[id(x)] = self.shapes.of(x)
            self.found.constants.append((self.twins[id(x)], x))
        return self.twins[id(x)]

    def note(self, target: Any, args: tuple, kwargs: dict, result: Any) -> None:
        source = self._source(sys._getframe(2))
        self.found.calls.append(Call(target, args, kwargs, result, self.function, source))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What is called within is not noted."""
        before, self.within = self.within, True
        try:
            yield
        finally:
            self.within = before

    def _source(self, frame: FrameType | None) -> str:
        """The innermost line that is neither PyTorch's nor ours, and the innermost module."""
        place = name = ""
        while frame is not None and not (place and name):
            file = frame.f_code.co_filename
            if not place and not file.startswith(_PASSED):
                place = f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}"
            if not name and frame.f_code.co_varnames[:1] == ("self",):
                name = self.names.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back
        return f"{place or '?'} of {name}" if name else place or "?"


class _Functions(TorchFunctionMode):
    """Sees what Python calls before PyTorch takes it apart."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self.notes = notes

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, notes = kwargs or {}, self.notes
        if not notes.shapes.by_device and _casts():
            raise _Casts
        name = getattr(function, "__name__", "")
        before, notes.function = notes.function, name
        try:
            target = None if notes.within else _WHOLE.get(function)
            arguments = target and _arguments(target, args, kwargs)
            if not arguments:
                return function(*args, **kwargs)
            given, named = pytree.tree_map_only(Tensor, self._inner, arguments)
            with notes.whole():
                result = function(*args, **kwargs)
            notes.note(target, given, named, self._inner(result))
            return result
        finally:
            notes.function = before

    def _inner(self, x: Tensor) -> Tensor:
        """What a functional tensor stands for now."""
        if torch._is_functional_tensor(x):
            torch._sync(x)
            x = torch._C._functorch._unwrap_functional_tensor(x, True)
        return self.notes.shaped(x)


def _arguments(target: Any, args: Sequence, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    """As the op's schema has them; None: the call says more than the op can."""
    schema = target._schema.arguments
    names = [a.name for a in schema if not a.kwarg_only]
    kwargs = dict(kwargs)
    if target is _ATEN.dropout.default:  # of torch.nn.functional: p, training, inplace
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
        if given.pop("inplace", False):
            return None
        return (given["input"], given.get("p", 0.5), given.get("training", True)), {}
    if "tensor" in kwargs:  # as torch.nn.functional.one_hot calls it
        kwargs["self"] = kwargs.pop("tensor")
    given = dict(zip(names, args, strict=False)) | kwargs
    positional = []
    for argument in schema:
        if argument.kwarg_only:
            continue
        if argument.name not in given and not argument.has_default_value():
            return None
        positional.append(given.pop(argument.name, argument.default_value))
    return tuple(positional), given
