"""What is in a dict, a list, an object and the like: how it is read, compared and written."""

import copy
import functools
import pickle
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from operator import is_
from types import CellType, ModuleType
from typing import Any

from ..trees import slots_of

NUMBERS = (bool, int, float, complex, str, bytes)
NOTHING = object()  # where there is no such entry
LARGE = 2**14  # more elements are data, not looked into


@functools.cache
def hidden_in(kind: type) -> tuple[Callable, Callable] | None:
    """How to read and to write what objects of a class keep in no attribute."""
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        return kind.getstate, kind.setstate
    if issubclass(kind, bytearray | array):
        return copy.copy, lambda x, was: x.__setitem__(slice(None), was)
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if issubclass(kind, numpy.random.RandomState):
        return kind.get_state, kind.set_state
    if issubclass(kind, numpy.random.Generator):
        return lambda x: ("state", x.bit_generator.state), lambda x, was: setattr(
            x.bit_generator, *was
        )
    if issubclass(kind, numpy.ndarray):
        return _elements, lambda x, was: x.__setitem__(..., was)
    return None


def _elements(x: Any) -> Any:
    return x.copy() if x.size <= LARGE and not x.dtype.hasobject else None


def contents(x: Any) -> dict | list | set | bytes:
    """A copy, in bytes of what is hidden. A library's own kind of dict or list may import what is
    asked of it, or refuse to be walked through: it is read by the methods of Python's."""
    if isinstance(x, OrderedDict):
        found = dict(dict.items(x))
        return {key: found[key] for key in (*OrderedDict.keys(x), *found)}
    if isinstance(x, dict):
        return dict(dict.items(x))
    if isinstance(x, list | set):
        return list.copy(x) if isinstance(x, list) else set(x)
    if isinstance(x, deque):
        return list(x)
    if isinstance(x, type):
        return dict(vars(x))
    if isinstance(x, CellType):
        try:
            return {"cell_contents": x.cell_contents}
        except ValueError:  # nothing has been put there
            return {}
    hidden = hidden_in(type(x))
    return pickle.dumps(hidden[0](x)) if hidden else slots_of(x)


def put(x: Any, was: dict | list | set | bytes, names: bool = False) -> None:
    """This is in it."""
    if isinstance(was, bytes):
        hidden_in(type(x))[1](x, pickle.loads(was))
    elif isinstance(was, dict):
        for key, y, _ in differing(was, contents(x), names):
            put_entry(x, key, y)
        now = contents(x) if isinstance(x, dict) else {}
        order = [key for key in was if key in now]
        for key in order if [key for key in now if key in was] != order else ():
            x[key] = x.pop(key)
    elif isinstance(x, list):
        list.__setitem__(x, slice(None), was)
    else:
        x.clear()
        (x.update if isinstance(x, set) else x.extend)(was)


def put_entry(x: Any, key: Any, y: Any) -> None:
    """NOTHING: it is deleted."""
    if isinstance(x, dict | list | deque):
        x.__delitem__(key) if y is NOTHING else x.__setitem__(key, y)
    else:
        kind = type if isinstance(x, type) else object
        kind.__delattr__(x, key) if y is NOTHING else kind.__setattr__(x, key, y)


def entries(x: dict | list | set) -> Iterable[tuple[Any, Any]]:
    return list(x.items() if isinstance(x, dict) else enumerate(x))


def differing(now: dict, was: dict, names: bool) -> list[tuple[Any, Any, Any]]:
    """Entries that are not what they were; of names, without Python's own and what is imported."""
    every = ((key, now.get(key, NOTHING), was.get(key, NOTHING)) for key in {**was, **now})
    found = [entry for entry in every if not _is_same(*entry[1:])]
    if not names:
        return found
    return [
        (name, a, b)
        for name, a, b in found
        if not is_pythons(name) and ModuleType not in (type(a), type(b))
    ]


def is_pythons(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def are_same(now: Any, was: Any) -> bool:
    if isinstance(now, bytes | set):
        return now == was
    if len(now) != len(was):
        return False
    if isinstance(now, dict):
        if not all(map(is_, now, was)) and list(now) != list(was):
            return False
        now, was = now.values(), was.values()
    return all(map(is_, now, was)) or all(map(_is_same, now, was))


def _is_same(a: Any, b: Any) -> bool:
    """Whether it is the same object, an equal number, or a tuple of these."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return isinstance(a, NUMBERS) and a == b
