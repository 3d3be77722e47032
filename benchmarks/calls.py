"""Each call of an op in a training step: what it launches, why these kernels, its time and floor.

    python -m benchmarks.calls [key=value ...]

    model=unet64       configs/model, or benchmarks/networks
    batch=128          images
    precision=bf16
    steps=3            steps profiled, of which a call has its median
    out=calls.csv      a line for each call, and for each kernel that no op has launched
    largest=20         kinds of calls that are printed: those with the most time above their floors

It also prints the sum of all kernels, and what a step takes as one CUDA graph, where some overlap.
The host waits before and after every call, so that nothing overlaps: a call's time is the sum of
its kernels'. The floor is that of `benchmarks.profile`. `choices` has each answer of the registry:
the kernel, its configuration, why it was taken (`measured`, `like ...`, `predicted`) and the spec.
"""

import csv
import json
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from benchmarks import harness, stopwatch
from benchmarks.harness import Rates, rates_of
from benchmarks.steps import build_step
from benchmarks.work import Work, noted_work
from triton_kernels.registry import choose

DEFAULTS = {
    "model": "unet64",
    "batch": 128,
    "precision": "bf16",
    "steps": 3,
    "out": "calls.csv",
    "largest": 20,
}
_NAME = "call "  # of a range of the profile
_HEAD = ("call", "op", "shapes", "family", "us", "floor_us", "MB", "GFLOP", "kernels", "choices")


class Call:
    """One call of an op."""

    def __init__(self, op: str, args: tuple) -> None:
        self.op, self.choices = op, ()
        self.shapes = " ".join("x".join(map(str, x.shape)) for x in _tensors(args))

    @property
    def chosen(self) -> str:
        """What the registry has answered."""
        found = []
        for op, spec, choice in self.choices:
            fields = {k: v for k, v in vars(spec).items() if v not in (None, False, ())}
            config = dict(zip(choice.config._fields, choice.config, strict=True))
            found.append([op.name, choice.kernel.name, config, choice.why, str(fields)])
        return json.dumps(found, default=str)


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    device = harness.require_cuda()
    harness.set_precision(settings["precision"])
    provider = f"{harness.OURS}-{settings['precision']}"
    step = build_step(provider, settings["model"], settings["batch"], device)
    for k in range(2):
        step.plain(k)
    steps = [_profiled(step.plain, 10 + k) for k in range(settings["steps"])]
    rates = rates_of(harness.provenance().gpu)
    found = list(lines(steps, rates))
    with Path(settings["out"]).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_HEAD)
        writer.writerows(found)
    for said in above_floors(found)[: settings["largest"]]:
        print(said)
    print(f"{settings['model']}, batch {settings['batch']}: kernels {_total(steps[0][2]):.3f} ms")
    wall = stopwatch.time_steps(step.captured(), 20).median / 1000
    print(f"as one CUDA graph: {wall:.3f} ms a step")
    return 0


def _total(kernels: dict[int, list[tuple[str, float]]]) -> float:
    """Milliseconds of all."""
    return sum(us for of in kernels.values() for _, us in of) / 1000


def _profiled(step: Any, k: int) -> tuple[list[Call], list[Work], dict[int, list]]:
    """The calls of a step, what each cannot do without, and the kernels of each."""
    calls: list[Call] = []

    @contextmanager
    def around(name: str, args: tuple) -> Iterator[None]:
        calls.append(Call(name, args))
        torch.cuda.synchronize()
        with choose.noted() as decisions, record_function(f"{_NAME}{len(calls) - 1}"):
            yield
        calls[-1].choices = tuple(decisions)
        torch.cuda.synchronize()

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler, noted_work(around) as work:
        step(k)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return calls, work, kernels_of_calls(json.loads(path.read_text()))


def kernels_of_calls(trace: dict[str, Any]) -> dict[int, list[tuple[str, float]]]:
    """Names and microseconds of what each call launched, in order; -1: no call did."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    ranges = [
        (e["ts"], e["ts"] + e["dur"], int(e["name"].removeprefix(_NAME)))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(_NAME)
    ]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    found = defaultdict(list)
    for e in events:
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = launched.get(e["args"].get("correlation"), -1.0)
        inside = (n for a, b, n in ranges if a <= at <= b)
        found[next(inside, -1)].append((e["ts"], e["name"], e["dur"]))
    return {n: [(name, us) for _, name, us in sorted(of)] for n, of in found.items()}


def lines(
    steps: Sequence[tuple[list[Call], list[Work], dict[int, list]]],
    rates: Rates,
) -> Iterator[list]:
    """Of the CSV."""
    calls, work, first = steps[0]
    for i, (call, needs) in enumerate(zip(calls, work, strict=True)):
        runs = [kernels.get(i, []) for _, _, kernels in steps]
        us = statistics.median(sum(t for _, t in run) for run in runs)
        floor = f"{needs.floor_us(*rates):.2f}" if all(rates) else ""
        launched = "; ".join(f"{name}: {t:.2f}" for name, t in first.get(i, []))
        needed = [f"{needs.bytes / 1e6:.3f}", f"{needs.flops / 1e9:.3f}"]
        head = [i, call.op, call.shapes, needs.family]
        yield [*head, f"{us:.2f}", floor, *needed, launched, call.chosen]
    for name, t in first.get(-1, []):
        yield ["-", "", "", "", f"{t:.2f}", "", "", "", name, ""]


def above_floors(found: Sequence[list]) -> list[str]:
    """Calls of the same op and shapes that launched the same kernels, in one line each; those first
    whose times above their floors have the largest sum. None where floors are not known."""
    kinds = defaultdict(list)
    for line in found:
        row = dict(zip(_HEAD, line, strict=True))
        if row["floor_us"]:
            kernels = Counter(kernel.split(": ")[0] for kernel in row["kernels"].split("; "))
            kinds[row["op"], row["shapes"], tuple(kernels.items())].append(row)
    said = []
    for (op, shapes, kernels), rows in kinds.items():
        us, floor = (sum(float(row[name]) for row in rows) for name in ("us", "floor_us"))
        launched = ", ".join(f"{n} {name}" if n > 1 else name for name, n in kernels)
        times = f"{len(rows)} of {us / len(rows):.1f} us, floor {floor / len(rows):.1f}"
        said.append((us - floor, f"{us - floor:7.0f} us above: {times}: {op} {shapes}: {launched}"))
    return [line for _, line in sorted(said, reverse=True)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


if __name__ == "__main__":
    harness.run_entry(main)
