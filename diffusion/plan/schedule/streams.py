"""Streams, synchronisation and lifetimes of tensors.

`order` lists the moves in order; this module gives each its stream and what it waits for. The main
stream runs the critical path. The rules are:

- Pieces of work that the critical path does not wait for go to a second stream, in their order. A
  piece starts after everything that the main stream had done when the piece was issued. It is
  launched when `BEHIND` more have been issued, or at the end: a CUDA graph starts the first of two
  successors at once and the other one a microsecond or more later, and the first should be the main
  stream's.
- The inputs of a piece are kept until the main stream has waited for it, since the allocator knows
  that stream only; so are those of nodes that wait for others of their piece (`later`). Once they
  exceed `BUDGET` bytes, the main stream waits for the oldest piece, but never for the last one.
- In backward, while images are large (`hold`), pieces that read a tensor of `LARGE` bytes are held,
  within `HELD_BUDGET`, until `release`. They then run on a third stream, beside the main stream's
  smaller kernels and later pieces. Sums are added up there, too. Their inputs are kept to the end.
  While something is held nothing is reported as complete; later reports come from the third
  stream, behind the second one.
- The two streams wait for each other at `sync`; the main stream waits for both at the end.
- A value is released after its last reader; dx that overwrites a summand uses its memory.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from ..graph import Value
from .moves import MAIN, SECOND, THIRD, Move

BEHIND = 1  # pieces
BUDGET = 384 * 2**20  # bytes; with 64 MiB the main stream waits, see docs/tried.md
HELD_BUDGET = 768 * 2**20  # measured at batch 32 of unet64, whose pieces are 15 to 96 MiB
LARGE = 8 * 2**20  # bytes of a tensor that makes holding a piece worth it
ALIGNMENT = 256  # bytes


def on_streams(order: Iterable[Move], listens: bool) -> list[Move]:
    """The moves of a backward pass on their streams. `listens`: somebody wants to know how far it
    is."""
    streams = _Streams()
    for move in order:
        if move.what != "ready" or listens:
            streams.add(move)
    streams.end()
    return streams.moves


class _Streams:
    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.last: dict[int, Move] = {}  # of each stream
        self.asked: dict[int, list[Move]] = {SECOND: [], THIRD: []}  # that its next one waits for
        self.holding = self.released = False
        self.held: list[Move] = []
        self.given: deque[tuple[Move, Move]] = deque()  # pieces; what main had last before each
        self.pending: deque[tuple[Move, int]] = deque()  # pieces, and bytes that they read
        self.kept = 0  # bytes that given and pending pieces read
        self.later: dict[Value, None] = {}  # what nodes read that are in no piece yet
        self._put(Move("begin"))

    def add(self, move: Move) -> None:
        match move.what:
            case "beside" | "weights" | "weight" | "ready":
                self._give(move)
            case "later":
                self.later |= move.reads
                self._wait_for_oldest()
            case "hold" | "keep":
                self.holding = move.what == "hold"
            case "release":
                self._release()
            case "sync":
                self._sync()
            case "sums" | "all sums":
                self._on_third([move])
            case _:
                self._put(replace(move))

    def end(self) -> None:
        self._release()
        self._launch_all()

    def _put(self, move: Move) -> Move:
        for other in move.waits:
            other.is_awaited = True
        self.moves.append(move)
        self.last[move.stream] = move
        return move

    def _give(self, move: Move) -> None:
        if self.holding and self._holds(move):
            self.held.append(move)
            return
        if move.what == "ready" and self.held:  # a later one will say so, and more
            return
        self.given.append((move, self.last[MAIN]))
        self.kept += _bytes(move)
        self.later = {}
        while len(self.given) > BEHIND:
            self._launch(move.pixels)
        self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """Until the rest keeps no more than it may."""
        later = sum(value.bytes for value in self.later)
        while self.kept + later > BUDGET and len(self.pending) > 1:
            oldest, size = self.pending.popleft()
            self.kept -= size
            self._put(Move("wait", waits=(oldest,)))

    def _holds(self, move: Move) -> bool:
        held = sum(map(_bytes, self.held))
        largest = max((v.bytes for v in move.reads), default=0)
        return largest >= LARGE and held + _bytes(move) <= HELD_BUDGET

    def _launch(self, pixels: int | None) -> None:
        """The oldest that was given. It may overlap as what is given now may."""
        piece, before = self.given.popleft()
        if piece.what == "ready" and self.released:  # what was held is complete, too
            behind = (self.last[SECOND],) if SECOND in self.last else ()
            self._put(replace(piece, stream=THIRD, waits=(before, *behind)))
            return
        waits = before, *self._asked_of(SECOND)
        made = self._put(replace(piece, stream=SECOND, waits=waits, pixels=pixels))
        self.pending.append((made, _bytes(piece)))

    def _launch_all(self) -> None:
        while self.given:
            self._launch(None)

    def _asked_of(self, stream: int) -> list[Move]:
        asked, self.asked[stream] = self.asked[stream], []
        return asked

    def _on_third(self, pieces: Sequence[Move]) -> None:
        waits = self.last[MAIN], *self._asked_of(THIRD)
        for piece in pieces:
            self._put(replace(piece, stream=THIRD, waits=waits, pixels=None))
            waits = ()

    def _release(self) -> None:
        self.holding, held, self.held = False, self.held, []
        if held:
            self._on_third(held)
            self.released = True

    def _sync(self) -> None:
        self._release()
        self._launch_all()
        self.released = False
        for stream, other in ((SECOND, THIRD), (THIRD, SECOND)):
            if other in self.last:
                self.asked[stream].append(self.last[other])


def _bytes(move: Move) -> int:
    return sum(v.bytes for v in move.reads)


# --- lifetimes ------------------------------------------------------------------------------------


def set_lifetimes(moves: Sequence[Move], kept: set[Value]) -> None:
    """Note with each move the values that die behind it: their last reader is done, and the main
    stream, which owns the memory, has waited for it. If it never waits, they live to the end."""
    awaited = {piece: i for i, m in enumerate(moves) if m.what == "wait" for piece in m.waits}
    end_of: dict[Value, int] = {}
    for i, move in enumerate(moves):
        own = {v for node in move.before for v in node.outputs.values()}
        end = i if move.stream == MAIN else awaited.get(move, len(moves))
        for value in (*move.reads, *move.made):
            end_of[value] = max(end_of.get(value, 0), i if value in own else end)
    for value, i in end_of.items():
        if i < len(moves) and value not in kept:
            moves[i].dying = (*moves[i].dying, value)


def alive(moves: Sequence[Move], placed: Collection[Value] = ()) -> list[int]:
    """Bytes of what these have made that is alive during each move, without gradients in their
    places. Where there are such, rows of sums have places, too."""
    owner: dict[Value, Value] = {}
    born: dict[Value, int] = {}
    dies: dict[Value, int] = {}
    for i, move in enumerate(moves):
        for node in move.all_nodes:
            over = node.inputs.get("x") if node.is_view else None
            for role, value in node.outputs.items():
                over_dz = node.inputs.get(node.attrs.get("over")) if role == "dx1" else None
                source = over_dz or over
                if node.is_view or source is not None:
                    if source in owner:
                        owner[value] = owner[source]
                elif value in placed or placed and (role == "rows" or node.op == "row_sums"):
                    continue
                else:
                    owner[value], born[value] = value, i
    end_of = {value: i for i, move in enumerate(moves) for value in move.dying}
    for value, memory in owner.items():
        dies[memory] = max(dies.get(memory, 0), end_of.get(value, len(moves) - 1))
    change = [0] * (len(moves) + 1)
    for memory, i in born.items():
        change[i] += rounded(memory.bytes)
        change[dies[memory] + 1] -= rounded(memory.bytes)
    return list(accumulate(change))[:-1]


def rounded(size: int) -> int:
    """Bytes that an allocator takes."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
