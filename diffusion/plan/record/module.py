"""What a module may have when it is recorded, and that it is the same module behind it."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ..graph import PlanError
from ..trees import flatten, state_of


def refuse_parts(module: nn.Module) -> None:
    for name, part in module.named_modules():
        where = name or type(part).__name__
        if isinstance(part, torch.jit.ScriptModule):
            raise PlanError(
                "a module of TorchScript, which hides its calls, has no plan; give the one that it"
                f" was made of ({where})"
            )
        if part._backward_hooks or part._backward_pre_hooks:
            raise PlanError(f"a backward hook has no place in a plan ({where} has one)")


def refuse_silent_hooks(module: nn.Module) -> None:
    """Until attributes are what they were: a forward hook that returns nothing keeps or prints what
    it gets, which it would get once, without numbers."""

    def heard(name: str, hook: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            if result is None:
                raise PlanError(
                    f"a forward hook that returns nothing has no place in a plan ({name})"
                )
            return result

        return call

    for name, part in module.named_modules():
        if part._forward_hooks:
            where = name or type(part).__name__
            hooks = ((key, heard(where, hook)) for key, hook in part._forward_hooks.items())
            vars(part)["_forward_hooks"] = OrderedDict(hooks)


def refuse_changes(leaves: list[Any], spec: pytree.TreeSpec, given: tuple) -> None:
    """Of a list or a dict among the arguments, which the caller has again behind the call."""
    now, spec_now = flatten(given)
    if spec_now != spec or any(a is not b for a, b in zip(now, leaves, strict=True)):
        raise PlanError("the module changes a list, a dict or a dataclass among its arguments")


def refuse_replaced(before: dict[str, Tensor], now: dict[str, Tensor]) -> None:
    """Of a parameter or buffer, in whose place the forward pass has put another tensor."""
    for place, x in before.items():
        if now[place] is not x:
            raise PlanError(f"the module sets {place} in its forward; write to it, as by `copy_`")


def places_of(module: nn.Module) -> dict[str, str]:
    """Where tensors of the module's states are, and under which name each comes: a tensor may be of
    several parts, and a part, which is here once, of several others."""
    first = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
    every = (
        (f"{place}." * bool(place) + key, x)
        for place, part in _places_of_parts(module, "", set())
        for key, x in (part._parameters | part._buffers).items()
    )
    return {place: first[id(x)] for place, x in every if x is not None}


def _places_of_parts(
    module: nn.Module, place: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Each once, by the attributes that lead to it, which a class's own `named_modules` may not
    say."""
    if module not in seen:
        seen.add(module)
        yield place, module
        for name, part in module._modules.items():
            if part is not None:
                yield from _places_of_parts(part, f"{place}." * bool(place) + name, seen)


_NUMBERS = (bool, int, float, str)
_SEEN = (Tensor, nn.Module, torch.dtype, torch.device, type, FunctionType, *_NUMBERS)


class Attributes:
    """What the attributes of a module's parts were, and what was in their dicts, lists, sets and
    objects."""

    def __init__(self, module: nn.Module) -> None:
        self.parts = [(part, dict(vars(part))) for part in module.modules()]
        self._inside: dict[int, tuple] = {}  # with copies, by their ids
        for _, attributes in self.parts:
            self._note(attributes)

    def _note(self, x: dict | list | tuple) -> None:
        for y in list(x.values() if isinstance(x, dict) else x):
            if y is None or isinstance(y, _SEEN) or id(y) in self._inside:
                continue
            now = _inside(y)
            kind = dict if isinstance(now, dict) else set if isinstance(now, set) else list
            self._inside[id(y)] = y, kind(now)
            if isinstance(y, dict | list | tuple):
                self._note(y)

    def is_changed(self, x: Any, was: Any) -> bool:
        """Whether something else is in its place, or within it."""
        if x is was and id(x) not in self._inside:
            return False
        rest, seen = [(x, was)], set()
        while rest:
            x, was = rest.pop()
            if isinstance(x, tuple) and isinstance(was, tuple) and len(x) == len(was):
                rest += zip(x, was, strict=True)
            elif x is not was:
                if not isinstance(x, _NUMBERS) or type(x) is not type(was) or x != was:
                    return True
            elif id(x) in self._inside and id(x) not in seen:
                seen.add(id(x))
                now, was = _inside(x), self._inside[id(x)][1]
                if len(now) != len(was) or (isinstance(now, set) and now != was):
                    return True
                if isinstance(now, dict):
                    rest += ((y, was.get(key)) for key, y in now.items())
                elif isinstance(now, list):
                    rest += zip(now, was, strict=True)
        return False

    def restore(self) -> None:
        for part, attributes in self.parts:
            vars(part).clear()
            vars(part).update(attributes)
        for x, was in self._inside.values():
            if isinstance(x, dict) and not _same(list(x.items()), list(was.items())):
                x.clear()
                x.update(was)
            elif isinstance(x, list) and not _same(x, was):
                x[:] = was


def _inside(x: Any) -> Any:
    """x if it is a dict, a list, a tuple or a set, or else its attributes."""
    return x if isinstance(x, dict | list | tuple | set) else state_of(x)


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[Attributes]:
    """What attributes are. Behind the block they, and what is in their dicts and lists, are so
    again: a module may keep tensors from call to call, and those of a recording have no numbers."""
    before = Attributes(module)
    try:
        yield before
    finally:
        before.restore()


def _same(a: list, b: list) -> bool:
    """Whether the same objects are in both."""
    a, b = (
        [id(y) for x in given for y in (x if isinstance(x, tuple) else (x,))] for given in (a, b)
    )
    return a == b
