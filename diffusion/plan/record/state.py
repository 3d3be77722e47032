"""What a module may keep from call to call, noted before a recording and put back behind it.

That is in attributes of its parts, in variables of the files that its code comes from and of those
that these name, in their classes, and in variables that functions have of their own: closures'
cells, attributes, defaults. What is in dicts, lists, objects, arrays and the like there is noted,
too, at any depth.

Other files may have tables of a recording, which have no numbers: in their dicts and lists these
alone are looked for, and taken out. What is installed and has nothing of PyTorch's keeps none.
"""

import copy
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..graph import PlanError
from ..trees import leaves, slots_of
from .contents import (
    LARGE,
    NOTHING,
    NUMBERS,
    are_same,
    contents,
    differing,
    entries,
    hidden_in,
    is_pythons,
    put,
    put_entry,
)  # fmt: skip
from .files import is_theirs, keeping_files

_Cached = functools._lru_cache_wrapper
_FIXED = (*NUMBERS, type(None), Tensor, Enum, BuiltinFunctionType)
_AROUND = property, staticmethod, classmethod, functools.partial, functools.cached_property
_ROLES = {  # in a walk
    "file": ModuleType,
    "part": nn.Module,
    "class": type,
    "function": FunctionType,
    "cache": _Cached,
    "around": (*_AROUND, MethodType),
    "iterator": MethodWrapperType,  # such as an iterator's `__next__`
    "tuple": tuple,
}
# of Python's files, whose objects keep what is set
_KEEPING = {"_thread", "collections", "types", "weakref"}
_OWN = frozenset(vars(nn.Module())) - {"training"}  # PyTorch's attributes of every part
_STATES = ("_parameters", "_buffers", "_modules")  # of these, whose entries are attributes


class Place(NamedTuple):
    """An attribute of a part, or a variable of a file, a class or a function."""

    owner: int  # its id
    name: str
    of: str  # what the owner is called
    inside: bool  # whether it is a part

    def __str__(self) -> str:
        return f"{self.name} of {self.of}"


class Change(NamedTuple):
    at: Any  # in which names or which dict, list, object...
    place: Place
    value: Any  # what is there now, with tensors as the recording has them
    was: Any


Left = dict[tuple[int, str | None], Change]  # by the ids of where, and by the name if it has names


class _Noted(NamedTuple):
    """What has others in it, with a copy."""

    x: Any
    was: Any
    place: Place | None  # None: nothing is said of it
    names: bool  # whether each of its entries is a place
    own: bool  # False: looked into for tensors of a recording alone


