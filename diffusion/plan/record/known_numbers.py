"""Numbers that a forward pass reads of a tensor, where they depend on shapes and constants alone:
whether a mask that it has made leaves anything out. They are made of the calls that are recorded.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from .draws import draws
from .recording import Recording


def unrecorded(function: Callable[[], Any]) -> Any:
    """What a function returns in another thread, where nothing is recorded and nothing is cast;
    None, if it raises: then there is no such result."""
    made: list[Any] = []

    def run() -> None:
        try:
            made.append(function())
        except Exception:  # whatever it is, of code that is not ours
            return

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return made[0] if made else None


def known_numbers(x: Tensor, found: Recording) -> Tensor | None:
    """A tensor of the recording with its numbers; None: they depend on the call's."""
    makers = {id(y): call for call in found.calls for y in call.results}
    made = {id(twin): y for twin, y in found.constants}

    def numbers(y: Tensor) -> Tensor:
        if id(y) not in made:
            call = makers[id(y)]  # KeyError: it comes with the call
            if draws(call.target) or call.target._schema.is_mutable:
                raise ValueError(f"{call.target} has other results in another call")
            name = call.target._opname
            of_shape = name.endswith("_like") or name.startswith("new_")
            given = _shaped if of_shape else numbers
            args, kwargs = pytree.tree_map_only(Tensor, given, (call.args, call.kwargs))
            kwargs = kwargs | ({"device": "cpu"} if "device" in kwargs else {})
            result = call.target(*args, **kwargs)
            results = [result] if isinstance(result, Tensor) else result
            made.update(zip(map(id, call.results), results, strict=True))
        return made[id(y)]

    return unrecorded(lambda: numbers(x))


def _shaped(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)
