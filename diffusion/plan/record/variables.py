"""Which variables of files and closures, and which attributes of what is there, the code of a
forward pass reads, as far as its text tells."""

import dis
import functools
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from .files import is_theirs

Code = dict[CodeType, dict[str, Any]]  # with the variables of its file


def note_code(code: Code, frame: FrameType | None, around: CodeType) -> None:
    """What has called a function of PyTorch, in this frame and those before it."""
    while frame is not None and frame.f_code is not around:
        code[frame.f_code] = frame.f_globals
        frame = frame.f_back


class _Cells(dict):
    """Variables of a function around another, which are read anew."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name).cell_contents

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except (KeyError, ValueError):  # ValueError: nothing has been put there
            return default


def variables_of(code: Code, functions: Iterable[Any]) -> list[tuple[Mapping[str, Any], str, bool]]:
    """Where they are, and their names, of this code and of functions that it names, and of others;
    False: of what is there the code asks for attributes alone, which are others of these."""
    every: list[tuple[CodeType, dict[str, Any]]] = [*code.items()]
    rest, seen = list(functions), set()
    while rest:
        f = rest.pop()
        f = f.func if isinstance(f, functools.partial) else getattr(f, "__func__", f)
        if isinstance(f, FunctionType) and f not in seen:
            seen.add(f)
            cells = _Cells(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
            rest += map(cells.get, cells)  # such as the one that this is a decorator of
            if is_theirs(f.__globals__.get("__name__")):
                every += [(f.__code__, f.__globals__), (f.__code__, cells)]
    found = {}
    for text, variables in list(every):
        for at, name, _ in _named(text, variables):
            if isinstance(x := _in(at).get(name), FunctionType):
                every.append((x.__code__, x.__globals__))
    for text, variables in every:
        for at, name, whole in _named(text, variables):
            found[id(at), name] = at, name, whole or found.get((id(at), name), (0, 0, False))[2]
    return [(_in(at), name, whole) for at, name, whole in found.values()]


def _in(at: dict | type) -> Mapping[str, Any]:
    return vars(at) if isinstance(at, type) else at


def _named(text: CodeType, variables: dict[str, Any]) -> Iterator[tuple[dict | type, str, bool]]:
    if not is_theirs(variables.get("__name__")):
        return
    for name, inner in _names(text):
        if name not in variables:
            continue
        x = variables.get(name)
        file = getattr(x, "__name__" if isinstance(x, ModuleType) else "__module__", None)
        at = x if isinstance(x, type) else getattr(x, "__dict__", {})
        asked = inner in _in(at) and (is_theirs(file) or not isinstance(x, ModuleType | type))
        yield variables, name, not asked
        if asked:
            yield at, inner, True


@functools.cache
def _names(text: CodeType) -> frozenset[tuple[str, str | None]]:
    """Of variables of its file and of functions around it, each with the attribute it is asked for;
    with those of functions within."""
    found, steps = set(), [*dis.get_instructions(text)]
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            asked = after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
            found.add((step.argval, after.argval if asked else None))
    inner = (_names(x) for x in text.co_consts if isinstance(x, CodeType))
    return frozenset(found.union(*inner))


def names_in(code: Iterable[CodeType]) -> set[str]:
    """All that this code names, such as attributes."""
    found, rest = set(), [*code]
    while rest:
        text = rest.pop()
        found.update(text.co_names)
        rest += (x for x in text.co_consts if isinstance(x, CodeType))
    return found
