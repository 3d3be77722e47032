"""What a module may have when it is recorded, and what it may not change."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ..graph import PlanError
from ..trees import flatten


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


def refuse_silent_hooks(module: nn.Module, calls: list) -> None:
    """Until attributes are what they were: a forward hook that returns nothing keeps or prints what
    it gets, which it would get once, without numbers. So does one before the forward, unless it
    calls PyTorch or sets an attribute of the part, as an older spectral norm does."""

    def heard(name: str, hook: Callable, before: bool) -> Callable:
        def call(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
            count, were = len(calls), [*vars(part).values()]
            result = hook(part, *args, **kwargs)
            done = before and (len(calls) > count or not same(were, [*vars(part).values()]))
            if result is None and not done:
                raise PlanError(
                    f"a forward hook that returns nothing has no place in a plan ({name})"
                )
            return result

        return call

    def same(a: list, b: list) -> bool:
        return len(a) == len(b) and all(map(is_, a, b))

    for name, part in module.named_modules():
        where = name or type(part).__name__
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            if hooks := vars(part)[kind]:
                before = kind == "_forward_pre_hooks"
                every = ((key, heard(where, hook, before)) for key, hook in hooks.items())
                vars(part)[kind] = OrderedDict(every)


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
