"""Processes that work together watch each other: if one hangs the others end.

A collective waits for all processes, and nobody can say how long: while the first one draws or
saves, minutes are right. So each process has a thread that increments a counter in the store in
which they met, and reads the counters of the others. The thread stops if a step of training takes
too long; a process that is suspended, or whose host is gone, does not count either. A process that
sees another one's counter stand still says so and ends, without waiting for anything, so that
torchrun or Slurm can start all of them again.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

SECONDS = 25.0  # that a process may be silent, and that it may take for a step before it is
_BEATS = 10  # within them
_SLOWER = 4  # times as long as the slowest step before: then a step hangs, if that is longer
EXIT_CODE = 1


class Watch:
    """Begins to count and to look. `store` is used by this thread alone. Ends by `close`."""

    def __init__(self, store: dist.Store, rank: int, count: int, seconds: float) -> None:
        self._store, self._rank, self._seconds = store, rank, seconds
        now = time.monotonic()
        self._seen = {other: (0, now) for other in range(count) if other != rank}
        self._stepped: float | None = None  # when the last step ended; None: no step is being made
        self._slowest: float | None = None  # of the steps after the first
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._thread.start()

    def step(self) -> None:
        """A step of training has ended, and another one begins. What the first one takes is not
        counted: it compiles."""
        now = time.monotonic()
        if self._stepped is not None:
            self._slowest = max(self._slowest or 0.0, now - self._stepped)
        self._stepped = now

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around what takes as long as it takes: drawing, saving, waiting for the others."""
        stepped, self._stepped = self._stepped, None
        try:
            yield
        finally:
            self._stepped = None if stepped is None else time.monotonic()

    def close(self, *, well: bool) -> None:
        """Stop. The others then go on without this process if it ended `well`."""
        self._closed.set()
        self._thread.join()
        if well:
            self._store.set(f"left/{self._rank}", "")

    def _run(self) -> None:
        pause = self._seconds / _BEATS
        while not self._closed.wait(pause):
            try:
                if self._is_moving():
                    self._store.add(f"beat/{self._rank}", 1)
                silent = self._silent()
            except RuntimeError as error:  # the store is gone, and with it the process that had it
                if self._closed.is_set():
                    return
                _end(f"the store of the processes is gone ({str(error).splitlines()[0]})")
            if silent is not None:
                _end(
                    f"process {silent} has not been heard of for {self._seconds:.0f} s: it hangs,"
                    " is suspended or gone"
                )

    def _is_moving(self) -> bool:
        stepped, slowest = self._stepped, self._slowest
        if stepped is None or slowest is None:
            return True
        return time.monotonic() - stepped < max(self._seconds, _SLOWER * slowest)

    def _silent(self) -> int | None:
        """The process that has been silent for too long, if there is one."""
        now = time.monotonic()
        for rank, (beats, heard) in self._seen.items():
            new = self._store.add(f"beat/{rank}", 0)
            if new != beats:
                self._seen[rank] = new, now
            elif now - heard > self._seconds and not self._store.check([f"left/{rank}"]):
                return rank
        return None


def _end(reason: str) -> None:
    print(f"error: {reason}; this process ends as well", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)  # the main thread may wait for the process that hangs
