"""Fit the parameters of the cost models to measured times, and say how good the choices are.

    python -m benchmarks.fit_costs SWEEP.jsonl [...] [out=FILE] [arch=90 sms=132]

The times are those of `benchmarks.sweep_configs`. Each kernel's parameters, none negative, are the
least squares of relative errors, weighted by how fast a configuration is: it is the fast ones that
have to be told apart. Then, layer by layer, they are fitted without that layer: what would be taken
for it, and how much longer that takes than its fastest configuration. `out` gets the parameters of
all layers.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import sweep_norms
from benchmarks.sweep_configs import OF_ATTENTION, OPS
from triton_kernels.registry import cost
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.spec import AttentionSpec, ConvSpec, NormSpec, Spec
from triton_kernels.runtime.device import Device

_FEWEST = 6  # times, of several layers, that a kernel's parameters are fitted to
_FEWEST_LAYERS = 3
_FEWEST_CHOICES = 2  # configurations of a layer
_SWEEPS = 4000


class Time(NamedTuple):
    """One configuration of one layer."""

    name: str  # of its parameters
    kernel: str
    config: dict[str, Any]
    terms: tuple[float, ...]
    us: float


Layers = dict[tuple[str, Spec, Device], list[Time]]


def read(paths: Sequence[str], former: Device) -> Layers:
    """By operation, spec and GPU, which is `former` where a line does not say it; without kernels
    that have no model."""
    ops = {op.name: op for op in OPS.values()}
    layers: Layers = defaultdict(list)
    for path in paths:
        for line in Path(path).read_text().splitlines():
            row = json.loads(line)
            op = ops[row["op"]]
            kernel = op.kernel(row["kernel"])
            if kernel is None or kernel.work is None:
                continue
            kind = NormSpec if op in sweep_norms.OPS.values() else ConvSpec
            kind = AttentionSpec if op in OF_ATTENTION.values() else kind
            spec = _spec(kind, row["spec"])
            gpu = Device(**row["gpu"]) if "gpu" in row else former
            config = kernel.config(**row["config"])
            key = cost.name(kernel.name, kernel.fitted_by, spec, config)
            if (work := kernel.work(spec, gpu, config)) is None:
                continue
            terms = cost.terms(work, gpu)
            layers[op.name, spec, gpu].append(
                Time(key, kernel.name, row["config"], terms, row["us"])
            )
    return {key: times for key, times in layers.items() if len(times) >= _FEWEST_CHOICES}


def _spec(kind: type[Spec], fields: dict[str, Any]) -> Spec:
    known = {k: v for k, v in fields.items() if k in kind.__dataclass_fields__}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})


def fit(layers: Layers) -> dict[str, tuple[float, ...]]:
    """Parameters by name."""
    rows = defaultdict(list)
    of_layers = defaultdict(set)
    for key, times in layers.items():
        best = min(time.us for time in times)
        for time in times:
            rows[time.name].append((time, best / time.us))
            of_layers[time.name].add(key)
    found = {}
    for name, times in sorted(rows.items()):
        if len(times) < _FEWEST or len(of_layers[name]) < _FEWEST_LAYERS:
            continue
        weights = torch.tensor([weight for _, weight in times], dtype=torch.float64)
        terms = torch.tensor([time.terms for time, _ in times], dtype=torch.float64)
        us = torch.tensor([time.us for time, _ in times], dtype=torch.float64)
        found[name] = tuple(nonnegative(terms * (weights / us)[:, None], weights))
    return found


def nonnegative(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """x >= 0 with the least |a x - b|, one number at a time until none changes."""
    scale = a.norm(dim=0).clamp_min(1e-30)
    a = a / scale
    gram, right = (a.T @ a).tolist(), (a.T @ b).tolist()
    x = [0.0] * len(right)
    for _ in range(_SWEEPS):
        change = 0.0
        for i, row in enumerate(gram):
            if row[i] > 0:
                step = (right[i] - sum(map(mul, row, x))) / row[i]
                new = max(0.0, x[i] + step)
                change = max(change, abs(new - x[i]))
                x[i] = new
        if change <= 1e-7:
            break
    return [value / s for value, s in zip(x, scale.tolist(), strict=True)]


def choose(times: list[Time], fitted: dict[str, tuple[float, ...]]) -> tuple[Time, float] | None:
    """The configuration with the least predicted time, and that."""
    predicted = [
        (sum(p * t for p, t in zip(fitted[time.name], time.terms, strict=True)), i)
        for i, time in enumerate(times)
        if time.name in fitted
    ]
    if not predicted:
        return None
    us, i = min(predicted)
    return times[i], us


def leave_out(layers: Layers) -> list[tuple[float, str]]:
    """For every layer how much longer its choice takes than its best, fitted to the others, and a
    line about it."""
    found = []
    for key, times in layers.items():
        rest = {k: v for k, v in layers.items() if k[1] != key[1]}
        choice = choose(times, fit(rest))
        if choice is None:
            continue
        taken, predicted = choice
        best = min(times, key=lambda time: time.us)
        op, s, gpu = key
        if isinstance(s, AttentionSpec):
            shape = f"{s.n}x{s.t} of {s.d} sm_{gpu.arch}"
        else:
            shape = f"{s.n}x{s.h}x{s.w} {s.k}->{s.c} {s.r}x{s.s} sm_{gpu.arch}"
        config = " ".join(f"{k}={v}" for k, v in taken.config.items())
        line = f"| {op} {shape} | {best.us:.1f} | {best.kernel} | {taken.us:.1f} "
        line += f"| {taken.kernel} {config} | {predicted:.1f} |"
        found.append((taken.us / best.us, line))
    return sorted(found, reverse=True)


def write(path: Path, fitted: dict[str, tuple[float, ...]]) -> None:
    """Into a file of costs, which keeps what else it has."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= {name: [float(f"{v:.4g}") for v in p] for name, p in fitted.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    path.write_text("{" + ",\n ".join(lines) + "}\n")


def main() -> None:
    options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    paths = [word for word in sys.argv[1:] if "=" not in word]
    gpu = CHIPS["h100"].gpu._replace(
        arch=int(options.get("arch", 90)), num_sms=int(options.get("sms", 132))
    )
    layers = read(paths, gpu)
    lines = leave_out(layers)
    within = sum(ratio <= 1.05 for ratio, _ in lines)
    print(f"{within} of {len(lines)} left-out layers within 5 % of their fastest configuration")
    for ratio, line in lines:
        if ratio > 1.05:
            print(f"{ratio:.2f} {line}")
    fitted = fit(layers)
    for name, values in fitted.items():
        print(f"{name:45s}", " ".join(f"{v:.3f}" for v in values))
    if "out" in options:
        write(Path(options["out"]), fitted)


if __name__ == "__main__":
    main()
