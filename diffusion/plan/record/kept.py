"""What a forward pass leaves for its next call to read (`state`).

A plan leaves nothing there. That is as well where a module shows others what it has computed, or
keeps tables that it would make again. A module that reads what its last call has left computes
something else in each call, which no plan does.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ..graph import PlanError
from ..trees import holds_tensors, leaves, tensors_in
from .draws import draws
from .recording import Recording
from .state import Change, Place, tensors_left


def refuse_kept(
    found: Recording,
    read: Mapping[tuple[int, str], nn.Module | None],
    again: Callable[[Recording], Recording],
) -> None:
    """PlanError, with the places, unless what is left is harmless. It is if a forward pass that
    begins with it, as `again` records it, makes the same results in the same way, where a table
    that it finds is what the first has made, and does not depend on arguments or draws. It also is
    if that pass leaves it as it is, and it is about a table in a buffer.

    Attributes that are written before they are read, of which `read` says None, are not looked at.
    """
    left = [x for x in found.left.values() if read.get(x.place[:2], 0) is not None]
    if not left:
        return
    depends = _of_arguments(found)
    changed = {x.place for x in left}
    other = None
    with suppress(Exception):  # such as of a table's numbers, on which something depends
        other = again(found)
    if other is None:
        used = set().union(*(_ids(x.value) for x in left))
    else:
        given = [*(x for call in other.calls for x in call.given), *leaves(other.result)]
        used = {id(x) for _, x in (other.last[id(x)] for x in given if id(x) in other.last)}
    for x in found.left.values():
        if _ids(x.value) & depends & used:
            raise PlanError(
                f"{x.place.of} reads {x.place.name}, in which it has left what it made of its last"
                " arguments or has drawn; a plan keeps nothing from call to call: give it as an"
                " argument, or keep nothing"
            )
    if other is None:
        settled = any(_ids(x.value) for x in found.left.values())
    elif not any(map(_is_another_part, left)) and _say_the_same(found, other):
        return
    else:  # as the length of a table is
        settled = not changed & {x.place for x in other.left.values()}
        settled = settled and all(_keeps_tables(x, read, found, depends) for x in changed)
    if not settled:
        names = " and ".join(sorted(map(str, changed)))
        raise PlanError(
            f"the module does something else in its next call, for it changes {names}; a plan"
            " keeps nothing from call to call"
        )


def _is_another_part(x: Change) -> bool:
    """In the place of one, whose parameters the recordings of both calls name alike."""
    return isinstance(x.was, nn.Module) and isinstance(x.value, nn.Module)


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


def _keeps_tables(place: Place, read: Mapping, found: Recording, depends: set[int]) -> bool:
    """Whether it is of a part that writes to buffers, and nothing that depends on the numbers of
    arguments."""
    part = read.get(place[:2])
    own = part._parameters | part._buffers if part is not None else {}
    tables = [x for name, x in found.written.items() if name.rpartition(".")[2] in own]
    return bool(tables) and not any(id(x) in depends for x in tables)


def _of_arguments(found: Recording) -> set[int]:
    """Ids of tensors that depend on the numbers of arguments or on draws."""
    drawn = (call for call in found.calls if draws(call.target))
    return _made_of(found, [found.inputs, *(call.result for call in drawn)])


def _of_a_call(found: Recording) -> set[int]:
    """Ids of tensors that depend on arguments, draws, parameters or buffers."""
    states = [*found.parameters.values(), *found.buffers.values()]
    return _of_arguments(found) | _made_of(found, states)


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


def _ids(tree: Any) -> set[int]:
    return set(map(id, tensors_left(tree)))


def _say_the_same(found: Recording, other: Recording) -> bool:
    """Whether both make the same results, and the same of buffers: of the same tensors, of which
    the other begins with some that the first has made."""
    known: dict[tuple, int] = {}
    names = _names(found, known, {})
    begun = {i: names.get(id(x)) for i, (_, x) in other.last.items()}
    return _said(found, names) == _said(other, _names(other, known, begun))


def _said(found: Recording, names: dict[int, Any]) -> list:
    made = [*leaves(found.result), *found.written, *found.written.values()]
    drawn = sum(draws(call.target) for call in found.calls)
    return [drawn, *(names.get(id(x)) if isinstance(x, Tensor) else repr(x) for x in made)]


def _names(found: Recording, known: dict[tuple, int], names: dict[int, Any]) -> dict[int, Any]:
    """Of its tensors by their ids: two that are made in the same way have one."""

    def name(x: Tensor, *made: Any) -> None:
        names[id(x)] = known.setdefault(made, len(known))

    for i, x in enumerate(found.inputs):
        name(x, "input", i)
    for state, x in (found.parameters | found.buffers).items():
        name(x, state)
    for x, constant in found.constants:
        name(x, constant.dtype, repr(constant.tolist()))
    drawn = 0
    for call in found.calls:
        drawn += draws(call.target)
        given = (names.get(id(x)) if isinstance(x, Tensor) else repr(x) for x in call.given)
        of = call.target.overloadpacket, call.target._overloadname, *given
        for i, x in enumerate(call.results):
            name(x, *of, i, draws(call.target) and drawn)
    return names
