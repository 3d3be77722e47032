"""`select` chooses a kernel and its configuration; `explain` lists why other kernels do not run.

The choice is the first of these that exists: the measured row of the shape and batch; that of the
shape at the nearest batch, or of the most similar shape, unless fitted costs predict that it is
slow; the configuration with the least predicted time.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from ..runtime.device import Device
from . import rows, search
from .kernel import Choice, Kernel, Op
from .rows import Found, Shape, Table
from .spec import Spec

_SIMILAR = 6.0  # powers of two between shapes, at most, if one is to say something of the other
_SLOWER = 1.05  # than predicted: a row of another shape or batch is passed over
_SMALLEST_SIZE = 16  # of what shapes may differ in; smaller are sides of filters, and small images
_NONE = (math.inf, None)
_ALIKE = {"fp16": "bf16"}  # as fast

_decided: dict[tuple[Op, Spec, Device], tuple[Table, Choice]] = {}
_looked_at: dict[tuple[Op, Device], Table] = {}  # whose rows have been checked
_notes: list["Decision"] | None = None


class Decision(NamedTuple):
    """What `select` was asked, and what it took."""

    op: Op
    spec: Spec
    choice: Choice


@contextmanager
def noted() -> Iterator[list[Decision]]:
    """Within the block every answer of `select` is appended to the list."""
    global _notes
    before, _notes = _notes, []
    try:
        yield _notes
    finally:
        _notes = before


def select(
    op: Op,
    spec: Spec,
    gpu: Device,
    run: Callable[[tuple], Tensor] | None = None,  # does it with a configuration, for `search`
) -> Choice:
    """The kernel and the configuration to compute `spec` on this GPU with.

    Raises ValueError, with every kernel's reason, if none of them can.
    """
    choice = _select(op, spec, gpu, run)
    if _notes is not None:
        _notes.append(Decision(op, spec, choice))
    return choice


def _select(
    op: Op, spec: Spec, gpu: Device, run: Callable[[tuple], Tensor] | None = None
) -> Choice:
    table = rows.table(gpu)
    key = (op, spec, gpu)
    known = _decided.get(key)
    searching = search.current()
    if known is not None and known[0] is table and searching is None:
        return known[1]
    if gpu.lacks is not None:
        raise ValueError(f"no kernel computes {op.name}: {gpu.lacks}")
    if searching is not None and run is not None:
        searching.measure(
            op, spec, lambda: listed(op, spec, gpu), lambda: _predicted(op, spec, gpu), run
        )
    choice = _measured(op, spec, gpu) or _predicted(op, spec, gpu)
    if choice.why.startswith("like"):
        choice = _unless_slow(choice, op, spec, gpu)
    _decided[key] = table, choice
    return choice


def expected(op: Op, spec: Spec, gpu: Device) -> float | None:
    """Microseconds of what would be taken, by models that were fitted to times; None: there are
    none. Nobody is told that it was asked."""
    choice = _select(op, spec, gpu)
    return choice.kernel.model(spec, gpu, choice.config)


def listed(op: Op, spec: Spec, gpu: Device, untimed: bool = False) -> list[tuple[Kernel, tuple]]:
    """Every kernel that can do it, with every configuration; `untimed`: also where nobody has
    measured that it pays, to measure that."""
    refuse = op.cannot if untimed else op.why_not
    return [
        (kernel, config)
        for kernel in op.kernels
        if refuse(kernel, spec, gpu) is None
        for config in kernel.configs(spec, gpu)
    ]


def _measured(op: Op, spec: Spec, gpu: Device) -> Choice | None:
    for row, why in _rows(op, spec, gpu):
        kernel = op.kernel(row["kernel"])
        if kernel is None or op.why_not(kernel, spec, gpu) is not None:
            continue
        config = kernel.meant(row["config"], kernel.configs(spec, gpu))
        if config is not None:
            return Choice(kernel, config, why)
        if why == "measured":
            rows.warn(row["at"], f"{kernel.name} does not list {row['config']} for this shape")
    return None


def _unless_slow(choice: Choice, op: Op, spec: Spec, gpu: Device) -> Choice:
    """What a row of another shape or batch says, unless models that were fitted to times know
    better."""
    us = choice.kernel.model(spec, gpu, choice.config)
    if us is None:
        return choice
    other = _predicted(op, spec, gpu)
    known = other.kernel.model(spec, gpu, other.config)
    return other if known is not None and us > _SLOWER * known else choice


def _predicted(op: Op, spec: Spec, gpu: Device) -> Choice:
    best: tuple[float, Kernel, tuple] | None = None
    for kernel in op.kernels:
        if op.why_not(kernel, spec, gpu) is not None:
            continue
        for config in kernel.configs(spec, gpu):
            cost = kernel.predict(spec, gpu, config)
            if math.isfinite(cost) and (best is None or cost < best[0]):
                best = cost, kernel, config
    if best is None:  # the first that can is the safe one
        for kernel, config in listed(op, spec, gpu)[:1]:
            return Choice(kernel, config, "default")
        raise ValueError(f"no kernel computes {op.name} of {spec}: {op.refuse(spec, gpu)}")
    return Choice(best[1], best[2], "predicted")


def _rows(op: Op, spec: Spec, gpu: Device) -> Iterator[tuple[Found, str]]:
    """That of the batch nearest to n or, if the shape has none and others count, those of others,
    the most similar first."""
    n, of = spec.n, dict(op.shape(spec))
    shape = rows.shape_of(of)
    measured = _checked(op, of, gpu)
    if by_batch := measured.get(shape):
        nearest = min(by_batch, key=lambda m: (abs(math.log2(max(m, 1) / max(n, 1))), m))
        yield by_batch[nearest], "measured" if nearest == n else f"like n={nearest}"
        return
    if not op.counts_similar(spec, gpu):
        return
    names = [kernel.name for kernel in op.kernels]
    found = []
    for other, by_batch in measured.items():
        ratios = _ratios(shape, other)
        for known, row in by_batch.items() if ratios is not None else ():
            powers = [*ratios, math.log2(max(known, 1) / max(n, 1))]
            # how many times as much work it is, and how differently cut
            distance = abs(sum(powers)) + sum(map(abs, powers)) / 2
            found.append((distance, _order(row, names), row, other, known))
    for distance, _, row, other, known in sorted(found, key=lambda f: f[:2]):
        if distance <= _SIMILAR:
            its = dict(other)
            differing = [f"{k}={its[k]}" for k in of if its[k] != of[k]]
            yield row, " ".join(["like", f"n={known}", *differing])


def _checked(op: Op, fields: Iterable[str], gpu: Device) -> dict[Shape, dict[int, Found]]:
    """The op's rows, without those that name what it does not have: these are in the log."""
    table = rows.table(gpu)
    if _looked_at.get((op, gpu)) is not table:
        _looked_at[op, gpu] = table
        for other, by_batch in table.get(op.name, {}).items():
            for n, row in list(by_batch.items()):
                wrong = op.wrong_names(fields, dict(other), row["kernel"], row["config"])
                if wrong is not None:
                    rows.warn(row["at"], wrong)
                    del by_batch[n]
    return table.get(op.name, {})


