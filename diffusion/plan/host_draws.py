"""Draws from Python's and NumPy's generators, which a recording would make once for all calls.

A draw of PyTorch's is an op, and seen. Of these two only the state behind a recording tells; so a
recording behind which it is another is made again, with every draw watched.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, ModuleType
from typing import Any

from .graph import PlanError

LineOf = Callable[[FrameType], str]


def states() -> tuple:
    """Of the generators that Python and NumPy have for all."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, key, *rest = numpy.random.get_state()
    return random.getstate(), kind, key.tobytes(), *rest


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
            raise _refusal(f"numpy.random.{name}", line_of(sys._getframe(1)))
        return draw(*args, **options)

    draws = {} if numpy is None else _draws_of(numpy.random)
    before = sys.getprofile()
    for name, draw in draws.items():  # whose calls Python's profiler does not see
        setattr(numpy.random, name, partial(instead, name, draw))
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
        for name, draw in draws.items():
            setattr(numpy.random, name, draw)


def _draws_of(module: ModuleType) -> dict[str, Callable]:
    """Methods of the generator that it has for all."""
    owner = module.rand.__self__
    return {k: v for k, v in vars(module).items() if getattr(v, "__self__", None) is owner}


def _refusal(name: str, line: str) -> PlanError:
    return PlanError(
        f"{name} would be drawn once for all calls, and has no place in a plan ({line})"
    )
