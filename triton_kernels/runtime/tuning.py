"""Which tile a kernel runs with: the one that was fastest here, or else a rule of thumb.

A launcher asks `choose` with the shape it was called with, the configurations that can do it and
the one that a cost model would take. What has been measured on this GPU is looked up: first in the
user's cache, then in the table that comes with the package. A convolution whose shape nobody has
measured takes what was fastest for the shape most like its own. Nothing is measured while a network
runs; `python -m benchmarks.tune` does that by running a step inside `search()`.

A configuration only gets into a table if its result agreed with that of the default, on fresh
memory, in each of several runs: some tiles are miscompiled, and they look fast.
"""

import fcntl
import json
import logging
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
import triton

Config = TypeVar("Config", bound=tuple)

_log = logging.getLogger(__name__)

_SHIPPED = Path(__file__).parents[1] / "tuned"
_RUNS = 3  # of a candidate, compared with the default
_TOLERANCE = 1e-2  # relative, in the norm: between two orders of summation, rounded to 16 bits
_CALLS = 10  # in a graph that is timed
_MICROSECONDS = 3000.0  # of replays of a candidate
_HOPELESS = 1.25  # times the best one so far: replayed once
_SIMILAR = 6.0  # powers of two between shapes, at most, if one is to say something of the other
_SMALLEST_SIZE = 16  # of what shapes may differ in; smaller are sides of filters, and small images

_ALIKE = {"torch.float16": "torch.bfloat16"}  # as fast

_search: "Search | None" = None
_decided: tuple[dict, dict] = ({}, {})  # a table, and what `choose` has made of it


class Search:
    """The measurements of a `search()`: the fastest configuration of each shape met in it."""

    def __init__(self, part: int, parts: int, timed: bool, only: Sequence[str]) -> None:
        self.part, self.parts, self.timed, self.only = part, parts, timed, only
        self.found: dict[str, list[int]] = {}
        self.times: dict[str, dict[str, float]] = {}  # microseconds by configuration
        self.defaults: dict[str, str] = {}  # the configuration that the cost model would take
        self.rejected: list[str] = []  # configurations whose result was wrong
        self.count = 0

    def run(self, name: str, configs: Sequence[Config], default: Config, run: Callable) -> None:
        """Compile every configuration and, unless that was all, time those that are right."""
        self.count += 1
        self.found[name] = list(default)
        if self.count % self.parts != self.part:
            return
        configs = list(dict.fromkeys([default, *configs]))
        if not self.timed:
            for config in configs:
                run(config)
            return
        first = run(default)
        expected = first.clone()
        first.fill_(math.nan)  # see `_agree`
        times: dict[Config, float] = {}
        for config in configs:
            if not all(_agree(run(config), expected) for _ in range(_RUNS)):
                self.rejected.append(f"{name}: {tuple(config)}")
                continue
            best = min(times.values(), default=math.inf)
            times[config] = _time(lambda config=config: run(config), best)
        self.times[name] = {str(tuple(c)): t for c, t in times.items()}
        self.defaults[name] = str(tuple(default))
        if times:
            self.found[name] = list(min(times, key=times.get))


@contextmanager
def search(
    part: int = 0, parts: int = 1, timed: bool = True, only: Sequence[str] = ()
) -> Iterator[Search]:
    """Within the block every shape that is met for the first time is measured. With several parts
    only every so many shapes are; with `timed=False` they are compiled only, which processes can
    do side by side. `only` names the ops that count, if not all do."""
    global _search
    _search = Search(part, parts, timed, only)
    try:
        yield _search
    finally:
        _search = None


def choose(
    op: str,
    key: tuple,  # of the shape, the batch first
    configs: Callable[[], Sequence[Config]],  # that can do it
    default: Callable[[], Config],
    run: Callable[[Config], torch.Tensor],  # does it with a configuration; returns the result
    alike: Callable[[Sequence[int], Sequence[Config]], Config | None] | None = None,
) -> Config:
    """The configuration to use for this op and shape. What `configs` and `default` return depends
    on these two alone: they are asked once.

    `alike` says which of the configurations a row of another shape means, if any. Without it only
    rows of this shape count, of whatever batch.
    """
    global _decided
    table = _table()
    if _decided[0] is not table:
        _decided = (table, {})
    config = _decided[1].get((op, key))
    if config is not None and _search is None:
        return config
    n, *rest = key
    name = f"{op} {' '.join(map(str, rest))}"
    full = f"{name} n={n}"
    if _search is not None and full not in _search.found and op in (_search.only or (op,)):
        _search.run(full, configs(), default(), run)
    rows = _rows(table, name, n, other_shapes=alike is not None)
    listed = configs() if rows else ()
    found = ((alike or same)(row, listed) for row in rows)
    _decided[1][op, key] = config = next((c for c in found if c is not None), None) or default()
    return config


