"""Stopping a run by a signal without losing it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm


@dataclass
class Interrupted(Exception):
    """The run was stopped by a signal, after saving unless training was diverging."""

    signal: int
    checkpoint: Path | None  # the newest one, if there is one
    saved: bool = True  # just now

    def __str__(self) -> str:
        """What became of the run."""
        if self.saved:
            return f"saved {self.checkpoint}"
        kept = "there is no checkpoint"
        if self.checkpoint is not None:
            kept = f"the last good checkpoint is {self.checkpoint}"
        return f"not saved, since the gradient or the model was not finite; {kept}"


@contextmanager
def signals_received() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM within the block; a second one of a kind acts as usual."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def receive(number: int, _frame: object) -> None:
        received.append(number)
        signal.signal(number, before[number])
        if os.environ.get("RANK", "0") == "0":  # of several processes, the first says it
            tqdm.write("saving after this step, then stopping; a second signal stops at once")

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, receive)
    except ValueError:  # not the main thread, so signals are somebody else's
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
