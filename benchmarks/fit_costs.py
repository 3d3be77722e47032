"""Fit the parameters of the cost models to measured times, and say how good the choices are.

    python -m benchmarks.fit_costs SWEEP.jsonl [...] [out=FILE] [kernels=a,b] [arch=90 sms=132]

The times are those of `benchmarks.sweep_configs`. Each kernel's parameters, none negative, are the
least squares of relative errors, weighted by how fast a configuration is (the root of that, since
slow ones tell the terms apart): it is the fast ones that have to be told apart. Then, layer by
layer, they are fitted without that layer: what would be taken for it, and how much longer that
takes than its fastest configuration. Only times of one file are compared with one another: two GPUs
of a kind have other clocks. `out` gets the parameters of all layers. With `kernels` only theirs are
fitted, and what they are compared with has the parameters that are stored.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import sweep_channel_norms, sweep_norms
from benchmarks.sweep_configs import OPS
from triton_kernels.registry import cost
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.spec import (
    AttentionSpec,
    ChannelNormSpec,
    ConvSpec,
    NormSpec,
    Spec,
    WeightGradsSpec,
)
from triton_kernels.runtime.device import Device

_FEWEST = 6  # times, of several layers, that a kernel's parameters are fitted to
_FEWEST_LAYERS = 3
_FEWEST_CHOICES = 2  # configurations of a layer
# Terms of `cost.terms` that tiles of a kernel share: the launch, memory, and sectors beside rows
_SHARED = (0, 6, 11)
_FLAT = 1e-9


class Time(NamedTuple):
    """One configuration of one layer."""

    name: str  # of its parameters
    kernel: str
    config: dict[str, Any]
    terms: tuple[float, ...]
    us: float


Key = tuple[str, Spec, Device, str]  # the last is the file that the times are in
Layers = dict[Key, list[Time]]


def read(paths: Sequence[str], former: Device) -> Layers:
    """By operation, spec, GPU, which is `former` where a line does not say it, and file; without
    kernels that have no model."""
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
            kind = ChannelNormSpec if op in sweep_channel_norms.OPS.values() else kind
            kind = AttentionSpec if "attention" in op.name else kind
            kind = WeightGradsSpec if op is OPS["weight_grads"] else kind
            spec = _spec(kind, row["spec"])
            gpu = Device(**row["gpu"]) if "gpu" in row else former
            config = kernel.config(**row["config"])
            key = cost.name(kernel.name, kernel.fitted_by, spec, config)
            if (work := kernel.work(spec, gpu, config)) is None:
                continue
            terms = cost.terms(work, gpu)
            layers[op.name, spec, gpu, path].append(
                Time(key, kernel.name, row["config"], terms, row["us"])
            )
    return {key: times for key, times in layers.items() if len(times) >= _FEWEST_CHOICES}


def _spec(kind: type[Spec], fields: dict[str, Any]) -> Spec:
    known = {k: v for k, v in fields.items() if k in kind.__dataclass_fields__}
    if kind is WeightGradsSpec:
        known["convs"] = [_spec(ConvSpec, conv) for conv in known["convs"]]
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})


def fit(layers: Layers, kernels: Collection[str] | None = None) -> dict[str, tuple[float, ...]]:
    """Parameters by name, of these kernels or of all. What a launch and what memory takes is a
    kernel's, whatever its tile."""
    rows: dict[str, list[tuple[Time, float, Key]]] = defaultdict(list)
    for key, times in layers.items():
        best = min(time.us for time in times)
        for time in times:
            if kernels is None or time.kernel in kernels:
                rows[time.name].append((time, best / time.us, key))
    families = defaultdict(list)
    for name, times in sorted(rows.items()):
        if len(times) >= _FEWEST and len({key for *_, key in times}) >= _FEWEST_LAYERS:
            kernel, *fields = name.split()
            families[kernel, *(field for field in fields if "=" not in field)].append(name)
    found = {}
    for names in families.values():
        found |= _fit_family({name: [row[:2] for row in rows[name]] for name in names})
    return found


