"""Recorded launches in a file, for another process that compiles them.

A kernel is written by its name, and a tensor by what a compiled kernel depends on: its dtype, and
whether its address is a multiple of 16 bytes.
"""

import importlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from .launch_recorder import Launch


def write_launches(launches: Sequence[Launch], path: Path) -> None:
    """pickle.PicklingError, or what a value raises: one cannot be written."""
    with path.open("wb") as file:
        _Pickler(file).dump([tuple(launch) for launch in launches])


def read_launches(path: Path) -> list[Launch]:
    """Of a file that this user has written a moment ago: reading it can run any code."""
    with path.open("rb") as file:
        return [Launch(*launch) for launch in pickle.load(file)]


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, JITFunction):
            place = x.fn.__module__, x.fn.__name__
            if _function(*place) is not x:
                raise pickle.PicklingError(f"{'.'.join(place)} is another function")
            return _function, place
        if isinstance(x, Tensor):
            return _tensor, (x.dtype, x.data_ptr() % 16 == 0)
        return NotImplemented


def _function(module: str, name: str) -> JITFunction:
    return getattr(importlib.import_module(module), name)


def _tensor(dtype: torch.dtype, aligned: bool) -> Tensor:
    return torch.empty(2, dtype=dtype)[0 if aligned else 1 :]
