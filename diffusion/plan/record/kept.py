"""What a forward pass leaves in the module's attributes, for its next call to read.

A plan leaves nothing there. That is as well where a module shows others what it has computed, or
keeps tables that it would make again. A module that reads what its last call has left computes
something else in each call, which no plan does.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from ..graph import PlanError
from ..trees import holds_tensors, leaves, tensors_in
from .draws import draws
from .module import Attributes
from .recording import Recording

Key = tuple[int, str]  # the id of a part, and an attribute's name
Left = dict[Key, Any]
_NUMBERS = (bool, int, float, complex, str, tuple)  # which control flow may ask for
_OWN = frozenset(vars(nn.Module())) - {"training"}  # PyTorch's attributes of every part


def left_in(before: Attributes, inner: Callable[[Tensor], Tensor]) -> Left:
    """Attributes that are not what they were, themselves or within, with tensors as the recording
    has them."""
    seen: dict[int, Any] = {}
    return {
        (id(part), name): _copied(x, inner, seen)
        for part, were in before.parts
        for name, x in vars(part).items()
        if name not in _OWN and before.is_changed(x, were.get(name))
    }


def put_back(left: Left, module: nn.Module, shaped: Callable[[Tensor], Tensor]) -> dict:
    """Attributes are what a recording has left in them, with other tensors of these shapes. Returns
    these by their ids, each with the recording's."""
    parts, seen, stand = {id(part): part for part in module.modules()}, {}, {}

    def standing(x: Tensor) -> Tensor:
        made = shaped(x)
        stand[id(made)] = made, x
        return made

    for (at, name), x in left.items():
        vars(parts[at])[name] = _copied(x, standing, seen)
    return stand


def refuse_kept(
    found: Recording, read: Mapping[Key, nn.Module | None], again: Callable[[Left], Recording]
) -> None:
    """PlanError: a forward pass that begins with what the recorded one has left in attributes, as
    `again` records it, reads what that has made of its arguments or has drawn, or does something
    else, and not only because it finds a table. Of attributes that are written before they are read
    `read` says None."""
    parts = {key: read[key] for key in found.left if read.get(key) is not None}
    depends = _of_arguments(found)
    made = {key: _ids(found.left[key]) & depends for key in parts}
    counts = {
        key
        for key, part in parts.items()
        if not tensors_in(left := found.left[key])
        or _numbers(left) != _numbers(vars(part).get(key[1]))
    }
    other = None
    if parts:
        with suppress(Exception):  # such as of a table's numbers, on which something depends
            other = again(found.left)
    if other is None:
        used = set().union(*made.values())
    else:
        given = [*(x for call in other.calls for x in call.given), *leaves(other.result)]
        used = {id(x) for _, x in (other.last[id(x)] for x in given if id(x) in other.last)}
    for (at, name), tensors in made.items():
        if tensors & used:
            raise PlanError(
                f"{type(parts[at, name]).__name__} reads {name}, in which it has left what it made"
                " of its last arguments or has drawn; a plan keeps nothing from call to call: give"
                " it as an argument, or keep nothing"
            )
    if other is None or not counts or _said(other) == _said(found):
        return
    settled = not counts & set(other.left)  # as the length of a table does
    if not settled or not all(_keeps_tables(parts[key], found, depends) for key in counts):
        names = " and ".join(name for _, name in sorted(counts, key=lambda key: key[1]))
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
    tables = [x for (at, _), left in found.left.items() if at == id(part) for x in tensors_in(left)]
    tables += [x for name, x in found.written.items() if name.rpartition(".")[2] in own]
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
    return set(map(id, tensors_in(tree)))


def _numbers(tree: Any) -> list:
    return [x for x in leaves(tree) if isinstance(x, _NUMBERS)]


def _copied(x: Any, of_tensor: Callable[[Tensor], Tensor], seen: dict[int, Any]) -> Any:
    """A copy of an attribute, with other tensors: of its dicts, lists and tuples. What is there
    twice is so in the copy."""
    if id(x) in seen:
        return seen[id(x)]
    if isinstance(x, Tensor):
        y = of_tensor(x)
    elif type(x) is tuple:
        y = tuple(_copied(z, of_tensor, seen) for z in x)
    elif isinstance(x, dict | list):
        y = seen[id(x)] = copy.copy(x)  # which may be in itself
        for key, z in list(y.items() if isinstance(y, dict) else enumerate(y)):
            y[key] = _copied(z, of_tensor, seen)
    else:
        return x
    seen[id(x)] = y
    return y


def _said(found: Recording) -> list:
    """All calls, with what is no tensor among their arguments; and numbers that come with none."""
    calls = (
        (call.target, [x for x in call.given if not isinstance(x, Tensor)]) for call in found.calls
    )
    return [*calls, *(x.tolist() for _, x in found.constants)]
