"""Which calls draw. A draw of PyTorch's is an op, and a plan makes it in every call.

Those of Python's and NumPy's generators a recording would make once for all calls, and would seed
PyTorch's once; only the generators' state behind it tells. So a recording behind which it is
another is made again, with every such call watched.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import torch

from ..graph import PlanError


def draws(op: Any) -> bool:
    """Whether an op, or what is called in its place, asks a generator for numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def is_draw(op: torch._ops.OpOverload) -> bool:
    """Whether an op returns one tensor of new numbers, and does nothing else."""
    plain = op.namespace == "aten" and not op._schema.is_mutable
    return plain and draws(op) and len(op._schema.returns) == 1


LineOf = Callable[[FrameType], str]


def states() -> tuple:
    """Of the generators that Python, PyTorch and NumPy have for all."""
    numpy, found = sys.modules.get("numpy"), [random.getstate()]
    found.append(torch.default_generator.get_state().numpy().tobytes())
    if numpy is not None:
        kind, key, *rest = numpy.random.get_state()
        found += kind, key.tobytes(), *rest
    return tuple(found)


@contextmanager
def refused(line_of: LineOf) -> Iterator[None]:
    """Within the block PlanError, with its line, if this thread draws."""
    thread, numpy = threading.get_ident(), sys.modules.get("numpy")

    def watch(frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or not isinstance(getattr(function, "__self__", None), random.Random):
            return
        name = function.__name__
        while frame.f_back and frame.f_code.co_filename == random.__file__:
            frame, name = frame.f_back, frame.f_code.co_name  # randint, which asks getrandbits
        raise _refusal(f"random.{name}", line_of(frame))

    def instead(name: str, draw: Callable, *args: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            raise _refusal(name, line_of(sys._getframe(1)))
        return draw(*args, **options)

    # whose calls Python's profiler does not see
    calls = [(torch, "manual_seed"), (torch, "seed"), (torch.random, "manual_seed")]
    calls += [] if numpy is None else [(numpy.random, name) for name in _draws_of(numpy.random)]
    watched = [(module, name, getattr(module, name)) for module, name in calls]
    before = sys.getprofile()
    for module, name, draw in watched:
        setattr(module, name, partial(instead, f"{module.__name__}.{name}", draw))
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
        for module, name, draw in watched:
            setattr(module, name, draw)


def _draws_of(module: ModuleType) -> list[str]:
    """Methods of the generator that it has for all."""
    owner = module.rand.__self__
    return [name for name, x in vars(module).items() if getattr(x, "__self__", None) is owner]


def _refusal(name: str, line: str) -> PlanError:
    return PlanError(
        f"{name} would be called once for all calls, and has no place in a plan; draw by PyTorch's"
        f" own generator, or before the call ({line})"
    )
