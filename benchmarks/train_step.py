"""Time whole training steps: noise, forward, loss, backward, update.

    python -m benchmarks.train_step [key=value ...]

    batch=8,32,128,512   images a step
    model=unet64     configs/model
    size=64          pixels
    steps=10         steps timed, fewer where they would take more than 3 seconds
    providers=...    any of {triton,eager,compile,autotune}-{bf16,tf32,fp32}
    modes=plain,graph   launched from Python, and as one CUDA graph
    deterministic=0  1: as train.deterministic, PyTorch's kernels have to give the same bits twice
    processes=12     that compile our kernels first, and at most that compile PyTorch's; 0: none
    warm=0           1: compile, and time nothing
    out=             a folder for the CSV and the table; default benchmarks/results

Ours is timed only after its output and gradients have been compared with the float32 baseline. All
providers are timed at the first batch size before any at the second, and everything is written
after every measurement: a run may be cut short. What is compiled first stays in the caches of
Triton and Inductor (TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR). Memory of two batch sizes says
which batch the GPU has room for.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import harness, precompile, stopwatch
from benchmarks.cases import meta_model
from benchmarks.compilers import Compilers, command, serve
from benchmarks.harness import OURS, Provenance, Row, WrongResult, check_choice, rates_of
from benchmarks.steps import PROVIDERS, Step, build_step, check_ours, rehearse_check, rehearse_step
from diffusion.runtime.backend import require_determinism

DEFAULTS = {
    "batch": (8, 32, 128, 512),
    "model": "unet64",
    "size": 64,
    "steps": 10,
    "providers": ("compile-bf16", "triton-bf16", "eager-bf16", "eager-tf32", "eager-fp32"),
    "modes": ("plain", "graph"),
    "deterministic": 0,
    **precompile.SETTINGS,
    "warm": 0,
    "compiler": 0,  # 1: a process that compiles PyTorch's steps for another
    "out": "",
}
_WARM_UP, _MIN_STEPS, _SECONDS = 3, 3, 3.0
_CHECKED = 8  # images
_TOGETHER = 8  # steps of PyTorch that are compiled at once: all of them have memory on the GPU
_GIB = 2**30


class Result(NamedTuple):
    """One line of the table."""

    batch: int
    provider: str
    mode: str
    timing: stopwatch.Timing
    memory: int  # bytes, at the peak, of this provider alone
    setup: float  # seconds to build, compile and warm up


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for provider in settings["providers"]:
        check_choice("providers", provider, PROVIDERS)
    for mode in settings["modes"]:
        check_choice("modes", mode, ("plain", "graph"))
    if settings["compile_for"]:
        return precompile.compile_kernels(partial(rehearse, settings), settings)
    device = harness.require_cuda()
    if settings["deterministic"]:
        require_determinism()
    if settings["compiler"]:
        serve(partial(compile_step, settings, device))
        return 0
    if settings["processes"]:
        compile_all(settings, arguments, device)
    if settings["warm"]:
        return 0
    table = Table(settings, harness.provenance())
    modes = dict.fromkeys(checked(settings, device, table), settings["modes"])
    for batch in settings["batch"]:
        for provider in modes:
            found, failed = run_provider(settings, provider, modes[provider], batch, device)
            table.add(found, failed)
            if any("graph: failed" in note for note in failed):
                modes[provider] = ("plain",)  # a second capture would hardly fare better
    print(f"\n{table}")
    return int(len(table.notes) > 0)


def compile_all(settings: dict, arguments: Sequence[str], device: torch.device) -> None:
    """What is about to be timed: our kernels, and beside them the steps of PyTorch."""
    began, module = time.perf_counter(), "benchmarks.train_step"
    ours = precompile.start(module, arguments, device)
    numbers = range(len(compiled_steps(settings)))
    again = command(module, arguments, "compiler=1")
    count = min(settings["processes"], _TOGETHER)
    with closing(Compilers(again, count, numbers)) as theirs:
        for number in numbers:
            theirs.next_ready([number])
    if theirs.failed:
        print(f"! {theirs.failed} of {count} compiling processes ended early", flush=True)
    ours.wait()
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)


def rehearse(settings: dict) -> None:
    """Ask for all that ours launches."""
    for provider in settings["providers"]:
        kind, precision = provider.split("-")
        if kind == OURS:
            rehearse_check(settings["model"], precision, _CHECKED, settings["size"])
            for batch in settings["batch"]:
                rehearse_step(settings["model"], precision, batch, settings["size"])


def compiled_steps(settings: dict) -> list[tuple[str, int]]:
    """The providers that torch.compile compiles, at each batch size."""
    compiled = [p for p in settings["providers"] if p.split("-")[0] in ("compile", "autotune")]
    return [(provider, batch) for batch in settings["batch"] for provider in compiled]


def compile_step(settings: dict, device: torch.device, number: int) -> None:
    """Leave it in Inductor's cache. Errors are for the run to report."""
    provider, batch = compiled_steps(settings)[number]
    torch._dynamo.reset()
    try:
        build_step(provider, settings["model"], batch, device, settings["size"]).plain(0)
    except Exception as error:  # whatever a compiler raises
        print(f"! {provider}, batch {batch}: {harness.reason(error)}", flush=True)
    stopwatch.release_memory()


