"""What a module reads of itself while it is recorded: a plan serves as long as that is the same.

A number of dropout, a hook, a layer that took another's place, or a switch of an adapter decides
what the forward pass computes, and no argument tells; so does a method or a number of a class that
somebody replaces, or a variable of a file or a closure that its code names. So the names that the
recording read are noted, with what is there, and compared in every call. Parameters and buffers are
not among them: a call reads them anew.
"""

import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, KeysView, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .record.contents import LARGE, contents, hidden_in
from .record.files import is_theirs
from .record.recording import Recording
from .record.variables import Code, names_in, variables_of
from .trees import state_of, version_of

_NOTHING = object()  # where no instance has the name: a method of the class, for example
_SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# and Python's modules, such as a backend's kernels, which hold thousands of names
_FIXED = (*_SIMPLE, type, FunctionType, MethodType, BuiltinFunctionType, nn.Module, ModuleType)
_LOOKED_INTO = (list, tuple, set, dict, OrderedDict)
_NOT_NOTED = frozenset(["__dict__", "__class__", "_parameters", "_buffers"])
_ONE = threading.Lock()  # thread at a time
Names = dict[tuple[int, str], nn.Module | None]  # None: written before it was read


@contextmanager
def reads_of() -> Iterator[Names]:
    """Notes which attributes of modules this thread reads within."""
    found, thread = {}, threading.get_ident()
    write = nn.Module.__setattr__

    def noted(name: str) -> bool:
        return threading.get_ident() == thread and name not in _NOT_NOTED

    def read(self: nn.Module, name: str) -> Any:
        if noted(name):
            found.setdefault((id(self), name), self)
        elif name == "__dict__" and threading.get_ident() == thread:
            frame = sys._getframe(1)
            if is_theirs(frame.f_globals.get("__name__")):  # then asks it for names
                asked = (x for x in frame.f_code.co_consts if isinstance(x, str))
                found.update({(id(self), x): self for x in asked if (id(self), x) not in found})
        return object.__getattribute__(self, name)

    def written(self: nn.Module, name: str, value: Any) -> None:
        if noted(name):
            found.setdefault((id(self), name), None)
        write(self, name, value)

    with _ONE:
        nn.Module.__getattribute__, nn.Module.__setattr__ = read, written
        try:
            yield found
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = write


class Reads:
    """What was read, as it is now."""

    def __init__(
        self,
        names: Names,
        recording: Recording | None = None,
        module: nn.Module | None = None,  # whose states a call reads anew
    ) -> None:
        self.empty: list[tuple[Mapping, str, type]] = []  # such as the hooks of most parts
        self.equal: list[tuple[Mapping, str, Any]] = []
        self.inner: list[tuple[Mapping, str, Any]] = []  # with what is in it
        self.kinds = {id(part): (part, type(part)) for part in names.values() if part is not None}
        self.missing: list[tuple[nn.Module, str]] = []  # which a default has stood for
        of_classes: dict[tuple[type, str], Mapping] = {}  # what instances do not have
        values, own = [], {*module.modules()} if module is not None else set()
        for (_, name), part in names.items():
            if part is None:
                continue
            states = (part._parameters, part._buffers, part._modules)
            at = next((at for at in states if name in at), vars(part))
            if at in states[:2] and (module is None or part in own):
                continue
            self._note(at, name)
            values.append(at.get(name))
            if name not in at and (kind := _class_with(part, name)):
                of_classes[kind, name] = vars(kind)
            elif name not in at and not hasattr(type(part), name):
                self.missing.append((part, name))
                self._note(part._modules, name)  # where it may be put
        for (_, name), at in of_classes.items():
            self._note(at, name)
        values += (at[name] for (_, name), at in of_classes.items())
        if recording:
            given = [x for x in recording.inputs if not isinstance(x, Tensor)]
            for x in filter(callable, given):  # whose state is in no call's key
                self._note({"": x}, "")
            self._note_variables(recording, [*values, *given])
        shared: dict[tuple[int, int], Any] = {}
        self.inner = [(at, name, _frozen(x, shared)) for at, name, x in self.inner]

    def _note_variables(self, recording: Recording, values: list[Any]) -> None:
        """Those that the code names, of its files and of functions that values are, or have."""
        named, left = names_in(recording.code), recording.left.keys()
        code, seen = recording.code, {}
        while values:
            functions = self._note_around(values, seen, named, left)
            values = []
            for at, name, whole in _variables_of(recording, code, functions):
                values.append(at.get(name))
                if not whole:
                    self.equal.append((at, name, at.get(name)))
                elif _is_plain(at.get(name)):
                    self._note(at, name)
            code = {}

    def _note_around(
        self, rest: list[Any], seen: dict[int, Any], named: set[str], left: KeysView
    ) -> list[FunctionType]:
        """What objects have, also of their classes, as those of methods, if the code names it.
        Returns functions that are met."""
        functions = []
        while rest:
            x = rest.pop()
            if id(x) in seen or isinstance(x, (*_SIMPLE, Tensor, nn.Module, ModuleType)):
                continue
            seen[id(x)] = x
            if isinstance(x, FunctionType):
                functions.append(x)
                continue
            if type(x) in _LOOKED_INTO:  # others may refuse to be
                inner = x.values() if isinstance(x, dict) else x
                rest += inner if len(x) <= LARGE else ()
                continue
            of = x.__self__ if isinstance(x, MethodType) else x
            if of is not x:
                rest.append(x.__func__)
            kinds = of.__mro__ if isinstance(of, type) else type(of).__mro__
            ours = [kind for kind in kinds if is_theirs(kind.__module__)]
            if isinstance(x, partial | ContextVar) or _is_record(x):
                rest += _state(x).values()
            if nn.Module in kinds or not ours:
                continue
            owners = {id(kind): vars(kind) for kind in ours}
            if hasattr(of, "__dict__") and not isinstance(of, type):
                owners[id(vars(of))] = vars(of)
            asked = named.intersection(chain.from_iterable(owners.values()))
            for owner, at in owners.items():
                for name in asked:
                    if left.isdisjoint([(owner, name), (owner, None)]):
                        self._note(at, name)
                        rest.append(at.get(name))
            rest += (y for name, y in _state(of).items() if name in named)
        return functions

    def _note(self, at: Mapping, name: str) -> None:
        x = at.get(name, _NOTHING)
        if isinstance(x, list | dict | set) and not x:
            self.empty.append((at, name, type(x)))
        elif _is_fixed(x) or _are_fixed(x):
            self.equal.append((at, name, x.copy() if isinstance(x, list | dict) else x))
        else:
            self.inner.append((at, name, x))

    def hold(self) -> bool:
        """Whether all of it is what it was."""
        if any(type(part) is not kind for part, kind in self.kinds.values()):
            return False
        for at, name, x in self.equal:
            y = at.get(name, _NOTHING)
            if y is not x and (type(y) is not type(x) or y != x):
                return False
        for at, name, kind in self.empty:
            y = at.get(name)
            if y or type(y) is not kind:
                return False
        shared: dict[tuple[int, int], Any] = {}
        return all(_frozen(at.get(name, _NOTHING), shared) == x for at, name, x in self.inner)

    def missing_of(self, module: nn.Module) -> set[str]:
        """The names that it was asked for and does not have."""
        return {name for part, name in self.missing if part is module}