class State:
    """All that is noted. Within its block iterators refuse, and behind it all is what it was."""

    def __init__(self, module: nn.Module) -> None:
        self._noted: dict[int, _Noted] = {}
        self._caches: dict[int, tuple[Any, int]] = {}
        self._iterators: list[tuple[_Noted, Any, Any, Place]] = []
        self._hooks: list[dict] = []  # which are empty
        parts = list(module.modules())
        self._parts = {id(vars(part)) for part in parts}
        self._met: set[str] = set()  # files of what is met
        self._near: set[str] | None = None  # those in which it is; None: it is the module's
        self._files, seen, self._count = keeping_files(), set(), len(sys.modules)
        for part in parts:
            rest = [(vars(part), Place(id(part), "", type(part).__name__, True), True)]
            self._meet(type(part), None, rest)
            self._walk(rest)
        for far in (False, True):  # those that it comes from, and those that these name
            seen, found = seen | self._met, self._met - seen
            self._near = set() if far else found
            for name in found & self._files.keys():
                names = self._files[name]
                path = str(names.get("__file__") or name)
                self._walk([(names, Place(id(names), "", path, False), True)])
        self._note_others(self._files.values())

    def _walk(self, rest: list[tuple[Any, Place | None, bool]]) -> None:
        """Notes these, and what is in them at any depth."""
        while rest:
            x, place, names = rest.pop()
            if id(x) in self._noted:
                continue
            was = contents(x)
            noted = self._noted[id(x)] = _Noted(x, was, place, names, True)
            if len(was) > LARGE or isinstance(was, bytes):
                continue
            for key, y in was.items() if isinstance(was, dict) else enumerate(was):
                role = _role(type(y))
                if role is None or (names and is_pythons(key)):
                    continue
                if names and place.inside and key in _OWN:
                    if key in _STATES:
                        rest.append((y, place, True))
                    elif y:
                        self._meet(y, None, rest)
                    else:
                        self._hooks.append(y)
                    continue
                at = place._replace(name=key) if names else place
                of = y.__self__ if isinstance(y, MethodWrapperType) else y
                if role == _role(type(of)) == "iterator" and not isinstance(x, set):
                    self._iterators.append((noted, key, y, at))
                else:
                    self._meet(y, at, rest)

    def _meet(self, y: Any, place: Place | None, rest: list) -> None:
        """What is in it, too, is to be noted."""
        role = _role(type(y))
        if role == "tuple":
            for z in y:
                if _role(type(z)) is not None:
                    self._meet(z, place, rest)
        elif role == "file":
            self._met.add(vars(y).get("__name__", ""))
        elif role == "part":
            if id(vars(y)) not in self._parts:
                rest.append((vars(y), place, False))
        elif role == "around":
            around = (getattr(y, name, None) for name in ("fget", "func", "__func__", "__self__"))
            for z in (*around, *getattr(y, "args", ()), getattr(y, "keywords", None)):
                self._meet(z, place, rest)
        elif role == "cache":
            self._caches[id(y)] = y, y.cache_info().misses
            self._meet(y.__wrapped__, place, rest)
        elif role == "function" and self._near != set() and is_theirs(y.__module__):
            self._met |= {y.__module__, self._file_of(y)}
            self._meet_variables(y, Place(id(y), "", y.__qualname__, False), rest)
        elif role == "class":
            for kind in y.__mro__:
                self._met.add(kind.__module__)
                near = self._near is None or kind.__module__ in self._near
                if near and id(kind) not in self._noted and is_theirs(kind.__module__):
                    at = Place(id(kind), "", f"the class {kind.__qualname__}", False)
                    rest.append((kind, at, True))
        elif role == "held" or (role == "object" and self._may_keep(type(y).__module__)):
            if role == "held" or slots_of(y):
                rest.append((y, place, False))
            has_dict = type(y).__dictoffset__ or isinstance(y, threading.local)
            if has_dict and type(y.__dict__) is dict:  # a proxy has that of another
                rest.append((y.__dict__, place, False))
            if role == "object":
                self._meet(type(y), None, rest)

    def _file_of(self, function: FunctionType) -> str:
        """The name of the file whose variables it reads, which Python may not know by it: one that
        was loaded by its path, or since by another's."""
        names = function.__globals__
        name = str(names.get("__name__"))
        known = getattr(sys.modules.get(name), "__dict__", None)
        if known is not names and is_theirs(name):
            name = f"{name} of {id(names)}" if name in sys.modules else name
            self._files[name] = names
        return name

    def _may_keep(self, file: str) -> bool:
        """Whether objects of its classes: not a notebook's shell, or a library's loggers."""
        return file in self._files or file in _KEEPING

    def _meet_variables(self, function: FunctionType, place: Place, rest: list) -> None:
        """Those of its own."""
        rest += (
            (x, place, True) for x in (vars(function), function.__kwdefaults__) if x is not None
        )
        defaults, code = function.__defaults__ or (), function.__code__
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for name, x in zip(names, defaults, strict=True):
            self._meet(x, place._replace(name=name), rest)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            rest.append((cell, place._replace(name=name), False))

    def _note_others(self, found: Iterable[dict]) -> None:
        """Dicts and lists in them, at any depth, and caches."""
        rest: list[Any] = list(found)
        while rest:
            x = rest.pop()
            if id(x) in self._noted:
                continue
            was = contents(x)
            self._noted[id(x)] = _Noted(x, was, None, False, False)
            values = list(was.values() if isinstance(was, dict) else was)
            kinds = {kind for kind in {*map(type, values)} if _is_looked_into(kind)}
            for y in values if kinds else ():
                if type(y) is _Cached:
                    self._caches[id(y)] = y, y.cache_info().misses
                elif type(y) in kinds:
                    rest.append(y)

    def _note_imported(self) -> None:
        """Files that the block has imported, as they are without what it has left in them."""
        if len(sys.modules) == self._count:
            return
        self._count, known = len(sys.modules), self._noted.keys() | ()
        self._note_others(keeping_files().values())
        for i in self._noted.keys() - known:
            x, now, *_ = self._noted[i]
            self._noted[i] = self._noted[i]._replace(was=self._without(now, type(now)()))

    def _without(self, now: Any, was: Any) -> Any:
        """What is there now, without what has tensors of a recording in it."""
        left = {key for key, y in entries(now) if self._is_left(y, was, key)}
        if not left:
            return now
        if isinstance(now, dict):
            every = {**now, **{key: was.get(key, NOTHING) for key in left}}
            return {key: y for key, y in every.items() if y is not NOTHING}
        ids = {*map(id, was)}  # what a list has got besides stays
        return [*was, *(y for i, y in enumerate(now) if i not in left and id(y) not in ids)]

    def _is_left(self, y: Any, was: Any, key: Any) -> bool:
        same = y is (was.get(key) if isinstance(was, dict) else was[key] if key < len(was) else 0)
        return not same and id(y) not in self._noted and any(map(_is_recorded, leaves(y)))

    def __enter__(self) -> "State":
        for noted, key, y, place in self._iterators:
            noted.was[key] = _Stopped(y, place)
            put_entry(noted.x, key, noted.was[key])
        return self

    def __exit__(self, *_: Any) -> None:
        self._note_imported()
        for (x, was, _, names, own), now in self._changed():
            put(x, was if own else self._without(now, was), names)
        for noted, key, y, _ in self._iterators:
            put_entry(noted.x, key, y)
        for hooks in self._hooks:
            hooks.clear()
        for x, misses in self._caches.values():
            if x.cache_info().misses != misses:
                x.cache_clear()

    def changes(self, inner: Callable[[Tensor], Tensor]) -> tuple[Left, list[Tensor]]:
        """What has changed, and tensors of the recording that have been left in it, but for those
        in attributes."""
        self._note_imported()
        left: Left = {}
        beside: list[Tensor] = []
        seen = {i: (noted.x, noted.x) for i, noted in self._noted.items()}
        for (x, was, place, names, own), now in self._changed():
            if not own:
                kept = [y for key, y in entries(now) if self._is_left(y, was, key)]
                beside += (inner(y) for y in leaves(kept) if _is_recorded(y))
                continue
            every = differing(now, was, names) if names else [(None, now, was)]
            for key, y, before in every if place is not None else ():
                if not (names and place.inside and key in _OWN):
                    at = place._replace(name=key) if names else place
                    left[id(x), key] = Change(x, at, _copied(y, inner, seen), before)
                    if not place.inside:
                        beside += tensors_left(left[id(x), key].value)
        return left, beside

    def _changed(self) -> Iterator[tuple[_Noted, Any]]:
        """What is not as it was, and what is in it now."""
        for noted in list(self._noted.values()):
            x, was = noted.x, noted.was
            if type(x) is dict and len(x) == len(was):  # as most are, which are not changed
                if all(map(is_, x.values(), was.values())) and all(map(is_, x, was)):
                    continue
            now = contents(x)
            if not are_same(now, was):
                yield noted, now

    def begin(self, left: Left, shaped: Callable[[Tensor], Tensor]) -> dict:
        """All is what a recording has left, with other tensors of these shapes. Returns these by
        their ids, each with the recording's."""
        stand, seen = {}, {i: (noted.x, noted.x) for i, noted in self._noted.items()}

        def standing(x: Tensor) -> Tensor:
            made = shaped(x)
            stand[id(made)] = made, x
            return made

        for (_, key), change in left.items():
            value = _copied(change.value, standing, seen)
            if key is None:
                put(change.at, value, False)
            else:
                put_entry(change.at, key, value)
        return stand


