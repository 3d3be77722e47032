"""Work that nothing waits for, beside the main stream."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

_BUDGET = 384 * 2**20  # bytes; with 64 MiB the main stream waits, see docs/tried.md
# What may be held, in bytes; measured at batch 32 of unet64, whose pieces are 15 to 96 MiB
_HELD_BUDGET = 768 * 2**20
_LARGE = 8 * 2**20  # a tensor that makes a piece worth it

_Done = torch.cuda.Event | None  # None: it is


class SideStream:
    """Runs pieces of work on a second CUDA stream, in order; in a captured graph they become a
    branch that fills multiprocessors which the main one leaves idle. Without CUDA it just
    runs them.

    A piece sees what the main stream has done before `run`. What it reads must stay allocated until
    it is done, though the allocator knows of the main stream only: the tensors are kept until the
    main stream has waited for the piece. That happens once they and those of later pieces exceed
    `budget` bytes, but the last piece is never waited for.

    While `holding`, pieces that read large tensors are kept back, within other limits, until
    `release`: then they run on a third stream, beside the main stream's smaller kernels and the
    pieces given since. Pieces that are run `apart` go there, too. Their tensors stay allocated
    until `join`. The two streams do not wait for each other, but where they `meet`.

    With `behind` a piece is launched when so many more have been given, or at `join`. A graph lets
    the first of two successors follow its predecessor at once and the other a microsecond or more
    later: the first has to be the main stream's.
    """

    def __init__(self, device: torch.device, budget: int = _BUDGET, behind: int = 0) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._third = None if self._stream is None else torch.cuda.Stream(device)
        self.holding = False
        self._back: list[tuple[Callable[..., None], tuple[Tensor, ...]]] = []
        self._apart: list[tuple[Tensor, ...]] = []  # what the third stream reads
        self._budget, self._held, self._behind = budget, 0, behind
        self._given: deque[tuple[_Done, Callable[..., None], tuple[Tensor, ...]]] = deque()
        self._pending: deque[tuple[_Done, tuple[Tensor, ...]]] = deque()

    def run(self, work: Callable[..., None], *reads: Tensor) -> None:
        """Start `work(*reads)` after everything that the main stream has been given so far."""
        if self.holding and self._holds(reads):
            self._back.append((work, reads))
            return
        before = None if self._stream is None else torch.cuda.current_stream().record_event()
        self._given.append((before, work, reads))
        self._held += _size(reads)
        while len(self._given) > self._behind:
            self._launch()
        while self._held > self._budget and len(self._pending) > 1:
            self._wait_for_oldest()

    def release(self) -> None:
        """Hold no more, and start what was held after everything that the main stream has been
        given so far."""
        self.holding, back = False, self._back
        self._back = []
        if not back:
            return
        self._on_third(back)

    def apart(self, work: Callable[..., None], *reads: Tensor) -> None:
        """Start `work(*reads)` on the third stream, after everything that the main stream has been
        given so far."""
        self._on_third([(work, reads)])

    def meet(self) -> None:
        """Let what the two streams are given from now on wait for what the other was given."""
        self.release()
        while self._given:
            self._launch()
        if self._third is None:
            return
        if self._apart:
            self._stream.wait_stream(self._third)
        if self._pending:
            self._third.wait_stream(self._stream)
            self._apart.append(())  # so that `join` waits for it

    def join(self) -> None:
        """Let the main stream wait for all of it."""
        self.release()
        if self._apart and self._third is not None:
            torch.cuda.current_stream().wait_stream(self._third)
        self._apart = []
        while self._given:
            self._launch()
        while self._pending:
            self._wait_for_oldest()

    def _holds(self, reads: tuple[Tensor, ...]) -> bool:
        held = sum(_size(reads) for _, reads in self._back)
        largest = max((x.nbytes for x in reads), default=0)
        return largest >= _LARGE and held + _size(reads) <= _HELD_BUDGET

    def _on_third(self, pieces: list[tuple[Callable[..., None], tuple[Tensor, ...]]]) -> None:
        self._apart += [reads for _, reads in pieces]
        if self._third is None:
            for work, reads in pieces:
                work(*reads)
            return
        self._third.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._third):
            for work, reads in pieces:
                work(*reads)

    def _launch(self) -> None:
        before, work, reads = self._given.popleft()
        if self._stream is None:
            work(*reads)
            self._pending.append((None, reads))
            return
        self._stream.wait_event(before)
        with torch.cuda.stream(self._stream):
            work(*reads)
            self._pending.append((self._stream.record_event(), reads))

    def _wait_for_oldest(self) -> None:
        done, reads = self._pending.popleft()
        self._held -= _size(reads)
        if done is not None:
            torch.cuda.current_stream().wait_event(done)


def _size(tensors: tuple[Tensor, ...]) -> int:
    return sum(x.nbytes for x in tensors)
