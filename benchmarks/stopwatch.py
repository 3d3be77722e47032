"""Times of calls on a GPU: graphs that make them in turn, and steps that wait for the host."""

import gc
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch

STEADY = 1.15  # p80 over p20; what is more was disturbed


class Timing(NamedTuple):
    """Microseconds a call."""

    median: float
    p20: float
    p80: float

    @property
    def spread(self) -> float:
        return self.p80 / self.p20


def _spread(timing: Timing) -> float:
    return timing.spread


_MIN_GRAPH_US = 1000.0  # a replay is at least so long, so that its start does not count
_WARM_UP = 3
_ATTEMPTS = 4  # at replays that are steady


def copies_beyond_l2(input_bytes: int, device: torch.device, most: int = 48) -> int:
    """How many sets of inputs to rotate through, so that none is found in the L2 cache."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(most, -(-2 * cache // max(input_bytes, 1))))


def time_graph(
    runs: Sequence[Callable[[], Any]],
    budget_ms: float = 40.0,
    stage: Callable[[str], AbstractContextManager] = lambda name: nullcontext(),  # of an `Account`
) -> tuple[Timing, list[Any]]:
    """Time one call, as the median over replays of a CUDA graph that makes all the calls in turn,
    over and over; and the results of the last round, whose memory belongs to the graph.

    The outputs of a round are kept, so they rotate through memory as the inputs do. If something
    else disturbs the replays there are more of them, and the steadiest count.
    """
    with stage("warm up"):
        stream, _ = _graph_memory()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile, choose algorithms
            for run in [runs[0]] * (_WARM_UP - 1) + list(runs):
                run()
        torch.cuda.synchronize()
    with stage("capture"):
        graph, results = _capture(runs, 1)
        [first] = _replay(graph, 1)
        rounds = max(1, min(round(_MIN_GRAPH_US / first + 0.5), 400 // len(runs) + 1))
        if rounds > 1:
            del graph, results
            graph, results = _capture(runs, rounds)
    with stage("replays"):
        count = max(5, min(100, round(budget_ms * 1000 / (first * rounds))))
        found: list[Timing] = []
        while not found or (found[-1].spread > STEADY and len(found) < _ATTEMPTS):
            times = [t / (rounds * len(runs)) for t in _replay(graph, count)]
            found.append(quantiles(times))
    return min(found, key=_spread), results


def time_steps(step: Callable[[int], Any], steps: int, warm_up: int = 3) -> Timing:
    """Time a function that may wait for the host: events around each of `steps` calls in a row."""
    for k in range(warm_up):
        step(k)
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for k in range(steps):
        step(warm_up + k)
        events[k + 1].record()
    torch.cuda.synchronize()
    return quantiles([1000 * a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)])


def freeze_objects() -> None:
    """Have later garbage collections pass over what there is by now: imported modules, mostly."""
    gc.collect()
    gc.freeze()


def release_memory(least: float = 0.0) -> None:
    """Give what nobody holds back to the driver, if at least this share of the memory is taken."""
    gc.collect()
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if torch.cuda.memory_reserved() >= least * total:
            _graph_memory.cache_clear()
            torch.cuda.empty_cache()


@lru_cache(maxsize=1)
def _graph_memory() -> tuple[Any, Any]:
    """The stream in which calls are captured, and a graph whose memory all others share: memory
    for each anew would cost more time than the replays. Only the newest graph may be replayed."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        torch.zeros(1, device="cuda")
        graph.capture_end()
    return stream, graph


def _capture(runs: Sequence[Callable[[], Any]], rounds: int) -> tuple[Any, list[Any]]:
    stream, owner = _graph_memory()
    graph = torch.cuda.CUDAGraph()
    results: list[Any] = [None] * len(runs)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=owner.pool())
        try:
            for _ in range(rounds):
                for i, run in enumerate(runs):
                    results[i] = run()
        finally:
            graph.capture_end()
    return graph, results


def _replay(graph: Any, count: int) -> list[float]:
    """Microseconds of each replay, after two that do not count."""
    for _ in range(2):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [1000 * a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def quantiles(times: Sequence[float]) -> Timing:
    """Median, 20th and 80th percentile of times in microseconds."""
    if len(times) < 2:
        return Timing(times[0], times[0], times[0])
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), deciles[1], deciles[7])
