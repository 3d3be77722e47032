"""Measuring rows: every configuration of every kernel is checked and timed.

    with search() as found:
        step(0)                       # the code to measure
    rows.save(found.rows, path)

A configuration becomes a row only if its results, on fresh memory and in several runs, agree with
those of the configuration that would be chosen without measurements. Some tiles are miscompiled,
and look fast. Outside of `search()` nothing is measured.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from .kernel import Choice, Kernel, Op
from .spec import Spec

_RUNS = 3  # of a candidate, compared with the default
_TOLERANCE = 1e-2  # relative, in the norm: between two orders of summation, rounded to 16 bits
_CALLS = 10  # in a graph that is timed
_MICROSECONDS = 3000.0  # of replays of a candidate
_HOPELESS = 1.25  # times the best one so far: replayed once

_search: "Search | None" = None


class Search:
    """The measurements of a `search()`: the fastest configuration of each shape met in it."""

    def __init__(
        self,
        part: int,
        parts: int,
        timed: bool,
        only: Sequence[str],
        wanted: Callable[[str, int, dict[str, Any]], bool] | None = None,
        done: "Callable[[Search], None] | None" = None,
    ) -> None:
        self.part, self.parts, self.timed, self.only = part, parts, timed, only
        self.wanted, self.done = wanted, done
        self.shapes = self.passed = 0  # that were measured (or compiled), and were not wanted
        self.rows: list[dict[str, Any]] = []  # as `rows` has them
        self.times: list[dict[str, Any]] = []  # likewise, with "us", of every configuration
        self.defaults: list[dict[str, Any]] = []  # likewise, of what is taken without rows
        self.rejected: list[dict[str, Any]] = []  # likewise, of those whose result was wrong
        self._met: set[tuple] = set()

    def measure(
        self,
        op: Op,
        spec: Spec,
        listed: Callable[[], list[tuple[Kernel, tuple]]],  # every kernel with its configurations
        default: Callable[[], Choice],
        run: Callable[[tuple], torch.Tensor],
    ) -> None:
        """Compile every configuration and, unless that was all, time those that are right."""
        n, shape = spec.n, dict(op.shape(spec))
        key = op.name, n, tuple(shape.items())
        if key in self._met or op.name not in (self.only or (op.name,)):
            return
        self._met.add(key)
        if len(self._met) % self.parts != self.part:
            return
        if self.wanted is not None and not self.wanted(op.name, n, shape):
            self.passed += 1
            return
        self.shapes += 1
        choice = default()
        first = choice.config
        # tuples of two kinds may be equal
        candidates = [(choice.kernel, first), *listed()]
        unique = {(type(config), config): kernel.name for kernel, config in candidates}

        def row(config: tuple) -> dict[str, Any]:
            fields = dict(zip(config._fields, config, strict=True))
            kernel = unique[type(config), config]
            return {"op": op.name, "n": n, **shape, "kernel": kernel, "config": fields}

        if not self.timed:
            for _, config in unique:
                run(config)
            return
        result = run(first)
        expected = result.clone()
        result.fill_(math.nan)  # see `agree`
        times: list[tuple[float, dict[str, Any]]] = []
        for _, config in unique:
            if not all(agree(run(config), expected) for _ in range(_RUNS)):
                self.rejected.append(row(config))
                continue
            best = min((t for t, _ in times), default=math.inf)
            times.append((time_call(lambda config=config: run(config), best), row(config)))
        self.times += [row | {"us": round(t, 3)} for t, row in times]
        self.defaults.append(row(first))
        if times:
            self.rows.append(min(times, key=lambda t: t[0])[1])
        if self.done is not None:
            self.done(self)


def current() -> Search | None:
    """That of the block around, if there is one."""
    return _search


@contextmanager
def search(
    part: int = 0,
    parts: int = 1,
    timed: bool = True,
    only: Sequence[str] = (),
    *,
    wanted: Callable[[str, int, dict[str, Any]], bool] | None = None,
    done: Callable[[Search], None] | None = None,
) -> Iterator[Search]:
    """Within the block every shape that is met for the first time is measured. With several parts
    only every so many shapes are; with `timed=False` they are compiled only, which processes can
    do side by side. `only` names the ops that count, if not all do; `wanted` is asked of each
    (op, n, shape), and `done` is called when a shape has been timed."""
    global _search
    _search = Search(part, parts, timed, only, wanted, done)
    try:
        yield _search
    finally:
        _search = None


@contextmanager
def paused() -> Iterator[None]:
    """Within the block nothing is measured: launchers are asked what they would do."""
    global _search
    before, _search = _search, None
    try:
        yield
    finally:
        _search = before


def agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they are about equal. Afterwards `actual` holds NaN, so that the next candidate,
    which is likely to get the same memory, cannot look right without writing there."""
    expected = expected.float()
    difference = (actual.float() - expected).norm()
    agree = bool(difference <= _TOLERANCE * expected.norm())
    actual.fill_(math.nan)
    return agree


class _Stopwatch:
    """Times calls by replays of a CUDA graph, since the host is slower than the smaller kernels,
    and with inputs that are not in the L2 cache."""

    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self.buffer = torch.zeros(size // 4, device=device)
        self.stream = torch.cuda.Stream()
        self.pool = None
        self.graph = self._capture(self._evict)  # kept, since it owns the memory of the others
        self.pool = self.graph.pool()
        self.alone = self._replay(self.graph, math.inf)

    def time(self, run: Callable[[], torch.Tensor], best: float) -> float:
        """Microseconds of a call. One that is much worse than `best` is replayed just once."""

        def call() -> None:
            self._evict()
            run()

        return self._replay(self._capture(call), best + self.alone) - self.alone

    def _evict(self) -> None:
        """Read until nothing else is in the cache; so nothing there waits to be written either."""
        self.buffer.amax()

    def _capture(self, call: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            call()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                for _ in range(_CALLS):
                    call()
            finally:
                graph.capture_end()
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph, best: float) -> float:
        """Microseconds of one of the graph's calls, the median over replays."""
        times: list[float] = []
        count = 1
        with torch.cuda.stream(self.stream):
            while len(times) < count:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(1000 * start.elapsed_time(end) / _CALLS)
                if len(times) == 1 and times[0] < _HOPELESS * best:
                    count = max(4, min(20, round(_MICROSECONDS / times[0] / _CALLS)))
        return statistics.median(times[1:] or times)


@lru_cache(maxsize=1)
def _stopwatch() -> _Stopwatch:
    return _Stopwatch()


def time_call(run: Callable[[], torch.Tensor], best: float = math.inf) -> float:
    """Microseconds of a call on this GPU; roughly, if that is much more than `best`."""
    return _stopwatch().time(run, best)