def _order(row: Found, names: Sequence[str]) -> list[int]:
    """Between rows that are equally similar: the kernel that is listed first, the smaller tile."""
    listed = names.index(row["kernel"]) if row["kernel"] in names else len(names)
    return [listed, *(int(v) for v in row["config"].values())]


def _ratios(a: Shape, b: Shape) -> list[float] | None:
    """The logarithms of what the sizes in two shapes differ by; None if more differs than sizes."""
    if len(a) != len(b):
        return None
    ratios = []
    for (name, x), (other, y) in zip(a, b, strict=True):
        x, y = _ALIKE.get(x, x), _ALIKE.get(y, y)
        if name != other or (x != y and not _are_sizes(x, y)):
            return None
        if x != y:
            ratios.append(math.log2(y / x))
    return ratios


def _are_sizes(x: Any, y: Any) -> bool:
    return type(x) is int and type(y) is int and min(x, y) >= _SMALLEST_SIZE


class Considered(NamedTuple):
    """What `explain` says of one kernel."""

    kernel: str
    refused: str | None  # why it cannot do it
    config: tuple | None  # its best one, by its cost model; the chosen one of the chosen kernel
    predicted: float | None  # microseconds
    chosen: str | None  # why it is taken, if it is


def explain(op: Op, spec: Spec, gpu: Device) -> list[Considered]:
    """Every kernel of an operation: why it cannot compute `spec`, or what it would take."""
    choice = None if op.refuse(spec, gpu) is not None else select(op, spec, gpu)
    found = []
    for kernel in op.kernels:
        refused = op.why_not(kernel, spec, gpu)
        configs: Sequence[tuple] = () if refused else kernel.configs(spec, gpu)
        chosen = choice.why if choice is not None and kernel is choice.kernel else None
        costs = [kernel.predict(spec, gpu, config) for config in configs]
        predicted, best = min(zip(costs, configs, strict=True), key=itemgetter(0), default=_NONE)
        config = best if math.isfinite(predicted) else None
        if chosen:
            config = choice.config
            predicted = kernel.predict(spec, gpu, config)
        if refused is None and not configs:
            refused = "none of its configurations fits"
        known = predicted if math.isfinite(predicted) else None
        found.append(Considered(kernel.name, refused, config, known, chosen))
    return found
