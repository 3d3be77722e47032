"""Where the time of a step goes, kernel by kernel.

    python -m benchmarks.profile [key=value ...]

    mode=train           train: a training step; sample: an evaluation of the network, for sampling
    batch=128            images a step, or several such numbers
    model=unet64         configs/model
    size=64              pixels
    provider=triton-bf16 any of benchmarks.train_step, or of benchmarks.sampling; eager and compile
                         alone mean bf16
    steps=3              steps profiled
    top=30               kernels listed
    launches=0           1: also every launch of the captured graph, in order
    trace=               a file for the trace, to be opened in Perfetto or chrome://tracing

Prints the families of kernels, the kernels that take longest, and how long the host takes to launch
a step: where that is as long as the step, the GPU waits for Python. The kernels are those of a step
launched from Python, since a graph's do not tell which op they came from.

Of our planned step a family also has what its ops cannot do without (see `benchmarks.work`): the
bytes, the floating-point operations, and its floor, the sum over its calls of the time that the one
or the other takes at the GPU's bandwidth and at its peak in bf16.
"""

import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from benchmarks import harness, stopwatch
from benchmarks.harness import check_choice, rates_of
from benchmarks.sampling import PROVIDERS as SAMPLING_PROVIDERS, evaluation_step
from benchmarks.steps import PROVIDERS, Step, build_step
from benchmarks.work import Work, by_family, noted_work

DEFAULTS = {
    "mode": "train",
    "batch": (128,),
    "model": "unet64",
    "size": 64,
    "provider": "triton-bf16",
    "steps": 3,
    "top": 30,
    "launches": 0,
    "trace": "",
}

# The first that matches the kernel's name, then the first that matches the op that launched it.
_BY_KERNEL = (
    ("optimizer", r"adamw|fused_?adam|square_sum|multi_tensor|lpnorm"),
    ("layout", r"nchwToNhwc|nhwcToNchw|nchw_?to|nhwc_?to"),
    ("attention", r"attention|flash|fmha|sdpa|^linear_(context|merge|bwd)"),
    (
        "denoise",
        r"q_sample|denoise|^_draw_|^_normal_kernel|mse_loss|randn|randint",
    ),
    ("conv wgrad", r"wgrad|column_sum|^_sum_(two|group)|^_linear_grads"),
    ("conv dgrad", r"dgrad|conv_(pointer_)?input_grad"),
    ("conv fwd", r"fprop"),
    (
        "norm",
        r"(group|channel)_?norm|^_?norm_|^_segment_sums|^_skip_dx"
        r"|^_sum_parts_|^_join_kernel|RowwiseMoments|GammaBeta|ComputeInternalGradients|FusedParams",
    ),
    ("resample", r"^_(gather|spread|fir)_kernel|^_?resample|pool|upsample|interpolate"),
    (
        "elementwise",
        r"^_cast_kernel|^_pad_channels|^_sum_taps|^_sinusoids|^_begin_step|elementwise|CatArray|memcpy|memset|native::reduce_kernel",
    ),
    ("elementwise", r"^triton_(poi|per|red)_"),
)
_MATRIX = (
    r"conv2d|conv_(forward|pointer|early|one_row|tile_mma|linear_mma|stationary|unfused)"
    r"|conv_(single_tile|narrow|parity)"
    r"|cudnn|xmma|implicit|cutlass|gemm|gemv|nvjet|splitK|cublas|^triton_tem_"
)
_BUILDERS = {
    "train": (build_step, PROVIDERS),
    "sample": (evaluation_step, SAMPLING_PROVIDERS),
}
_FAMILIES = (
    "conv fwd", "conv dgrad", "conv wgrad", "matmul", "norm", "attention", "resample",
    "elementwise", "layout", "denoise", "optimizer", "other",
)  # fmt: skip


class Kernel(NamedTuple):
    """One launch on the GPU."""

    name: str
    op: str  # the PyTorch op that launched it
    start: float  # microseconds
    duration: float


class Floors(NamedTuple):
    """What each family cannot do without, and at which rates."""

    calls: dict[str, list[Work]]  # of one step
    bandwidth: float | None  # TB/s
    peak: float | None  # TFLOP/s

    def cells(self, families: Iterable[str], ms: float) -> list[str]:
        """Gigabytes, TFLOP, milliseconds, and what part they are of `ms`; "-" if not known."""
        calls = [call for family in families for call in self.calls.get(family, ())]
        if not calls:
            return ["-"] * 4
        sums = [
            f"{sum(c.bytes for c in calls) / 1e9:.3f}",
            f"{sum(c.flops for c in calls) / 1e12:.3f}",
        ]
        if self.bandwidth is None or self.peak is None:
            return [*sums, "-", "-"]
        floor = sum(c.floor_us(self.bandwidth, self.peak) for c in calls) / 1000
        return [*sums, f"{floor:.3f}", f"{100 * floor / max(ms, 1e-9):.0f}"]


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    provider = settings["provider"]
    provider = provider if "-" in provider else f"{provider}-bf16"
    check_choice("mode", settings["mode"], _BUILDERS)
    build, providers = _BUILDERS[settings["mode"]]
    check_choice("provider", provider, providers)
    device = harness.require_cuda()
    for batch in settings["batch"]:
        step = build(provider, settings["model"], batch, device, settings["size"])
        print(f"{provider}, {settings['model']}, batch {batch}, {harness.provenance().gpu}\n")
        print_profile(step, provider, settings)
        step.release()
        del step
        stopwatch.release_memory()
    return 0