def same(row: Sequence[int], configs: Sequence[Config]) -> Config | None:
    """The one whose numbers these are."""
    return next((c for c in configs if _has_numbers(c, row)), None)


def _has_numbers(config: Config, row: Sequence[int]) -> bool:
    try:
        return config == type(config)(*row)
    except TypeError:  # as many as another version of this package had
        return False


def same_tile(row: Sequence[int], configs: Sequence[Config]) -> Config | None:
    """The one whose numbers these are, but for the last: in how many parts a sum is taken, which
    depends on the shape. Of several that which is nearest in it."""
    tiles = [c for c in configs if list(c[:-1]) == list(row[:-1])]
    return min(tiles, key=lambda c: abs(math.log(c[-1] / row[-1])), default=None)


def _rows(table: dict, name: str, n: int, other_shapes: bool) -> list[list[int]]:
    """That of the batch nearest to n or, if the shape has none and others count, those of others,
    the most similar first."""
    if name in table:
        return [table[name][min(table[name], key=lambda m: abs(math.log(max(m, 1) / max(n, 1))))]]
    rows = []
    for other, by_batch in table.items() if other_shapes else ():
        ratios = _ratios(name.split(), other.split())
        for known, row in by_batch.items() if ratios is not None else ():
            powers = [*ratios, math.log2(max(known, 1) / max(n, 1))]
            # how many times as much work it is, and how differently cut
            rows.append((abs(sum(powers)) + sum(map(abs, powers)) / 2, row))
    return [row for distance, row in sorted(rows) if distance <= _SIMILAR]


def _ratios(a: Sequence[str], b: Sequence[str]) -> list[float] | None:
    """The logarithms of what the sizes in two names differ by; None if more differs than sizes."""
    if len(a) != len(b):
        return None
    ratios = []
    for x, y in zip(a, b, strict=True):
        if _ALIKE.get(x, x) != _ALIKE.get(y, y):
            if not (x.isdigit() and y.isdigit()) or min(int(x), int(y)) < _SMALLEST_SIZE:
                return None
            ratios.append(math.log2(int(y) / int(x)))
    return ratios


def cache_path() -> Path:
    """Where the user's measurements are kept: one file for each GPU, torch and triton version."""
    home = os.path.expanduser("~")  # "~" if there is none, where Path.home() raises
    root = os.environ.get("TRITON_DIFFUSION_CACHE", f"{home}/.cache/triton_diffusion")
    torch_version = torch.__version__.split("+")[0]
    return Path(root) / f"{gpu_name()}-torch{torch_version}-triton{triton.__version__}.json"


def save(found: dict[str, list[int]], path: Path) -> None:
    """Add measurements to a table, which is whole at any time, whoever else adds to it. Raises
    OSError where that cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
        rows = sorted((_read(path) | found).items())
        text = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows)
        with tempfile.TemporaryDirectory(dir=path.parent) as aside:
            new = Path(aside) / path.name
            new.write_text("{\n" + text + "\n}\n")
            new.replace(path)
    finally:
        os.close(folder)
    _table.cache_clear()


def _read(path: Path) -> dict[str, list[int]]:
    """The rows of a table; none if there is no such file. One that cannot be read counts as none as
    well: kernels run without it."""
    try:
        rows = json.loads(path.read_text())
        for name, row in rows.items():
            batch = int(name.rsplit(" n=", 1)[1])
            if batch < 0 or not row or not all(isinstance(v, int) for v in row):
                raise ValueError(f"the row of {name!r} is {row!r}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, IndexError) as error:
        _log.warning("%s is no table of tiles and is not used: %s", path, error)
        return {}
    return rows


def gpu_name() -> str:
    """The GPU's name as part of a file's name."""
    name = torch.cuda.get_device_name() if _on_gpu() else "cpu"
    return name.lower().replace(" ", "-").replace("/", "-")


@lru_cache
def _table() -> dict[str, dict[int, list[int]]]:
    """By op and shape, then by batch."""
    table: dict[str, dict[int, list[int]]] = {}
    if not _on_gpu():
        return table
    for path in (_SHIPPED / f"{gpu_name()}.json", cache_path()):
        for full, config in _read(path).items():
            name, n = full.rsplit(" n=", 1)
            table.setdefault(name, {})[int(n)] = config
    return table


def _on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def _agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
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


def _time(run: Callable[[], torch.Tensor], best: float) -> float:
    return _stopwatch().time(run, best)
