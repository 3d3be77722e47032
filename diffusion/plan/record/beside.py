"""What a forward pass leaves beside its module: tables that a Python file keeps for calls of the
same sizes, in a dict, a list or a variable of its own, or by `functools.lru_cache`.

Those of a recording have no numbers. They are taken out behind it, and the module's own next call
makes others.
"""

import functools
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..trees import leaves

_Cached = functools._lru_cache_wrapper
# whose variables and caches are of no module's tensors
_OTHERS = {*sys.stdlib_module_names, "torch", "triton", "triton_kernels", "diffusion", "sympy"}
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_NOTHING = object()

Container = dict | list
Contents = dict[int, tuple[Container, Container]]  # by ids, with a copy of what was in each
Left = list[tuple[Container, Any, list[Tensor]]]  # where, under which key or index, and which


@contextmanager
def modules_kept(module: nn.Module) -> Iterator[Callable[[], list[Tensor]]]:
    """Variables of Python's modules, dicts and lists in these and in the classes of the module's
    parts, and caches keep nothing of a recording that is made in the block. The block is given a
    function that says which of its tensors are in them, but for caches, when it is called."""
    files = _files()
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    classes = [vars(kind) for kind in kinds if _is_theirs(kind.__module__)]
    before = _contents([*files, *(x for names in classes for x in _containers(names.values()))])
    found = (x for names in (*files, *classes) for x in list(names.values()))
    caches = {id(x): (x, x.cache_info().misses) for x in found if type(x) is _Cached}
    left: Left | None = None

    def tensors_left() -> list[Tensor]:
        nonlocal left
        left = _left(before)
        return [x for _, _, tensors in left for x in tensors]

    try:
        yield tensors_left
    finally:
        places: dict[int, tuple[Container, set]] = {}
        for at, key, _ in _left(before) if left is None else left:
            places.setdefault(id(at), (at, set()))[1].add(key)
        for i, (at, keys) in places.items():
            _restore(at, keys, before[i][1] if i in before else None)
        for x, misses in caches.values():
            if x.cache_info().misses != misses:
                x.cache_clear()


def _files() -> list[dict[str, Any]]:
    """The variables of Python's modules that may keep tensors: not of `_OTHERS`, nor of installed
    packages in which nothing is PyTorch's."""
    packages: dict[str, list[ModuleType]] = {}
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package not in _OTHERS and hasattr(module, "__dict__"):
            packages.setdefault(package, []).append(module)
    theirs = (modules for name, modules in packages.items() if _has_tensors(name, modules))
    return [vars(module) for modules in theirs for module in modules]


_known: dict[str, tuple[int, bool]] = {}  # of how many modules of a package, the answer below


def _has_tensors(package: str, modules: list[ModuleType]) -> bool:
    """Whether one of its files may keep a tensor."""
    count, answer = _known.get(package, (0, False))
    if count != len(modules):
        answer = not all(map(_is_installed, modules)) or any(map(_knows_torch, modules))
        _known[package] = len(modules), answer
    return answer


def _is_installed(module: ModuleType) -> bool:
    return str(vars(module).get("__file__")).startswith(_INSTALLED)


def _knows_torch(module: ModuleType) -> bool:
    """Whether a variable is PyTorch's, or a module, function or class of it."""
    origins = map(_origin, list(vars(module).values()))
    return any(str(name).partition(".")[0] == "torch" for name in origins)


def _origin(x: Any) -> Any:
    """The name of a module, or of that in which a function, a class or another thing's class is."""
    kind = type(x)
    if issubclass(kind, ModuleType):
        return vars(x).get("__name__")
    named = issubclass(kind, type) or kind in (FunctionType, BuiltinFunctionType)
    return (x if named else kind).__module__


def _is_theirs(name: Any) -> bool:
    return str(name).partition(".")[0] not in _OTHERS


def _contents(rest: list[Container]) -> Contents:
    """Of these, and of the dicts and lists in them at any depth."""
    found: Contents = {}
    while rest:
        x = rest.pop()
        if id(x) not in found:
            copied = list.copy(x) if isinstance(x, list) else dict(dict.items(x))
            found[id(x)] = x, copied
            rest += _containers(_values(copied))
    return found


# A library's own kind of dict or list may import what is asked of it, or refuse to be walked
# through: what it stores is read by the methods of Python's.
def _values(x: Container) -> Collection[Any]:
    return list.copy(x) if isinstance(x, list) else dict.values(x)


def _containers(values: Iterable[Any]) -> list[Container]:
    values = list(values)
    kinds = {kind for kind in {*map(type, values)} if _is_container(kind)}
    return [x for x in values if type(x) in kinds] if kinds else []


@functools.cache
def _is_container(kind: type) -> bool:
    return issubclass(kind, dict | list)


def _left(before: Contents) -> Left:
    """What is not as it was, and has tensors of a recording in it."""
    found: Left = []
    imported = _contents([names for names in _files() if id(names) not in before])
    for i, (at, _) in (imported | before).items():
        was, values = before[i][1] if i in before else None, _values(at)
        if was is not None and len(was) == len(values) and all(map(is_, values, _values(was))):
            continue
        for key, x in enumerate(values) if isinstance(at, list) else list(dict.items(at)):
            if x is _at(was, key) or (was is None and id(x) in imported):
                continue
            tensors = [y for y in leaves(x) if _is_recorded(y)]
            if tensors:
                found.append((at, key, tensors))
    return found


def _is_recorded(x: Any) -> bool:
    return isinstance(x, Tensor) and torch._is_functional_tensor(x)


def _at(was: Container | None, key: Any) -> Any:
    if isinstance(was, list):
        return was[key] if key < len(was) else _NOTHING
    return _NOTHING if was is None else was.get(key, _NOTHING)


def _restore(at: Container, keys: set, was: Container | None) -> None:
    """What is under these keys is what was there; what a list has got besides stays."""
    if isinstance(at, list):
        known = [] if was is None else was
        ids = {*map(id, known)}
        at[:] = [*known, *(x for i, x in enumerate(at) if i not in keys and id(x) not in ids)]
        return
    for key in keys:
        before = _at(was, key)
        if before is _NOTHING:
            del at[key]
        else:
            at[key] = before
