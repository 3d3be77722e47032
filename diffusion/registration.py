"""Names under which networks and data sets of the user's own are registered."""

from collections.abc import Mapping
from typing import Any


def check_name(what: str, name: str, given: Any, known: Mapping[str, Any]) -> None:
    """ValueError if `known` has another class or function of this name. The same one again, of a
    file that is loaded once more, may replace it."""
    other = known.get(name)
    if other is not None and _place(other) != _place(given):
        raise ValueError(f"there is a {what} {name} already: {other.__module__}")


def _place(of: Any) -> tuple[str, str]:
    return of.__module__, of.__qualname__
