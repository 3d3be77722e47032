"""What a forward pass leaves in the module's attributes, for its next call to read.

A plan leaves nothing there. That is as well where a module shows others what it has computed, or
keeps tables that it would make again. A module that reads what its last call has left computes
something else in each call, which no plan does.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ..graph import PlanError
from ..trees import holds_tensors, leaves, tensors_in
from .draws import draws
from .recording import Recording

Key = tuple[int, str]  # the id of a part, and an attribute's name


def left_in(
    attributes: Iterable[tuple[nn.Module, dict[str, Any]]], inner: Callable[[Tensor], Tensor]
) -> dict[Key, Any]:
    """Tensors, as the recording has them, and numbers that are not what they were."""
    found = {}
    for part, were in attributes:
        for name, x in vars(part).items():
            if isinstance(x, Tensor | int | float) and x is not were.get(name):
                found[id(part), name] = inner(x) if isinstance(x, Tensor) else x
    return found


def refuse_kept(
    found: Recording, read: Mapping[Key, nn.Module | None], again: Callable[[], Recording]
) -> None:
    """PlanError: the forward pass reads an attribute in which it leaves what it makes of its
    arguments, or numbers with which it does something else, as `again` records it, and not only
    because it finds a table. Of attributes that are written before they are read `read` says None.
    """
    parts = {key: read[key] for key in found.left if read.get(key) is not None}
    depends = _of_arguments(found)
    for key in parts:
        if id(found.left[key]) in depends:
            raise PlanError(
                f"the module reads {key[1]}, in which it has left what it made of its last"
                " arguments; a plan keeps nothing from call to call"
            )
    before = {(at, name): vars(part).get(name) for (at, name), part in parts.items()}
    counts = {k: found.left[k] for k, x in before.items() if type(x) in (bool, int, float)}
    if not counts:
        return
    other = None
    try:
        for key, x in counts.items():
            vars(parts[key])[key[1]] = x
        with suppress(Exception):  # it may miss tables that the number says are there
            other = again()
    finally:
        for key in counts:
            vars(parts[key])[key[1]] = before[key]
    if other is None or _said(other) == _said(found):
        return
    settled = not any(key in other.left for key in counts)  # as the length of a table does
    if not settled or not all(_keeps_tables(parts[key], found, depends) for key in counts):
        names = " and ".join(name for _, name in counts)
        raise PlanError(
            f"the module does something else in its next call, for it changes {names}; a plan"
            " keeps nothing from call to call"
        )


def refuse_shown(found: Recording) -> None:
    """PlanError: something that is no attribute of a module, such as the object that computes its
    attention, has kept a tensor of the recording, which has no numbers. Of what a file has kept,
    from which it has been taken, those are tables that depend on no number that comes with a
    call."""
    if any(made() is not None for made, _ in found.made):
        gc.collect()
    calls = [count for made, count in found.made if made() is not None]
    found.made = []
    if found.beside:
        depends = _of_a_call(found)
        calls += [_made_by(x, found) + 1 for x in found.beside if id(x) in depends]
    result = leaves(found.result)  # of which some objects have them, and are refused themselves
    if calls and not any(isinstance(x, Iterator) or holds_tensors(x) for x in result):
        source = found.calls[max(calls[0] - 1, 0)].source if found.calls else "of an argument"
        raise PlanError(
            "the forward keeps a tensor outside of the module's attributes, where a plan puts none;"
            f" return it, or, if it is a table, call the module once before ({source})"
        )


def _keeps_tables(part: nn.Module, found: Recording, depends: set[int]) -> bool:
    """Whether it leaves tensors, and none that depends on the numbers of arguments."""
    own = part._parameters | part._buffers
    tables = [x for (at, _), x in found.left.items() if at == id(part) and isinstance(x, Tensor)]
    tables += [x for name, x in found.written.items() if name.rpartition(".")[2] in own]
    return bool(tables) and not any(id(x) in depends for x in tables)


def _of_arguments(found: Recording) -> set[int]:
    """Ids of tensors that depend on the numbers of arguments."""
    return _made_of(found, found.inputs)


def _of_a_call(found: Recording) -> set[int]:
    """Ids of tensors that depend on arguments, parameters, buffers or draws."""
    drawn = (call for call in found.calls if draws(call.target))
    states = [*found.parameters.values(), *found.buffers.values()]
    return _made_of(found, [found.inputs, states, *(call.result for call in drawn)])


def _made_of(found: Recording, tensors: Any) -> set[int]:
    """Ids of these, and of those that are made of them."""
    made = set(map(id, tensors_in(tensors)))
    for call in found.calls:
        if any(id(x) in made for x in call.given):
            made.update(map(id, call.results))
    return made


def _made_by(x: Tensor, found: Recording) -> int:
    """Which call has made it; the first, if it comes with the call."""
    makers = (i for i, call in enumerate(found.calls) if any(x is y for y in call.results))
    return next(makers, 0)


def _said(found: Recording) -> list:
    """All calls, with what is no tensor among their arguments; and numbers that come with none."""
    calls = (
        (call.target, [x for x in call.given if not isinstance(x, Tensor)]) for call in found.calls
    )
    return [*calls, *(x.tolist() for _, x in found.constants)]
