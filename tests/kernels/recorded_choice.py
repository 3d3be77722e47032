"""Which launches of a kernel are compiled, of all that were recorded."""

from collections import defaultdict
from typing import Any

_SIZES = 6  # values of a constant; one that has more is a size, and no choice of a launcher


def covering(cases: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """So many of them, the ones that show most of what the others do not."""
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
