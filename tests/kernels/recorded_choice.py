"""Which launches of a kernel are compiled, of all that were recorded."""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from triton.runtime.jit import KernelInterface

_SIZES = 3  # values of a constant; one that has more is a size, and no choice of a launcher


def covering(cases: list[dict[str, Any]], most: float) -> list[dict[str, Any]]:
    """The cases that show every choice of a launcher, at most so many: always the one that shows
    most of what those before do not."""
    values = defaultdict(set)
    for case in cases:
        for feature in _features(case):
            values[feature[:2]].add(feature)
    wanted = {f for v in values.values() if len(v) <= _SIZES for f in v}
    kept: list[dict[str, Any]] = []
    while len(kept) < most and (rest := [c for c in cases if c not in kept]):
        best = max(rest, key=lambda case: len(wanted & _features(case)))
        if kept and not wanted & _features(best):
            break
        kept.append(best)
        wanted -= _features(best)
    return kept


def _features(case: dict[str, Any]) -> set[tuple]:
    """What a launcher has chosen: constants, the types of arguments, warps and registers."""
    found = {("constant", k, repr(v)) for k, v in case["constexprs"].items()}
    found |= {("type", k, v) for k, v in case["signature"].items()}
    return found | {("option", k, repr(v)) for k, v in case["options"].items()}


def multiplies(kernel: KernelInterface) -> bool:
    """Whether a kernel, or a function that it calls in whatever file, has products."""
    found, waiting = {kernel.fn}, [kernel.fn]
    while waiting:
        function = waiting.pop()
        if re.search(r"\btl\.dot\(|warpgroup_mma|mma_v2", inspect.getsource(function)):
            return True
        further = set(_named(function)) - found
        found |= further
        waiting += further
    return False


def _named(function: FunctionType) -> Iterator[FunctionType]:
    """The functions for a GPU that are named in its text, alone, in a module or in a class."""
    words = set(re.findall(r"\w+", inspect.getsource(function)))
    for value in map(function.__globals__.get, words):
        if isinstance(value, ModuleType | type):
            members = vars(value)
            there = members.values() if isinstance(value, type) else map(members.get, words)
        else:
            there = (value,)
        yield from (member.fn for member in there if isinstance(member, KernelInterface))