def print_profile(step: Step, provider: str, settings: dict[str, Any]) -> None:
    """The tables of a step, and what it takes as a graph."""
    wall, host = time_host(step.plain, 10)
    kernels = profile_step(step.plain, settings["steps"], settings["trace"])
    with noted_work() as calls:
        step.plain(0)
    rates = rates_of(harness.provenance().gpu)
    peaks = rates.copies, rates.products if provider.endswith("bf16") else None
    work = Floors(by_family(calls if step.planned else []), *peaks)
    print(report(kernels, settings["steps"], settings["top"], wall, host, work))
    try:
        run = step.captured()
        wall = stopwatch.time_steps(run, 20).median / 1000  # one after the other, as in training
        _, host = time_host(run, 10)
    except Exception as error:  # a library says what it likes of what it cannot capture
        print(f"as one CUDA graph: failed: {harness.reason(error)}")
    else:
        print(f"as one CUDA graph: {wall:.3f} ms a step; the host takes {host:.2f} ms to launch it")
        if settings["launches"]:
            print(timeline(profile_step(run, 1, "")))


def time_host(step: Callable[[int], Any], steps: int) -> tuple[float, float]:
    """Milliseconds a step: until the GPU is done, and until the host has launched it. The medians
    of so many steps, after 5 that do not count."""
    wall, host = [], []
    for k in range(5 + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(k)
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        wall.append(time.perf_counter() - start)
    return 1000 * statistics.median(wall[5:]), 1000 * statistics.median(host[5:])


def profile_step(step: Callable[[int], Any], steps: int, trace: str) -> list[Kernel]:
    """The kernels of so many steps."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for k in range(steps):
            step(100 + k)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trace or Path(folder) / "trace.json")
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text()))


def read_trace(trace: dict[str, Any]) -> list[Kernel]:
    """The GPU's part of a trace, each launch with the op that it came from."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    ops = {
        e["args"]["External id"]: e["name"]
        for e in events
        if e.get("cat") == "cpu_op" and "External id" in e.get("args", {})
    }
    return [
        Kernel(e["name"], ops.get(e["args"].get("External id"), ""), e["ts"], e["dur"])
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def family(kernel: str, op: str) -> str:
    """What a kernel is for, from its name and from the op that launched it."""
    for name, pattern in _BY_KERNEL:
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    if re.search(_MATRIX, kernel, re.IGNORECASE):
        if re.search(r"conv", f"{op} {kernel}", re.IGNORECASE):
            return "conv dgrad" if "backward" in op.lower() else "conv fwd"
        return "matmul"
    return "other"


def report(
    kernels: Sequence[Kernel],
    steps: int,
    top: int,
    wall: float,  # milliseconds a step, as `host`
    host: float,
    floors: Floors,
) -> str:
    """The tables."""
    total = sum(k.duration for k in kernels) or 1.0
    busy = _union((k.start, k.start + k.duration) for k in kernels) / steps / 1000
    lines = []
    for name in _FAMILIES:
        mine = [k for k in kernels if family(k.name, k.op) == name]
        if mine:
            ms = sum(k.duration for k in mine) / steps / 1000
            lines.append([name, *_numbers(mine, steps, total), *floors.cells([name], ms)])
    ms = sum(k.duration for k in kernels) / steps / 1000
    lines.append(["all", *_numbers(kernels, steps, total), *floors.cells(floors.calls, ms)])
    header = ["family", "ms/step", "launches/step", "us/launch", "%"]
    needs = ["GB", "TFLOP", "floor ms", "floor / ms, %"]
    parts = [harness.format_table([*header, *needs], lines)]

    groups = defaultdict(list)
    for k in kernels:
        groups[k.name, family(k.name, k.op), k.op].append(k)
    longest = sorted(groups.items(), key=lambda g: -sum(k.duration for k in g[1]))[:top]
    lines = [
        [name[:70], kind, op[:36], *_numbers(mine, steps, total)]
        for (name, kind, op), mine in longest
    ]
    parts.append(harness.format_table(["kernel", "family", "op", *header[1:]], lines))
    parts.append(
        f"wall {wall:.2f} ms a step; GPU busy {busy:.2f} ms ({100 * busy / max(wall, 1e-9):.0f}%);"
        f" the host launches a step in {host:.2f} ms, so the step is "
        + ("bound by the host" if host > busy else "bound by the GPU")
    )
    return "\n\n".join(parts)


def timeline(kernels: Sequence[Kernel]) -> str:
    """Every launch in order: when it begins after the first, microseconds until the next begins,
    and its own, which are more where launches overlap."""
    kernels = sorted(kernels, key=lambda k: k.start)
    if not kernels:
        return ""
    ends = [k.start for k in kernels[1:]] + [kernels[-1].start + kernels[-1].duration]
    lines = [
        [f"{k.start - kernels[0].start:.1f}", f"{end - k.start:.1f}", f"{k.duration:.1f}", k.name]
        for k, end in zip(kernels, ends, strict=True)
    ]
    return harness.format_table(["begins, us", "until the next", "us", "kernel"], lines)


def _numbers(kernels: Sequence[Kernel], steps: int, total: float) -> list[str]:
    time_us = sum(k.duration for k in kernels)
    count = len(kernels)
    return [
        f"{time_us / steps / 1000:.3f}",
        f"{count / steps:.0f}",
        f"{time_us / max(count, 1):.1f}",
        f"{100 * time_us / total:.1f}",
    ]


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what the intervals cover together."""
    covered, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


if __name__ == "__main__":
    harness.run_entry(main)
