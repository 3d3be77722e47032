"""Work that nothing waits for, beside the main stream."""

from collections import deque
from collections.abc import Callable

import torch


class SideStream:
    """Runs pieces of work on a second CUDA stream, in order; in a captured graph they become a
    branch that fills multiprocessors which the main one leaves idle. Without CUDA it just
    runs them.

    A piece sees what the main stream has done before `run`. What it reads must stay allocated until
    it is done, though the allocator knows of the main stream only: the closure is kept, and with it
    the tensors it names, until the main stream has waited for the piece, `lag` pieces later.
    """

    def __init__(self, device: torch.device, lag: int = 6) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lag = lag
        self._pending: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def run(self, work: Callable[[], None]) -> None:
        """Start `work` after everything that the main stream has been given so far."""
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            done = self._stream.record_event()
        self._pending.append((done, work))
        while len(self._pending) > self._lag:
            self._wait_for_oldest()

    def join(self) -> None:
        """Let the main stream wait for all of it."""
        while self._pending:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        done, _ = self._pending.popleft()
        torch.cuda.current_stream().wait_event(done)