def checked(settings: dict, device: torch.device, table: "Table") -> list[str]:
    """The providers without those of ours that are wrong."""
    right = []
    for provider in settings["providers"]:
        if provider.startswith(OURS):
            precision = provider.split("-")[1]
            try:
                model, size = settings["model"], settings["size"]
                errors = check_ours(model, precision, device, _CHECKED, size)
            except WrongResult as error:
                table.add([], [f"{provider} is wrong and not timed: {error}"])
                continue
            print("{}: gradient off by {:.1e}, reference {:.1e}".format(provider, *errors))
        right.append(provider)
    return right


def run_provider(
    settings: dict, provider: str, modes: Sequence[str], batch: int, device: torch.device
) -> tuple[list[Result], list[str]]:
    """The lines of one provider at one batch size, and what went wrong."""
    torch._dynamo.reset()
    stopwatch.release_memory()
    before = torch.cuda.memory_allocated()
    results, notes = [], []
    start = time.perf_counter()
    step = None
    for mode in ("plain", "graph"):
        if mode not in modes:
            continue
        torch.cuda.reset_peak_memory_stats()
        try:
            step = step or build_step(provider, settings["model"], batch, device, settings["size"])
            run = step.captured() if mode == "graph" else _warmed(step)
            torch.cuda.synchronize()
            setup = time.perf_counter() - start
            timing = stopwatch.time_steps(run, _affordable(run, settings["steps"]), warm_up=1)
        except Exception as error:  # a library says what it likes of what it cannot do
            notes.append(f"B={batch} {provider} {mode}: failed: {harness.reason(error)}")
            continue
        memory = torch.cuda.max_memory_allocated() - before
        results.append(Result(batch, provider, mode, timing, memory, setup))
    return results, notes


def _warmed(step: Step) -> Callable[[int], Any]:
    for k in range(_WARM_UP):
        step.plain(k)
    return step.plain


def _affordable(run: Callable[[int], Any], steps: int) -> int:
    """How many of so many steps to time, from the duration of one."""
    start = time.perf_counter()
    run(0)
    torch.cuda.synchronize()
    return max(_MIN_STEPS, min(steps, round(_SECONDS / (time.perf_counter() - start))))


