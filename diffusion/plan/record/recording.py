"""A recording: each call of PyTorch that a module makes, and the tensors that these begin with."""

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from .state import Left
from .variables import Code


@dataclass
class Call:
    """One call of PyTorch. Tensors are known by their `id`."""

    target: torch._ops.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    result: Any  # a tensor, or several
    function: str  # what Python called, such as fft_rfft
    source: str  # the line, and the module that the line was run for
    differentiable: bool  # False: gradients are recorded around the module, but not here

    @property
    def given(self) -> list[Any]:
        """All that is in its arguments, tensors and others."""
        return pytree.tree_leaves((self.args, self.kwargs))

    @property
    def results(self) -> list[Tensor]:
        """Its results, also if it has one."""
        return pytree.tree_leaves(self.result)


@dataclass
class Recording:
    """All calls in their order, and the tensors that they start from. Every tensor is alive, so
    that no two have one `id`."""

    inputs: list[Tensor | Any]  # leaves of (args, kwargs)
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    differentiable: bool  # whether gradients are recorded, where the module is called
    calls: list[Call] = field(default_factory=list)
    constants: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # in place of which
    # parameters and buffers that are written to, and what they are behind it
    written: dict[str, Tensor] = field(default_factory=dict)
    rewritten: dict[int, str] = field(default_factory=dict)  # by id, what parameters become
    left: Left = field(default_factory=dict)  # what is another behind it
    # tensors in place of those that another recording has left, by their ids, with these
    last: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    beside: list[Tensor] = field(default_factory=list)  # what is left, but for attributes
    # what Python was given, and how many calls there were then
    made: list[tuple[ref[Tensor], int]] = field(default_factory=list)
    result: Any = None
    code: Code = field(default_factory=dict)  # which has run, and calls PyTorch
