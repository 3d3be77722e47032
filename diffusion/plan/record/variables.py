"""Which variables of files, and which names of classes and files that these name, the code of a
forward pass reads, as far as its text tells."""

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
    names = {*_names(text)}
    for name in names & variables.keys():
        yield variables, name
        x = variables[name]
        file = getattr(x, "__name__" if isinstance(x, ModuleType) else "__module__", None)
        if isinstance(x, ModuleType | type) and is_theirs(file):
            at = x if isinstance(x, type) else vars(x)
            yield from ((at, inner) for inner in names & vars(x).keys())


def _names(text: CodeType) -> Iterator[str]:
    """With those of functions within."""
    yield from text.co_names
    for inner in text.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