class Table:
    """The lines and notes so far; each is printed, and all are in the files, as soon as known."""

    def __init__(self, settings: dict, origin: Provenance) -> None:
        self.settings, self.origin = settings, origin
        self.flops = 3 * meta_model(settings["model"], settings["size"]).flops_per_image
        self.results: list[Result] = []
        self.notes: list[str] = []

    def add(self, results: Sequence[Result], notes: Sequence[str]) -> None:
        """Some more."""
        for r in results:
            time_ms = f"{r.timing.median / 1000:.2f} ms ({r.setup:.0f} s to set up)"
            print(f"B={r.batch} {r.provider} {r.mode}: {time_ms}", flush=True)
        for note in notes:
            print(f"! {note}", flush=True)
        self.results += results
        self.notes += notes
        self._save()

    def __str__(self) -> str:
        peak = rates_of(self.origin.gpu).products
        table = format_results(self.results, self.flops, peak) if self.results else ""
        parts = [table, format_memory(self.results, gpu_memory())]
        parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(part for part in parts if part)

    def _save(self) -> None:
        """The rows into the CSV, and the table beside it."""
        s, origin = self.settings, self.origin
        folder = Path(s["out"] or harness.RESULTS)
        suffix = " deterministic" if s["deterministic"] else ""
        rows = [
            Row(
                "train_step",
                f"{r.batch}x{s['size']}x{s['size']}x3 {s['model']}",
                "any",
                "step",
                f"{r.provider} {r.mode}{suffix}",
                *r.timing,
                0,
                self.flops * r.batch,
                *origin,
            )
            for r in self.results
        ]
        harness.add_rows(folder / f"{origin.gpu}.csv", rows)
        path = folder / f"{origin.gpu}-train-step-{s['model']}{suffix.replace(' ', '-')}.md"
        about = (
            f"One training step of {s['model']} at {s['size']}x{s['size']}{suffix}; {origin.gpu},"
            f" torch {origin.torch}, triton {origin.triton}, commit {origin.commit}."
        )
        path.write_text(f"{about}\n\n{self}\n")


def gpu_memory() -> int:
    """Bytes of the whole GPU; 0 if there is none."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


def format_results(results: Sequence[Result], flops: int, peak: float | None) -> str:
    """The table; `flops` an image, `peak` in TFLOP/s. The ratio is the time of the fastest other
    provider in any precision at the same batch, over the line's own."""
    lines = []
    for r in sorted(results, key=lambda r: (r.batch, -r.timing.median)):
        others = [
            other.timing.median
            for other in results
            if other.batch == r.batch
            and other.provider != r.provider
            and not other.provider.startswith(OURS)
        ]
        seconds = r.timing.median / 1e6
        rate = r.batch * flops / seconds / 1e12
        lines.append(
            [
                str(r.batch),
                r.provider,
                r.mode,
                f"{seconds * 1000:.2f}",
                f"{r.timing.p20 / 1000:.2f}",
                f"{r.timing.p80 / 1000:.2f}",
                f"{r.batch / seconds:.0f}",
                f"{r.memory / _GIB:.2f}",
                f"{100 * rate / peak:.1f}" if peak else "-",
                f"{min(others) / r.timing.median:.2f}" if others else "-",
                f"{r.setup:.0f}",
            ]
        )
    header = [
        "batch", "provider", "mode", "ms", "p20", "p80", "images/s", "peak GiB",
        "% of matrix peak", "best other / this", "setup s",
    ]  # fmt: skip
    return harness.format_table(header, lines)


def format_memory(results: Sequence[Result], total: int) -> str:
    """What memory grows by with the batch, and the largest batch that this leaves room for in
    `total` bytes; by the two largest batches of every provider. Empty if none has two."""
    lines = []
    for name in dict.fromkeys((r.provider, r.mode) for r in results):
        mine = sorted((r.batch, r.memory) for r in results if (r.provider, r.mode) == name)
        if len(mine) < 2:
            continue
        (few, low), (many, high) = mine[-2:]
        image = (high - low) / (many - few)
        fixed = high - image * many
        largest = int((total - fixed) / image) if image > 0 else 0
        numbers = [f"{few}, {many}", f"{fixed / _GIB:.2f}", f"{image / 2**20:.1f}", str(largest)]
        lines.append([*name, *numbers])
    header = ["provider", "mode", "from batches", "fixed GiB", "MiB an image", "largest batch"]
    return harness.format_table(header, lines) if lines else ""


if __name__ == "__main__":
    harness.run_entry(main)
