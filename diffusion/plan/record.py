"""Records what a module calls: it runs once over tensors with shapes and dtypes but no numbers, and
every PyTorch call that reaches a kernel is recorded with its source line.

Functionalization turns in-place changes of a tensor into new tensors. Layers that are one op in a
plan but several in PyTorch are recorded as one (`_WHOLE`).
"""

import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import triton_kernels

from .composites import INSTEAD
from .draws import is_draw, refused, states
from .graph import PlanError
from .own_functions import OwnFunction, forward_of, noted_by
from .results import known_result
from .trees import flatten

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
_READS = (Tensor.requires_grad.__get__, Tensor.grad_fn.__get__, Tensor.is_leaf.__get__)
_INSTEAD = {Tensor.data.__get__: Tensor.detach}  # the former calls no op
_NUMBERS = frozenset(  # names of what has to know a tensor's numbers
    "item tolist numpy __bool__ __int__ __float__ __index__ nonzero argwhere unique bincount"
    " masked_select".split()
)
_WRITES = frozenset(  # names of what writes to its first argument, besides those that end in _
    f"__{name}__"
    for name in "setitem iadd isub imul idiv itruediv ifloordiv imod ipow iand ior ixor".split()
)
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
    differentiable: bool  # False: gradients are recorded around the module, but not here


@dataclass
class Recording:
    """All calls in their order, and the tensors that they start from. Every tensor is alive, so
    that no two have one `id`."""

    inputs: list[Tensor | Any]  # leaves of (args, kwargs)
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    differentiable: bool  # whether gradients are recorded, where the module is called
    calls: list[Call] = field(default_factory=list)
    constants: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # in place of which
    written: dict[str, Tensor] = field(default_factory=dict)  # buffers, and what they are behind it
    result: Any = None


def record(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], forward: Callable | None = None
) -> Recording:
    """What module(*args, **kwargs) calls, or a function of the module in its place. Tensors of the
    recording are on the `meta` device; under autocast, also of the module's own, they say that they
    are on that of the arguments, on which its casts depend. What the module keeps of the call in
    its attributes is forgotten.

    PlanError: the forward pass writes to a parameter or an argument, depends on numbers
    that are not known before, asks which tensors have gradients, or has gradients of its own: of
    tensors that are no parameters, through hooks, or by writing where none are recorded; or a hook
    or the forward pass does what no plan does, such as to append to a list that it was given.
    ValueError and TypeError are the module's own.
    """
    # a module that is compiled may be planned in its first call
    run = torch._disable_dynamo(_record) if "torch._dynamo" in sys.modules else _record
    call, by_device, before = (module, args, kwargs, forward or module), _casts(), states()
    try:
        found = run(*call, by_device)
    except _ByDevice:
        by_device = True
        found = run(*call, by_device)
    # this thread may have drawn, or another
    return found if states() == before else run(*call, by_device, draws=False)


def _record(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    forward: Callable,
    by_device: bool,
    draws: bool = True,  # may generators of the host be asked; False: PlanError
) -> Recording:
    leaves, spec = flatten((args, kwargs))
    differentiable = torch.is_grad_enabled()
    _refuse_parts(module)
    with ExitStack() as stack:
        stack.enter_context(_attributes_kept(module))
        _refuse_silent_hooks(module)
        # in inference mode PyTorch takes nothing apart, and writes in place
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(differentiable))
        fakes = FakeTensorMode(allow_non_fake_inputs=True) if by_device else None
        shapes = _Shapes(stack.enter_context(fakes) if by_device else None)
        states = [
            {name: shapes.of(x) for name, x in named()}
            for named in (module.named_parameters, module.named_buffers)
        ]
        inputs = [shapes.of(x) if isinstance(x, Tensor) else x for x in leaves]
        found = Recording(inputs, *states, differentiable)
        notes, places = _Notes(module, found, shapes), _places(module)
        made, result_spec = [], None

        def run(given: dict[int, Tensor], states: dict[str, Tensor]) -> dict[int, Tensor]:
            nonlocal made, result_spec  # since functionalization's trees make a tuple of a shape
            leaves = [given.get(i, x) for i, x in enumerate(inputs)]
            notes.kept = {id(states[name]) for name in found.buffers}
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            states = {place: states[name] for place, name in places.items()}
            before = dict(states)
            with (
                stateless._reparametrize_module(module, states),
                _Functions(notes) as functions,
                noted_by(functions.own),
                nullcontext() if draws else refused(notes.line_at),
            ):
                result = forward(*args, **kwargs)
            for place, x in before.items():  # in which the call leaves what is there behind it
                if states[place] is not x:
                    raise PlanError(f"the module sets {place} in its forward")
            _refuse_changes(leaves, spec, (args, kwargs))
            made, result_spec = flatten(result)
            return _tensors_of(made)

        with notes:
            try:
                tensors = torch.func.functionalize(run)(_tensors_of(inputs), states[0] | states[1])
                if not by_device and any(_is_meta(x) for x in made):
                    raise _ByDevice
                made = [tensors.get(i, x) for i, x in enumerate(made)]
                found.result = pytree.tree_unflatten(made, result_spec)
            except (ValueError, TypeError, PlanError, _ByDevice):
                raise
            except Exception as error:
                why = f"{type(module).__name__} cannot be traced: {_reason(error)}"
                raise PlanError(f"{why} ({notes.line_of(error)})") from error
    return found


