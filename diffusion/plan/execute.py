"""Runs a list: `run` of nodes, `run_moves` of moves, on their streams, which releases each value
after its last reader. Every plan is run by these."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from triton_kernels.runtime.dependent_launch import dependent_launches

from .graph import Node, Value
from .launch.table import launch_reference
from .schedule.moves import Move


def run(
    nodes: Iterable[Node],
    values: dict[Value, Tensor],
    launch: Callable[[Node, Mapping], dict] = launch_reference,
) -> dict[Value, Tensor]:
    """Launch the nodes in their order. `values` has what they begin with, and gets results."""
    for node in nodes:
        values.update(launch(node, values))
    return values


def run_moves(
    moves: Iterable[Move],
    values: dict[Value, Tensor],
    streams: "Streams",
    launch: Callable[[Node, Mapping], dict],
    other: Callable[[Move], bool] | None = None,
    watch: Callable[[Move, dict[Value, Tensor]], None] | None = None,
) -> dict[Value, Tensor]:
    """`run` of a list in which streams and the lives of values are decided. The current stream has
    not waited for the others yet, see `Streams.join`. `other` does what a move is besides launches
    of nodes one by one, and returns whether it is anything else; `watch` is told of each that has
    been made, and of the values that are there."""
    for move in moves:
        overlap = nullcontext() if move.pixels is None else dependent_launches(move.pixels)
        with streams.on(move), overlap:
            run(move.before, values, launch)
            if other is None or not other(move):
                run(move.nodes, values, launch)
        if watch is not None:
            watch(move, values)
        for value in move.dying:
            values.pop(value, None)
    return values


class Streams:
    """The current stream of a GPU and `others` beside it; on a CPU there is one thing after the
    other."""

    def __init__(self, device: torch.device, others: int) -> None:
        self._is_gpu = device.type == "cuda"
        self._others = [torch.cuda.Stream(device) for _ in range(others if self._is_gpu else 0)]
        self._done: dict[Move, torch.cuda.Event] = {}
        self._used: set[int] = set()  # since the last `join`

    @contextmanager
    def on(self, move: Move) -> Iterator[None]:
        """Within the block what is launched is of the move."""
        alone = not (move.stream or move.waits or move.is_awaited)
        if not self._is_gpu or alone:
            yield
            return
        main = torch.cuda.current_stream()
        stream = self._others[move.stream - 1] if move.stream else main
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
