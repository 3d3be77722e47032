"""The line of the module that a call comes from, as plans and errors name it."""

import os
import traceback
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import triton_kernels

# of what there is between a module and PyTorch
_FOLDERS = (
    Path(torch.__file__).parent,
    Path(triton_kernels.__file__).parent,
    Path(__file__).parents[1],
)
_PASSED = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)


class Lines:
    """Says where a frame of a module's call is: the innermost line that is neither PyTorch's nor
    ours, and the innermost part of the module."""

    def __init__(self, module: nn.Module) -> None:
        self.names = {id(part): name for name, part in module.named_modules()}

    def of(self, frame: FrameType) -> str:
        """Of what this frame calls."""
        return self._first(traceback.walk_stack(frame))

    def of_error(self, error: Exception, frame: FrameType) -> str:
        """Where it was raised, which was caught in this frame."""
        raised = reversed(list(traceback.walk_tb(error.__traceback__)))
        return self._first(chain(raised, traceback.walk_stack(frame)))

    def _first(self, frames: Iterable[tuple[FrameType, int]]) -> str:
        place = name = ""
        for frame, line in frames:
            file = frame.f_code.co_filename
            if not place and not file.startswith(_PASSED):
                place = f"{'/'.join(file.split('/')[-2:])}:{line}"
            if not name and frame.f_code.co_varnames[:1] == ("self",):
                name = self.names.get(id(frame.f_locals.get("self")), "")
            if place and name:
                break
        return f"{place or '?'} of {name}" if name else place or "?"
