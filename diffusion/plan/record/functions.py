"""Sees what Python calls while a module is recorded, before PyTorch takes it apart.

Layers that are one op in a plan but several in PyTorch are noted as one (`_WHOLE`), others are
called in another way (`composites`), and what no plan does is refused."""

import re
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode

from ..graph import PlanError
from ..trees import tensors_in
from .composites import INSTEAD
from .known_numbers import known_numbers
from .notes import Notes, unwrapped
from .own_functions import OwnFunction, called, forward_of
from .own_gradients import is_of_forward
from .variables import note_code

_ATEN = torch.ops.aten
# Linear and matmul would be products of rearranged matrices, attention and dropout what PyTorch
# makes of them for one device; quantiles squeeze what they have sorted in place.
_WHOLE = {
    F.linear: _ATEN.linear.default,
    torch.matmul: _ATEN.matmul.default,
    Tensor.matmul: _ATEN.matmul.default,
    Tensor.__matmul__: _ATEN.matmul.default,
    F.scaled_dot_product_attention: _ATEN.scaled_dot_product_attention.default,
    F.dropout: _ATEN.dropout.default,
    F.one_hot: _ATEN.one_hot.default,
    torch.quantile: _ATEN.quantile.scalar,
    Tensor.quantile: _ATEN.quantile.scalar,
    torch.nanquantile: _ATEN.nanquantile.scalar,
    Tensor.nanquantile: _ATEN.nanquantile.scalar,
}
_OF_A_NUMBER = (_ATEN.quantile.scalar, _ATEN.nanquantile.scalar)
_READS = (Tensor.requires_grad.__get__, Tensor.grad_fn.__get__, Tensor.is_leaf.__get__)
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_TRANSFORMS = torch._C._functorch.TransformType
_INSTEAD = {Tensor.data.__get__: Tensor.detach}  # the former calls no op
_KINDS = "cpu cuda ipu maia meta mps mtia vulkan xla xpu".split()
_PLACES = {  # what asks where a tensor is
    Tensor.device.__get__,
    Tensor.get_device,
    *(getattr(Tensor, f"is_{kind}").__get__ for kind in _KINDS if hasattr(Tensor, f"is_{kind}")),
}
# names of what gives a tensor's numbers to Python, some of them as an array in the tensor's memory
_ARRAYS = frozenset(("numpy", "__array__"))
_GIVEN = _ARRAYS.union("item tolist __bool__ __int__ __float__ __index__".split())
_OF_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_WRITES = frozenset(  # names of what writes to its first argument, besides those that end in _
    f"__{name}__"
    for name in "setitem iadd isub imul idiv itruediv ifloordiv imod ipow iand ior ixor".split()
)


class ByDevice(Exception):
    """What is recorded depends on the tensors' device: the module is, or has begun a block, under
    autocast, or asks where they are and has them on several."""


def _functional(x: Tensor) -> Tensor:
    level = torch._C._functorch.peek_interpreter_stack().level()
    return torch._C._functorch._wrap_functional_tensor(x, level)


def _transform() -> torch._C._functorch.TransformType:
    """The transform of torch.func that a call is within: the recording's, or one of the module."""
    return torch._C._functorch.peek_interpreter_stack().key()


def casts() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


