"""The streams on which a list of moves runs: what waits for what has been decided before."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class OnStream(Protocol):
    """A move."""

    stream: int  # 0: the current one
    waits: tuple["OnStream", ...]  # moves of other streams, which have to be done
    is_awaited: bool  # by a move of another stream


class Streams:
    """The current stream of a GPU and `others` beside it; on a CPU there is one thing after the
    other."""

    def __init__(self, device: torch.device, others: int) -> None:
        self._is_gpu = device.type == "cuda"
        self._others = [torch.cuda.Stream(device) for _ in range(others if self._is_gpu else 0)]
        self._done: dict[OnStream, torch.cuda.Event] = {}
        self._used: set[int] = set()  # since the last `join`

    @contextmanager
    def on(self, move: OnStream) -> Iterator[None]:
        """Within the block what is launched is of the move."""
        if not self._is_gpu:
            yield
            return
        chain = torch.cuda.current_stream()
        stream = self._others[move.stream - 1] if move.stream else chain
        for other in move.waits:
            stream.wait_event(self._done[other])
        if move.stream:
            self._used.add(move.stream)
            with torch.cuda.stream(stream):
                yield
        else:
            yield
        if move.is_awaited:
            self._done[move] = stream.record_event()

    def join(self) -> None:
        """Let the current stream wait for the others."""
        if self._is_gpu:
            for number in sorted(self._used):
                torch.cuda.current_stream().wait_stream(self._others[number - 1])
        self._used, self._done = set(), {}
