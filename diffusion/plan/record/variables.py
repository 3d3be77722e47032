"""Which variables of files, and which names of classes and files that these name, the code of a
forward pass reads, as far as its text tells."""

import dis
import functools
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from .files import is_theirs

Code = dict[CodeType, dict[str, Any]]  # with the variables of its file


def note_code(code: Code, frame: FrameType | None, around: CodeType) -> None:
    """What has called a function of PyTorch, in this frame and those before it."""
    while frame is not None and frame.f_code is not around:
        code[frame.f_code] = frame.f_globals
        frame = frame.f_back


def variables_of(code: Code) -> list[tuple[Mapping[str, Any], str]]:
    """Where they are, and their names: of this code, and of functions that it names."""
    every, found = dict(code), {}
    for text, variables in code.items():
        for at, name in _named(text, variables):
            if isinstance(x := _in(at)[name], FunctionType):
                every.setdefault(x.__code__, x.__globals__)
    for text, variables in every.items():
        found |= {(id(at), name): (_in(at), name) for at, name in _named(text, variables)}
    return list(found.values())


def _in(at: dict | type) -> Mapping[str, Any]:
    return vars(at) if isinstance(at, type) else at


def _named(text: CodeType, variables: dict[str, Any]) -> Iterator[tuple[dict | type, str]]:
    if not is_theirs(variables.get("__name__")):
        return
    for name, inner in _names(text):
        x = variables.get(name)
        file = getattr(x, "__name__" if isinstance(x, ModuleType) else "__module__", None)
        if name in variables and inner is None:
            yield variables, name
        elif isinstance(x, ModuleType | type) and inner in vars(x) and is_theirs(file):
            yield (x if isinstance(x, type) else vars(x)), inner


@functools.cache
def _names(text: CodeType) -> frozenset[tuple[str, str | None]]:
    """Of variables of its file, and of what it asks these for; with those of functions within."""
    found, of = set(), None
    for step in dis.get_instructions(text):
        if of and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found.add((of, step.argval))
        of = step.argval if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else None
        found |= {(of, None)} if of else set()
    inner = (_names(x) for x in text.co_consts if isinstance(x, CodeType))
    return frozenset(found.union(*inner))