class Functions(TorchFunctionMode):
    """Within it PyTorch's functions are called as a recording needs them."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes
        self.around = sys._getframe(1).f_code
        self.detached: dict[int, Tensor] = {}  # by their memory
        self.blind: dict[int, Tensor] = {}  # likewise: made and written under `no_grad`
        # what was made without numbers, and how many calls were noted then
        self.made: list[tuple[weakref.ref[Tensor], int]] = []

    def forget(self) -> list[tuple[weakref.ref[Tensor], int]]:
        """`made`, of a forward pass that has ended: whose tensors are still there, others keep."""
        self.detached, self.blind = {}, {}
        return self.made

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, notes = kwargs or {}, self.notes
        if not notes.shapes.by_device and casts():
            raise ByDevice
        function = _INSTEAD.get(function, function)
        if notes.shapes.device is not None:
            if function in _PLACES and args[0].is_meta:
                return function(self._there())
            if function is not torch.device:
                function, args, kwargs = self._without_places(function, args, kwargs)
        result = self._noted(function, args, kwargs)
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and torch._is_functional_tensor(x):
                self.made.append((weakref.ref(x), len(notes.found.calls)))
        if not isinstance(result, torch.Size):  # which many ask for
            note_code(notes.found.code, sys._getframe(1), self.around)
        if isinstance(result, Tensor) and torch._is_functional_tensor(result):
            given = map(_memory, tensors_in((args, kwargs)))
            if not torch.is_grad_enabled() and _memory(result) not in given:
                self.blind[_memory(result)] = result
        return result

    def _noted(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        notes, name = self.notes, getattr(function, "__name__", "")
        self._refuse(function, name, args, kwargs)
        with notes.under(name):
            if function in INSTEAD:
                with self:
                    result = INSTEAD[function](*args, **kwargs)
                if result is not NotImplemented:
                    return result
            apart = notes.within or _transform() != _TRANSFORMS.Functionalize  # as by vmap
            target = None if apart else _WHOLE.get(function)
            if target in _OF_A_NUMBER and len(tensors_in((args, kwargs))) > 1:
                target = target.overloadpacket.default
            arguments = target and self._arguments(target, args, kwargs)
            if not arguments:
                if function in (Tensor.__getitem__, Tensor.__setitem__):
                    args = (args[0], _with_tensors(args[1]), *args[2:])
                if not notes.shapes.by_device:
                    function, args, kwargs = _of_numbers(function, args, kwargs)
                result = self._called(function, name, args, kwargs)
                if name == "detach":
                    self.detached[_memory(result)] = result
                self._note_rewritten(_written_by(name, args, kwargs))
                return result
            given, named = pytree.tree_map_only(Tensor, self.inner, arguments)
            args, kwargs = pytree.tree_map_only(Tensor, self._functional, (args, kwargs))
            with notes.whole():
                result = function(*args, **kwargs)
            made = self.inner(result)
            notes.note(target, given, named, made)
            # of which views may be written to: what it is a view of was not noted
            return result if any(made is x for x in tensors_in(given)) else _functional(made)

    def _there(self) -> Tensor:
        """A tensor where the module has those that it asks: on another device it may do something
        else."""
        if self.notes.shapes.there is None:
            raise ByDevice
        return self.notes.shapes.there

    def _without_places(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """The call with the recording's device in place of that of the module's tensors."""
        if function in (Tensor.cpu, Tensor.cuda) and len(args) == 1 and not kwargs:
            function, args = Tensor.to, (args[0], function.__name__)

        def placed(x: Any) -> Any:
            if not isinstance(x, torch.device) and not _names_device(x):
                return x
            named, there = torch.device(x), self._there().device
            same = named.type == there.type and named.index in (None, there.index)
            return self.notes.shapes.device if same else x

        if "device" in kwargs:
            kwargs = {**kwargs, "device": placed(kwargs["device"])}
        return function, tuple(map(placed, args)), kwargs

    def own(self, function: type, args: tuple) -> Any:
        """The result of an autograd.Function, which is noted as one call unless its gradient is
        that of its forward."""
        notes = self.notes
        if is_of_forward(function, args):
            return called(function, args)[0]
        with torch._C.DisableTorchFunction():  # what is read here is not the forward's
            given = pytree.tree_map_only(Tensor, self.inner, args)
            theirs = pytree.tree_map_only(Tensor, self._functional, args)
            with notes.whole():
                copies = [x.clone() if isinstance(x, Tensor) else x for x in theirs]
            before = pytree.tree_map_only(Tensor, self.inner, copies)
        notes.own = True
        try:
            with notes.whole():
                result, dirty = forward_of(function, copies)
        finally:
            notes.own = False
        made = [result] if isinstance(result, Tensor) else result
        if not isinstance(made, list | tuple) or not all(isinstance(x, Tensor) for x in made):
            raise self._refused(f"{function.__name__}, whose results are not all tensors,")
        with torch._C.DisableTorchFunction():
            inner = pytree.tree_map_only(Tensor, self.inner, result)
            behind = pytree.tree_map_only(Tensor, self.inner, copies)
        written = [i for i, (a, b) in enumerate(zip(before, behind, strict=True)) if a is not b]
        returned = {i: next((y for y in made if y is copies[i]), None) for i in written}
        if None in returned.values() or not all(
            any(copies[i] is x for x in dirty) for i in written
        ):
            raise self._refused(f"{function.__name__}, which writes to what it does not return,")
        dtypes = [y.dtype for y in made]
        with notes.under(function.__name__):
            notes.note(OwnFunction(function, dtypes, written), given, {}, inner)
        for i, y in returned.items():
            args[i].copy_(y)
        theirs = {id(copies[i]): args[i] for i in written}
        return pytree.tree_map_only(Tensor, lambda y: theirs.get(id(y), y), result)

    def _called(self, function: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Its result. PlanError: it would need the numbers of a tensor that has none."""
        try:
            if name in _ARRAYS and torch._is_functional_tensor(args[0]):
                raise DataDependentOutputException(name)
            return function(*args, **kwargs)
        except RuntimeError as error:
            if name not in _GIVEN and not _wants_numbers(error):
                raise
            if name in _GIVEN:
                numbers = known_numbers(self.inner(args[0]), self.notes.found)
                if numbers is not None:
                    return getattr(numbers, name)(*args[1:], **kwargs)
            why = f"{name} of a tensor, whose numbers are not known before the call,"
            instead = "use torch.where, give what it decides, or accelerate parts that do not ask"
            raise self._refused(why, instead) from error

    def _refuse(self, function: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """What a recording does not see: which tensors have gradients, and one that keeps its
        gradient while its numbers are written to."""
        if _transform() in (_TRANSFORMS.Grad, _TRANSFORMS.Jvp):
            why = "a gradient by torch.func, which the forward takes,"
            raise self._refused(why, "take gradients of its results")
        if function in _READS:
            why = f"{function.__self__.__name__} of a tensor, which the forward reads,"
            raise self._refused(why, "let an argument decide")
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # slower than PyTorch's as one
            why = f"{name}, which would be a node for each step of a sequence,"
            raise self._refused(why, "accelerate the modules beside it")
        if function in _GRADIENTS:
            raise self._refused(
                f"{name}, which the forward calls,", "take gradients of its results"
            )
        if function == Tensor.data.__set__:
            raise self._refused("data of a tensor, which the forward sets,", "use `copy_`")
        written = _written_by(name, args, kwargs)
        if isinstance(written, Tensor) and torch._is_functional_tensor(written):
            given = self.notes.given.get(id(unwrapped(written)))
            if self._is_state(written) and not name.startswith("requires_grad"):
                return
            if given and not name.startswith("requires_grad"):
                line = self.notes.lines.of(sys._getframe(1))
                raise PlanError(f"the module changes {given} in its forward ({line})")
        elif isinstance(written, Tensor) and not name.startswith("requires_grad"):
            raise self._refused(f"{name} of a tensor with numbers, which the forward writes to,")
        if not self.notes.found.differentiable:
            return
        if name == "requires_grad_" or function == Tensor.requires_grad.__set__:
            why = "requires_grad of a tensor, which the forward sets,"
            raise self._refused(why, "set it before the call, and take gradients of its results")
        if name == "detach_" or not isinstance(written, Tensor) or self.notes.own:
            return
        if not (written.is_floating_point() or written.is_complex()):
            return
        memory = _memory(written)
        if not torch.is_grad_enabled():
            if memory not in self.blind:
                raise self._refused(f"{name} under no_grad")
            return
        self.blind.pop(memory, None)
        if memory in self.detached:
            why = f"{name} of what has been detached, or is called .data,"
            raise self._refused(why, "write to the tensor itself")

    def _is_state(self, x: Tensor) -> bool:
        """Whether it is a buffer, or a parameter where no gradient is recorded: a plan writes to
        these behind the call."""
        name = self.notes.states.get(id(x))
        return name in self.notes.found.buffers or bool(name) and not torch.is_grad_enabled()

    def _note_rewritten(self, written: Tensor | None) -> None:
        """A parameter that has other numbers now, whose gradient is that of these."""
        found, name = self.notes.found, self.notes.states.get(id(written))
        if name in found.parameters:
            found.rewritten[id(self.inner(written))] = name

    def _refused(self, why: str, instead: str = "") -> PlanError:
        line = self.notes.lines.of(sys._getframe(1))
        instead = f"; {instead}" if instead else ""
        return PlanError(f"{why} has no place in a plan{instead} ({line})")

    def _functional(self, x: Tensor) -> Tensor:
        """x, or for a tensor that has numbers one that is traced as those are that have none, since
        PyTorch's functionalization takes either, and some ops not both."""
        inner = self.inner(x)
        if torch._is_functional_tensor(x) and inner is unwrapped(x):
            return x
        return _functional(inner)

    def inner(self, x: Tensor) -> Tensor:
        """What a functional tensor stands for now."""
        if torch._is_functional_tensor(x):
            torch._sync(x)
            x = unwrapped(x)
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


def _memory(x: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return x.untyped_storage()._cdata


def _wants_numbers(error: RuntimeError) -> bool:
    """Whether PyTorch says that it needs the numbers of a tensor that has none, and not that
    somebody's op has no shapes."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    op = re.match(r"(\w+)::(\w+)", str(error))
    if op is None:
        return re.search("meta tensor|nonzero", str(error)) is not None
    packet = getattr(getattr(torch.ops, op[1]), op[2])
    return any(_OF_NUMBERS & set(getattr(packet, name).tags) for name in packet.overloads())


def _names_device(x: Any) -> bool:
    return isinstance(x, str) and x.partition(":")[0] in _KINDS


def _written_by(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The tensor to which a call of this name writes."""
    writes = name in _WRITES or (name.endswith("_") and not name.startswith("_"))
    return kwargs.get("out", args[0] if writes and args else None)


def _with_tensors(index: Any, each: bool = True) -> Any:
    """An index whose lists of numbers are tensors, which the recording sees; of a tuple, those of
    each dimension."""
    if isinstance(index, tuple) and each:
        return tuple(_with_tensors(i, each=False) for i in index)
    numbers = list(index) if isinstance(index, list | tuple | range) else []
    if numbers and all(isinstance(i, int) for i in pytree.tree_leaves(numbers)):
        return torch.tensor(numbers)
    return index


def _of_numbers(function: Any, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """A call that makes a tensor of numbers, without its device, on which they would be lost."""
    if function == Tensor.new_tensor:
        function, dtype = torch.tensor, kwargs.get("dtype") or args[0].dtype
        args, kwargs = args[1:], kwargs | {"dtype": dtype}
    if function in (torch.tensor, torch.as_tensor, torch.asarray):
        data = kwargs.get("data", args[:1])
        if not tensors_in(data):
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