def _variables_of(
    recording: Recording, code: Code, functions: list[FunctionType]
) -> Iterator[tuple[Mapping, str, bool]]:
    """Those that the forward pass does not change itself (`kept`)."""
    for at, name, whole in variables_of(code, functions):
        x, cell = at.get(name), dict.get(at, name) if isinstance(at, dict) else None
        changed = {(id(at), name), (id(x), None), (id(cell), None)}
        if changed.isdisjoint(recording.left):
            yield at, name, whole


def _is_plain(x: Any, depth: int = 3) -> bool:
    """Whether it is a number, a word, a function, a tensor or the like, or all that is in it, as in
    a configuration."""
    if isinstance(x, ModuleType | nn.Module):
        return False
    if _is_fixed(x) or isinstance(x, Tensor | ContextVar):
        return True
    if isinstance(x, dict):  # but none that imports what is asked of it
        inner = x.values() if type(x).values is dict.values else [x]
    elif isinstance(x, list | tuple | set):
        inner = x
    elif not (inner := _state(x).values()):
        return False
    return depth > 0 and len(inner) <= LARGE and all(_is_plain(y, depth - 1) for y in inner)


def _class_with(part: nn.Module, name: str) -> type | None:
    """The class that gives an instance the name; None: none does, or PyTorch's own, which nobody
    changes."""
    kind = next((kind for kind in type(part).__mro__ if name in vars(kind)), object)
    return None if kind in (nn.Module, object) else kind


class _Same:
    """An object that equals itself alone; it is kept, so that no other has its place."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and other.of is self.of

    __hash__ = None


def _is_fixed(x: Any) -> bool:
    """Whether it equals itself alone, or what it stands for, and nothing changes in it unseen."""
    return isinstance(x, _FIXED) or x is _NOTHING


def _are_fixed(x: Any) -> bool:
    """Likewise of all that is in it."""
    if isinstance(x, tuple | list):
        return all(map(_is_fixed, x))
    return isinstance(x, dict) and all(map(_is_fixed, x.values()))


def _is_record(x: Any) -> bool:
    """Whether it is for what is in it, as one of a configuration's parts is, at any depth."""
    kind = type(x)
    return issubclass(kind, SimpleNamespace) or kind.__module__ == "argparse" or is_dataclass(kind)


def _state(x: Any) -> dict[str, Any]:
    """What is in an object, also in those of Python's that keep it in no attribute."""
    if isinstance(x, partial):
        return {"func": x.func, "args": x.args, "keywords": x.keywords}
    return {"value": x.get(None)} if isinstance(x, ContextVar) else state_of(x)


def _frozen(
    x: Any, shared: dict[tuple[int, int], Any], depth: int = 3, inside: tuple[int, ...] = ()
) -> Any:
    """A copy that is compared with what is there later: of objects within objects to this depth, of
    lists, sets, dicts and records to any, but within themselves. `shared` has objects that several
    have, such as einops' patterns, which are copied once."""
    if isinstance(x, _SIMPLE):
        return type(x), x
    if isinstance(x, Tensor):
        return _Same(x), version_of(x)
    if id(x) in inside:
        return _Same(x)
    if hidden_in(type(x)):  # such as an array's elements
        return _Same(x), contents(x)
    inside = (*inside, id(x))
    if isinstance(x, list | tuple | set | frozenset | deque):
        return type(x), [_frozen(y, shared, depth, inside) for y in x]
    if isinstance(x, dict):
        items = ((_frozen(k, shared, 0), _frozen(y, shared, depth, inside)) for k, y in x.items())
        return type(x), [*items]
    depth -= not _is_record(x)
    if depth < 0 or _is_fixed(x):
        return _Same(x)
    if (id(x), depth) not in shared:
        state = _state(x)  # such as a configuration's
        found = _Same(x), _frozen(state, shared, depth, inside)
        shared[id(x), depth] = found if state else found[0]
    return shared[id(x), depth]
