"""Time whole training steps: noise, forward, loss, backward, update.

    python -m benchmarks.train_step [key=value ...]

    batch=8,32,128   images a step
    model=unet64     configs/model
    steps=10         steps timed
    providers=...    any of {triton,eager,compile,autotune}-{bf16,tf32,fp32}
    modes=plain,graph   launched from Python, and as one CUDA graph
    out=             a folder for the CSV and the table; default benchmarks/results

Ours is timed only after its output and gradients have been compared with the float32 baseline.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import harness
from .cases import meta_model
from .harness import MATRIX_PEAK, OURS, Provenance, Row, WrongResult, check_choice
from .steps import PROVIDERS, Step, build_step, check_ours

DEFAULTS = {
    "batch": (8, 32, 128),
    "model": "unet64",
    "steps": 10,
    "providers": ("eager-fp32", "eager-tf32", "eager-bf16", "compile-bf16", "triton-bf16"),
    "modes": ("plain", "graph"),
    "out": "",
}
_SIZE = 64  # pixels
_WARM_UP = 3
_GIB = 2**30


class Result(NamedTuple):
    """One line of the table."""

    batch: int
    provider: str
    mode: str
    timing: harness.Timing
    memory: int  # bytes, at the peak, of this provider alone
    setup: float  # seconds to build, compile and warm up


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for provider in settings["providers"]:
        check_choice("providers", provider, PROVIDERS)
    for mode in settings["modes"]:
        check_choice("modes", mode, ("plain", "graph"))
    flops = 3 * meta_model(settings["model"], _SIZE).flops_per_image
    device = harness.require_cuda()
    origin = harness.provenance()
    results, notes, wrong = [], [], 0
    for provider in settings["providers"]:
        try:
            if provider.startswith(OURS):
                errors = check_ours(settings["model"], provider.split("-")[1], device)
                print("{}: gradient off by {:.1e}, reference {:.1e}".format(provider, *errors))
            found, failed = run_batches(settings, provider, device)
        except WrongResult as error:
            found, failed, wrong = [], [f"{provider} is wrong and not timed: {error}"], 1
            print(f"! {failed[0]}", flush=True)
        results += found
        notes += failed
        table = format_results(results, flops, MATRIX_PEAK.get(origin.gpu))
        table = "\n".join([table, "", *(f"- {note}" for note in notes)]).rstrip()
        save(settings, results, table, flops, origin)  # at once: a run may be cut short
    print(f"\n{table}")
    return wrong


def run_batches(
    settings: dict, provider: str, device: torch.device
) -> tuple[list[Result], list[str]]:
    """The lines of one provider, and what went wrong; both are printed as they come."""
    results, notes = [], []
    modes = settings["modes"]
    for batch in settings["batch"]:
        found, failed = run_provider(settings, provider, modes, batch, device)
        for r in found:
            time_ms = f"{r.timing.median / 1000:.2f} ms ({r.setup:.0f} s to set up)"
            print(f"B={batch} {provider} {r.mode}: {time_ms}", flush=True)
        for note in failed:
            print(f"! {note}", flush=True)
        results += found
        notes += failed
        if any("graph: failed" in note for note in failed):
            modes = ("plain",)  # a capture that fails may leave PyTorch's allocator in it
    return results, notes


def run_provider(
    settings: dict, provider: str, modes: Sequence[str], batch: int, device: torch.device
) -> tuple[list[Result], list[str]]:
    """The lines of one provider at one batch size, and what went wrong."""
    torch._dynamo.reset()
    harness.release_memory()
    before = torch.cuda.memory_allocated()
    results, notes = [], []
    start = time.perf_counter()
    step = None
    for mode in ("plain", "graph"):
        if mode not in modes:
            continue
        torch.cuda.reset_peak_memory_stats()
        try:
            step = step or build_step(provider, settings["model"], batch, device, _SIZE)
            run = step.captured() if mode == "graph" else _warmed(step)
            torch.cuda.synchronize()
            setup = time.perf_counter() - start
            timing = harness.time_steps(run, settings["steps"])
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


def save(
    settings: dict, results: Sequence[Result], table: str, flops: int, origin: Provenance
) -> None:
    """The rows into the CSV, and the table beside it."""
    folder = Path(settings["out"] or harness.RESULTS)
    rows = [
        Row(
            "train_step",
            f"{r.batch}x{_SIZE}x{_SIZE}x3 {settings['model']}",
            "any",
            "step",
            f"{r.provider} {r.mode}",
            *r.timing,
            0,
            flops * r.batch,
            *origin,
        )
        for r in results
    ]
    harness.add_rows(folder / f"{origin.gpu}.csv", rows)
    path = folder / f"{origin.gpu}-train-step.md"
    about = (
        f"One training step of {settings['model']} at {_SIZE}x{_SIZE}; {origin.gpu},"
        f" torch {origin.torch}, triton {origin.triton}, commit {origin.commit}."
    )
    path.write_text(f"{about}\n\n{table}\n")


if __name__ == "__main__":
    harness.run_entry(main)
