"""Which tile a kernel runs with: the one that was fastest here, or else a rule of thumb.

A launcher asks `choose` with the shape it was called with, the configurations that can do it and
the one that a cost model would take. What has been measured on this GPU is looked up: first in the
user's cache, then in the table that comes with the package. Nothing is measured while a network
runs; `python -m benchmarks.tune` does that by running a step inside `search()`.

A configuration only gets into a table if its result agreed with that of the default, on fresh
memory, in each of several runs: some tiles are miscompiled, and they look fast.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
import triton

Config = TypeVar("Config", bound=tuple)

_SHIPPED = Path(__file__).parent / "tuned"
_RUNS = 3  # of a candidate, compared with the default
_TOLERANCE = 1e-2  # relative, in the norm: between two orders of summation, rounded to 16 bits
_MILLISECONDS = 1.5  # of a candidate in one graph, which is replayed ten times

_search: "Search | None" = None


class Search:
    """The measurements of a `search()`: the fastest configuration of each shape met in it."""

    def __init__(self, part: int, parts: int, timed: bool) -> None:
        self.part, self.parts, self.timed = part, parts, timed
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
        if not self.timed:
            for config in configs:
                run(config)
            return
        expected = run(default).clone()
        times = {}
        for config in configs:
            if not all(_agree(run(config), expected) for _ in range(_RUNS)):
                self.rejected.append(f"{name}: {tuple(config)}")
                continue
            # as a graph, since launching from Python takes longer than most of these kernels
            times[config] = triton.testing.do_bench_cudagraph(
                lambda config=config: run(config), rep=_MILLISECONDS, return_mode="median"
            )
        self.times[name] = {str(tuple(c)): 1000 * t for c, t in times.items()}
        self.defaults[name] = str(tuple(default))
        if times:
            self.found[name] = list(min(times, key=times.get))


@contextmanager
def search(part: int = 0, parts: int = 1, timed: bool = True) -> Iterator[Search]:
    """Within the block every shape that is met for the first time is measured. With several parts
    only every so many shapes are; with `timed=False` they are compiled only, which processes can
    do side by side."""
    global _search
    _search = Search(part, parts, timed)
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
) -> Config:
    """The configuration to use for this op and shape."""
    n, *rest = key
    name = f"{op} {' '.join(map(str, rest))}"
    full = f"{name} n={n}"
    if _search is not None and full not in _search.found:
        _search.run(full, configs(), default(), run)
    table = _table()
    if name not in table:
        return default()
    nearest = min(table[name], key=lambda known: abs(math.log(known / max(n, 1))))
    config = type(default())(*table[name][nearest])
    return config if config in configs() else default()


def cache_path() -> Path:
    """Where the user's measurements are kept: one file for each GPU, torch and triton version."""
    root = os.environ.get("TRITON_DIFFUSION_CACHE", Path.home() / ".cache" / "triton_diffusion")
    torch_version = torch.__version__.split("+")[0]
    return Path(root) / f"{gpu_name()}-torch{torch_version}-triton{triton.__version__}.json"


def save(found: dict[str, list[int]], path: Path) -> None:
    """Add measurements to a table."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted((known | found).items())
    )
    path.write_text("{\n" + text + "\n}\n")
    _table.cache_clear()


def gpu_name() -> str:
    """The GPU's name as part of a file's name."""
    return torch.cuda.get_device_name().lower().replace(" ", "-") if _on_gpu() else "cpu"


@lru_cache
def _table() -> dict[str, dict[int, list[int]]]:
    """By op and shape, then by batch."""
    table: dict[str, dict[int, list[int]]] = {}
    if not _on_gpu():
        return table
    for path in (_SHIPPED / f"{gpu_name()}.json", cache_path()):
        if path.is_file():
            for full, config in json.loads(path.read_text()).items():
                name, n = full.rsplit(" n=", 1)
                table.setdefault(name, {})[int(n)] = config
    return table


def _on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def _agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    difference = (actual.double() - expected.double()).norm()
    return bool(difference <= _TOLERANCE * expected.double().norm())