def _tensors_of(leaves: list[Any]) -> dict[int, Tensor]:
    return {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}


def _is_meta(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == "meta"


def _reason(error: Exception) -> str:
    """What PyTorch said, or what it meant."""
    text = str(error).strip()
    if "setup_context" in text:
        return (
            "it calls an autograd.Function, whose backward a trace does not see"
            " (torch.utils.checkpoint has none with use_reentrant=False)"
        )
    return text.splitlines()[0] if text else type(error).__name__


def _places(module: nn.Module) -> dict[str, str]:
    """Where tensors of the module's states are, and under which name each comes: a tensor may be of
    several parts, and a part, which is here once, of several others."""
    first = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
    every = (
        (f"{name}." * bool(name) + key, x)
        for name, part in module.named_modules()
        for key, x in (part._parameters | part._buffers).items()
    )
    return {place: first[id(x)] for place, x in every if x is not None}


def _refuse_changes(leaves: list[Any], spec: pytree.TreeSpec, given: tuple) -> None:
    """Of a list or a dict among the arguments, which the caller has again behind the call."""
    now, spec_now = flatten(given)
    if spec_now != spec or any(a is not b for a, b in zip(now, leaves, strict=True)):
        raise PlanError("the module changes a list, a dict or a dataclass among its arguments")


def _refuse_parts(module: nn.Module) -> None:
    for name, part in module.named_modules():
        where = name or type(part).__name__
        if isinstance(part, torch.jit.ScriptModule):
            raise PlanError(
                f"a module of TorchScript, which hides its calls, has no plan ({where})"
            )
        if part._backward_hooks or part._backward_pre_hooks:
            raise PlanError(f"a backward hook has no place in a plan ({where} has one)")


def _refuse_silent_hooks(module: nn.Module) -> None:
    """Until attributes are what they were: a forward hook that returns nothing keeps or prints what
    it gets, which it would get once, without numbers."""

    def heard(name: str, hook: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            if result is None:
                raise PlanError(
                    f"a forward hook that returns nothing has no place in a plan ({name})"
                )
            return result

        return call

    for name, part in module.named_modules():
        if part._forward_hooks:
            where = name or type(part).__name__
            hooks = ((key, heard(where, hook)) for key, hook in part._forward_hooks.items())
            vars(part)["_forward_hooks"] = OrderedDict(hooks)


class _ByDevice(Exception):
    """What is recorded depends on the tensors' device: the module is, or has begun a block, under
    autocast, or its result says where they are."""


def _casts() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Behind the block attributes, and what is in their dicts and lists, are what they were: a
    module may keep tensors from call to call, and those of a recording have no numbers."""
    before = [(part, dict(vars(part))) for part in module.modules()]
    inside: dict[int, tuple] = {}
    for _, attributes in before:
        _note_containers(attributes, inside)
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)
        for x, was in inside.values():
            if isinstance(x, dict) and not _same(list(x.items()), list(was.items())):
                x.clear()
                x.update(was)
            elif isinstance(x, list) and not _same(x, was):
                x[:] = was


def _same(a: list, b: list) -> bool:
    """Whether the same objects are in both."""
    a, b = (
        [id(y) for x in given for y in (x if isinstance(x, tuple) else (x,))] for given in (a, b)
    )
    return a == b


def _note_containers(x: dict | list, found: dict[int, tuple]) -> None:
    """The dicts and lists in it, and in these, with copies, by their ids."""
    for y in list(x.values() if isinstance(x, dict) else x):
        if isinstance(y, dict | list) and id(y) not in found:
            found[id(y)] = y, dict(y) if isinstance(y, dict) else list(y)
            _note_containers(y, found)


class _Shapes:
    """Tensors without numbers: of the meta device, or in a mode that lets them say that they are on
    another."""

    def __init__(self, mode: FakeTensorMode | None) -> None:
        self.mode, self.by_device = mode, mode is not None

    def of(self, x: Tensor) -> Tensor:
        device = x.device if self.by_device else "meta"
        with self.mode or nullcontext():
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    def has(self, x: Tensor) -> bool:
        fake = torch._subclasses.FakeTensor
        return isinstance(x, fake) if self.by_device else x.device.type == "meta"


class _Notes(TorchDispatchMode):
    """Notes every call that comes out of functionalization."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: PyTorch would import Dynamo to hide the mode from it; `record` does, if it is
        there."""
        return False

    def __init__(self, module: nn.Module, found: Recording, shapes: Any) -> None:
        super().__init__()
        self.found, self.shapes = found, shapes
        self.names = {id(part): name for name, part in module.named_modules()}
        self.given = {id(x): f"its argument {i}" for i, x in enumerate(found.inputs)}
        states = found.parameters | found.buffers
        self.given |= {id(x): name for name, x in states.items()}
        self.twins: dict[int, Tensor] = {}  # of constants, by their ids
        # ids of tensors that are views or have some, are constants, or come with the call
        self.shared: set[int] = set(self.given)
        self.kept: set[int] = set()  # ids of buffers, as the forward pass has them
        self.function = ""  # the one that Python called
        self.differentiable = found.differentiable  # whether its result has gradients
        self.within = False  # a call that is noted whole
        self.own = False  # and is a function of the module's own

    def __torch_dispatch__(self, target, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():  # by which `_Functions` would see what is read here
            return self._seen(target, args, kwargs or {})

    def _seen(self, target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._is_known(target, args, kwargs):
            if kwargs.get("device") == torch.device("meta"):  # the recording's: numbers stay
                kwargs = {k: v for k, v in kwargs.items() if k != "device"}
            with torch._C._DisableTorchDispatch():
                return target(*args, **kwargs)
        if self.own and torch.Tag.nondeterministic_seeded in target.tags:
            raise PlanError(f"{target} in an autograd.Function, which is called twice, draws twice")
        args, kwargs = pytree.tree_map_only(Tensor, self.shaped, (args, kwargs))
        if is_draw(target) and not self.shapes.by_device and _has_device(target):
            kwargs = {**kwargs, "device": torch.device("meta")}  # of the host's, no numbers either
        if target is _ATEN.copy_.default and id(args[0]) in self.given:
            # of what the forward pass has written to, once it is over
            name = self.given[id(args[0])]
            if name not in self.found.buffers:
                raise PlanError(f"the module changes {name} in its forward")
            self.found.written[name] = args[1]
            return args[0]
        result = None if self.shapes.by_device else known_result(target, args, kwargs)
        result = target(*args, **kwargs) if result is None else result
        if any(r.alias_info for r in target._schema.returns) or "view" in target._opname:
            same = isinstance(result, Tensor) and args and result is args[0]
            target = self._anew(target, result) if same else target
            if not same:
                leaves = pytree.tree_leaves((args, result))
                self.shared.update(id(x) for x in leaves if isinstance(x, Tensor))
        if not self.within and isinstance(result, Tensor | list | tuple):
            self.note(target, args, kwargs, result)
        return result

    def _is_known(self, target: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the call's result is the same in each call of the module, so that it is made now:
        of tensors with numbers alone, such as an array of numpy's."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fixed = not any(self.shapes.has(x) or x.requires_grad for x in tensors)
        drawn = torch.Tag.nondeterministic_seeded in target.tags
        return bool(tensors) and fixed and not drawn and not target._schema.is_mutable

    def shaped(self, x: Tensor) -> Tensor:
        """x, or in place of a constant a tensor without its numbers."""
        if self.shapes.has(x):
            return x
        if id(x) not in self.twins:
            if x.requires_grad:
                line = self._source(sys._getframe(1))
                raise PlanError(
                    f"a tensor {list(x.shape)} that requires a gradient, and is neither an argument"
                    f" nor a parameter of the module, has no place in a plan ({line})"
                )
            with self.whole():
                twin = self.shapes.of(x)
            if torch._is_functional_tensor(twin):  # made where functionalization sees it
                twin = _unwrapped(twin)
            self.twins[id(x)] = twin
            self.shared.add(id(twin))
            self.found.constants.append((self.twins[id(x)], x))
        return self.twins[id(x)]

    def _anew(self, target: torch._ops.OpOverload, written: Tensor) -> torch._ops.OpOverload:
        """In place of an op that writes to its first argument, as some ops of PyTorch do within,
        the op whose result is new, if nothing else sees what it writes."""
        if id(written) in self.shared or torch.Tag.inplace_view in target.tags:
            return target
        named = getattr(_ATEN, target._opname.removesuffix("_"), None)
        return getattr(named, target._overloadname, target)

    def note(self, target: Any, args: tuple, kwargs: dict, result: Any) -> None:
        source = self._source(sys._getframe(2))
        off = self.found.differentiable and not self.differentiable
        call = Call(target, args, kwargs, result, self.function, source, not off)
        self.found.calls.append(call)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What is called within is not noted."""
        before, self.within = self.within, True
        try:
            yield
        finally:
            self.within = before

    def _source(self, frame: FrameType) -> str:
        return self._line(traceback.walk_stack(frame))

    def line_at(self, frame: FrameType) -> str:
        """Of a call that was made there."""
        return self._source(frame)

    def line_of(self, error: Exception) -> str:
        """Where it was raised."""
        raised = reversed(list(traceback.walk_tb(error.__traceback__)))
        return self._line(chain(raised, traceback.walk_stack(sys._getframe(1))))

    def _line(self, frames: Iterable[tuple[FrameType, int]]) -> str:
        """The innermost line that is neither PyTorch's nor ours, and the innermost module."""
        place = name = ""
        for frame, line in frames:
            file = frame.f_code.co_filename
            if not place and not file.startswith(_PASSED):
                place = f"{'/'.join(file.split('/')[-2:])}:{line}"
            if not name and frame.f_code.co_varnames[:1] == ("self",):
                name = self.names.get(id(frame.f_locals.get("self")), "")
            if place and name:
                break
        return f"{place or '?'} of {name}" if name else place or "?"


def _has_device(target: torch._ops.OpOverload) -> bool:
    return any(argument.name == "device" for argument in target._schema.arguments)


def is_recording() -> bool:
    """Whether a module is recorded now, in this thread."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, _Notes) for mode in modes)


class _Functions(TorchFunctionMode):
    """Sees what Python calls before PyTorch takes it apart."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self.notes = notes
        self.detached: dict[int, Tensor] = {}  # by their memory

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, notes = kwargs or {}, self.notes
        if not notes.shapes.by_device and _casts():
            raise _ByDevice
        function = _INSTEAD.get(function, function)
        name = getattr(function, "__name__", "")
        self._refuse(function, name, args, kwargs)
        before = notes.function, notes.differentiable
        notes.function, notes.differentiable = name, torch.is_grad_enabled()
        try:
            if function in INSTEAD:
                with self:
                    result = INSTEAD[function](*args, **kwargs)
                if result is not NotImplemented:
                    return result
            target = None if notes.within else _WHOLE.get(function)
            arguments = target and self._arguments(target, args, kwargs)
            if not arguments:
                if function == Tensor.__getitem__:
                    args = (args[0], _with_tensors(args[1]))
                if not notes.shapes.by_device:
                    function, args, kwargs = _of_numbers(function, args, kwargs)
                result = self._called(function, name, args, kwargs)
                if name == "detach":
                    self.detached[result.untyped_storage()._cdata] = result
                return result
            given, named = pytree.tree_map_only(Tensor, self._inner, arguments)
            args, kwargs = pytree.tree_map_only(Tensor, self._functional, (args, kwargs))
            with notes.whole():
                result = function(*args, **kwargs)
            notes.note(target, given, named, self._inner(result))
            return result
        finally:
            notes.function, notes.differentiable = before

    def own(self, function: type, args: tuple) -> Any:
        """The result of an autograd.Function, which is noted as one call."""
        notes = self.notes
        if _casts():
            raise self._refused(f"{function.__name__}, an autograd.Function, under autocast")
        with torch._C.DisableTorchFunction():  # what is read here is not the forward's
            given = pytree.tree_map_only(Tensor, self._inner, args)
            args = pytree.tree_map_only(Tensor, self._functional, args)
        notes.own, before = True, notes.function
        try:
            with notes.whole():
                result = forward_of(function, args)
        finally:
            notes.own = False
        made = [result] if isinstance(result, Tensor) else result
        if not isinstance(made, list | tuple) or not all(isinstance(x, Tensor) for x in made):
            raise self._refused(f"{function.__name__}, whose results are not all tensors,")
        with torch._C.DisableTorchFunction():
            inner = pytree.tree_map_only(Tensor, self._inner, result)
        notes.function, was = function.__name__, notes.differentiable
        notes.differentiable = torch.is_grad_enabled()
        notes.note(OwnFunction(function, len(made)), given, {}, inner)
        notes.function, notes.differentiable = before, was
        return result

    def _called(self, function: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Its result. PlanError: it would need the numbers of a tensor that has none."""
        try:
            return function(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            by_mask = name == "__getitem__" and "nonzero" in str(error)
            if name not in _NUMBERS and not by_mask:
                raise
            why = f"{name} of a tensor, whose numbers are not known before the call,"
            raise self._refused(why) from error

    def _refuse(self, function: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """What a recording does not see: which tensors have gradients, and one that keeps its
        gradient while its numbers are written to."""
        if function in _READS:
            raise self._refused(
                f"{function.__self__.__name__} of a tensor, which the forward reads,"
            )
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # slower than PyTorch's as one
            raise self._refused(f"{name}, which would be a node for each step of a sequence,")
        if function == Tensor.data.__set__:
            raise self._refused("data of a tensor, which the forward sets,")
        writes = name in _WRITES or (name.endswith("_") and not name.startswith("_"))
        written = kwargs.get("out", args[0] if writes and args else None)
        if isinstance(written, Tensor) and torch._is_functional_tensor(written):
            given = self.notes.given.get(id(_unwrapped(written)))
            if id(written) in self.notes.kept and not name.startswith("requires_grad"):
                return
            if given and not name.startswith("requires_grad"):
                line = self.notes._source(sys._getframe(1))
                raise PlanError(f"the module changes {given} in its forward ({line})")
        elif isinstance(written, Tensor) and not name.startswith("requires_grad"):
            raise self._refused(f"{name} of a tensor with numbers, which the forward writes to,")
        if not self.notes.found.differentiable:
            return
        if name == "requires_grad_" or function == Tensor.requires_grad.__set__:
            raise self._refused("requires_grad of a tensor, which the forward sets,")
        if name == "detach_" or not isinstance(written, Tensor):
            return
        if not (written.is_floating_point() or written.is_complex()):
            return
        if not torch.is_grad_enabled():
            raise self._refused(f"{name} under no_grad")
        if written.untyped_storage()._cdata in self.detached:
            raise self._refused(f"{name} of what has been detached, or is called .data,")

    def _refused(self, why: str) -> PlanError:
        line = self.notes._source(sys._getframe(1))
        return PlanError(f"{why} has no place in a plan ({line})")

    def _functional(self, x: Tensor) -> Tensor:
        """x, or for a tensor that has numbers one that is traced as those are that have none, since
        PyTorch's functionalization takes either, and some ops not both."""
        inner = self._inner(x)
        if torch._is_functional_tensor(x) and inner is _unwrapped(x):
            return x
        level = torch._C._functorch.peek_interpreter_stack().level()
        return torch._C._functorch._wrap_functional_tensor(inner, level)

    def _inner(self, x: Tensor) -> Tensor:
        """What a functional tensor stands for now."""
        if torch._is_functional_tensor(x):
            torch._sync(x)
            x = _unwrapped(x)
        return self.notes.shaped(x)

    def _arguments(
        self, target: Any, args: Sequence, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict] | None:
        """As the op has them, by place and by name; None: the call says more than the op can."""
        if target is _ATEN.dropout.default:  # of torch.nn.functional: p, training, inplace
            given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            if given.get("inplace", False):  # which drops nothing, see `composites`
                return None
            return (given["input"], given.get("p", 0.5), given.get("training", True)), {}
        return _in_order(target, args, kwargs)


def _unwrapped(x: Tensor) -> Tensor:
    return torch._C._functorch._unwrap_functional_tensor(x, True)


def _with_tensors(index: Any) -> Any:
    """An index whose lists of numbers are tensors, which the recording sees."""
    if isinstance(index, tuple):
        return tuple(map(_with_tensors, index))
    is_list = isinstance(index, list) and index
    if is_list and all(isinstance(i, int) for i in pytree.tree_leaves(index)):
        return torch.tensor(index)
    return index


def _of_numbers(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """A call that makes a tensor of numbers, without its device, on which they would be lost."""
    if function == Tensor.new_tensor:
        function, dtype = torch.tensor, kwargs.get("dtype") or args[0].dtype
        args, kwargs = args[1:], kwargs | {"dtype": dtype}
    if function in (torch.tensor, torch.as_tensor, torch.asarray):
        data = kwargs.get("data", args[:1])
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves(data)):
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}
            args = args[:1] if function is torch.tensor else args[:2]  # the third is the device
    return function, args, kwargs


def _in_order(target: Any, args: Sequence, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    """In the order of the op's schema; None: one without a default is missing."""
    schema = target._schema.arguments
    names = [a.name for a in schema if not a.kwarg_only]
    kwargs = dict(kwargs)
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