def _fit_family(rows: dict[str, list[tuple[Time, float]]]) -> dict[str, tuple[float, ...]]:
    """Parameters by name, of the same kernel and type."""
    count = len(next(iter(rows.values()))[0][0].terms)
    own = [i for i in range(count) if i not in _SHARED]
    columns = {
        (name, i): _SHARED.index(i) if i in _SHARED else len(_SHARED) + k * len(own) + own.index(i)
        for k, name in enumerate(rows)
        for i in range(count)
    }
    all_times = [(name, *row) for name, times in rows.items() for row in times]
    a = torch.zeros(len(all_times), max(columns.values()) + 1, dtype=torch.float64)
    b = torch.zeros(len(all_times), dtype=torch.float64)
    for line, (name, time, weight) in enumerate(all_times):
        b[line] = weight**0.5
        for i, term in enumerate(time.terms):
            a[line, columns[name, i]] = term * weight**0.5 / time.us
    x = nonnegative(a, b)
    return {name: tuple(x[columns[name, i]] for i in range(count)) for name in rows}


def nonnegative(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """x >= 0 with the least |a x - b| (Lawson and Hanson 1974, chapter 23)."""
    scale = a.norm(dim=0).clamp_min(1e-30)
    a = a / scale
    gram, right = a.T @ a, a.T @ b
    x = torch.zeros_like(right)
    positive = torch.zeros_like(right, dtype=torch.bool)
    for _ in range(3 * len(x)):
        slope = (right - gram @ x).masked_fill(positive, -1.0)
        if slope.max() <= _FLAT:
            break
        positive[slope.argmax()] = True
        while True:
            best = torch.zeros_like(x)
            chosen = positive.nonzero().flatten()
            normal = gram[chosen][:, chosen]  # terms that are multiples of each other: any of them
            best[chosen] = torch.linalg.lstsq(normal, right[chosen, None]).solution.flatten()
            if best[chosen].min() > 0:
                break
            below = positive & (best <= 0)  # go as far as none becomes negative
            step = (x / (x - best))[below].min()
            x = x + step * (best - x)
            positive &= x > _FLAT
            x = x * positive
        x = best
    return (x / scale).tolist()


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


def leave_out(
    layers: Layers,
    kernels: Collection[str] | None = None,  # to be fitted; None: all
) -> list[tuple[float, str]]:
    """For every layer how much longer its choice takes than its best, fitted to the others, and a
    line about it."""
    found = []
    for key, times in layers.items():
        rest = {k: v for k, v in layers.items() if k[1] != key[1]}
        stored = {} if kernels is None else cost.parameters(key[2].arch)
        others = {k: v for k, v in stored.items() if k.split()[0] not in kernels}
        choice = choose(times, others | fit(rest, kernels or {time.kernel for time in times}))
        if choice is None:
            continue
        taken, predicted = choice
        best = min(times, key=lambda time: time.us)
        op, s, gpu, _ = key
        if isinstance(s, AttentionSpec):
            shape = f"{s.n}x{s.t} of {s.d} sm_{gpu.arch}"
        elif isinstance(s, ChannelNormSpec):
            shape = f"{s.n}x{s.pixels} of {s.c} {s.activation} sm_{gpu.arch}"
        elif isinstance(s, WeightGradsSpec):
            layers_of = " ".join(f"{conv.k}->{conv.c}" for conv in s.convs)
            shape = f"{s.n}x{s.convs[0].h}x{s.convs[0].w} {layers_of} sm_{gpu.arch}"
        else:
            shape = f"{s.n}x{s.h}x{s.w} {s.k}->{s.c} {s.r}x{s.s} {s.dtype} sm_{gpu.arch}"
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
    kernels = options["kernels"].split(",") if "kernels" in options else None
    layers = read(paths, gpu)
    lines = leave_out(layers, kernels)
    within = sum(ratio <= 1.05 for ratio, _ in lines)
    print(f"{within} of {len(lines)} left-out layers within 5 % of their fastest configuration")
    of_op = Counter(line.split()[1] for _, line in lines)
    well = Counter(line.split()[1] for ratio, line in lines if ratio <= 1.05)
    print(", ".join(f"{op} {well[op]} of {count}" for op, count in sorted(of_op.items())))
    for ratio, line in lines:
        if ratio > 1.05:
            print(f"{ratio:.2f} {line}")
    fitted = fit(layers, kernels)
    for name, values in fitted.items():
        print(f"{name:45s}", " ".join(f"{v:.3f}" for v in values))
    if "out" in options:
        write(Path(options["out"]), fitted)


if __name__ == "__main__":
    main()