class _Stopped:
    """In place of an iterator or of its `__next__`: nobody can say where it is, or put it back."""

    def __init__(self, of: Iterator | MethodWrapperType, place: Place) -> None:
        self.of = of.__self__ if isinstance(of, MethodWrapperType) else of
        self.place, self.thread = place, threading.get_ident()

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        if threading.get_ident() != self.thread:
            return next(self.of)
        raise PlanError(
            f"the module takes the next of an iterator ({self.place}); a plan keeps nothing from"
            " call to call"
        )

    __call__ = __next__


@functools.cache
def _role(kind: type) -> str | None:
    """What an object of this class is to a walk; None: nothing is kept in it."""
    if issubclass(kind, _FIXED):
        return None
    for name, kinds in _ROLES.items():
        if issubclass(kind, kinds):
            return name
    if kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__"):
        return "iterator"
    if kind.__module__.partition(".")[0] == "torch":
        return None
    if hidden_in(kind) or issubclass(kind, dict | list | set | deque):
        return "held"
    return "object" if is_theirs(kind.__module__) or kind.__module__ in _KEEPING else None


@functools.cache
def _is_looked_into(kind: type) -> bool:
    return issubclass(kind, dict | list) or kind is _Cached


def _copied(x: Any, of_tensor: Callable[[Tensor], Tensor], seen: dict[int, tuple]) -> Any:
    """A copy with other tensors in place of those without numbers: of dicts, lists and tuples, but
    for those that were seen. What is there twice is so in the copy."""
    if id(x) in seen:
        return seen[id(x)][1]
    y = x
    if isinstance(x, Tensor) and has_no_numbers(x):
        y = of_tensor(x)
    elif type(x) is tuple:
        y = tuple(_copied(z, of_tensor, seen) for z in x)
    elif isinstance(x, dict | list):
        y = copy.copy(x)
        seen[id(x)] = x, y  # which may be in itself
        for key, z in entries(y):
            y[key] = _copied(z, of_tensor, seen)
    seen[id(x)] = x, y  # both are kept, so that no other has its id
    return y


def tensors_left(tree: Any) -> list[Tensor]:
    """Those of a recording."""
    return [x for x in leaves(tree) if isinstance(x, Tensor) and has_no_numbers(x)]


def has_no_numbers(x: Tensor) -> bool:
    return _is_recorded(x) or isinstance(x, FakeTensor) or x.is_meta


def _is_recorded(x: Any) -> bool:
    return isinstance(x, Tensor) and torch._is_functional_tensor(x)
