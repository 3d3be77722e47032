"""Measure which tiles are fastest for the shapes of a model, and remember it.

    python -m benchmarks.tune [key=value ...]

    model=unet64        configs/model
    conv_resample=0     1: of the ops: with convolutions in down- and upsampling
    size=64             pixels
    batch=8,32,128      images a step
    what=step           step: what a training step launches; ops: the public ops, each by itself
    op=all              of the ops: conv2d, group_norm, attention, ...
    longer=0            1: of attention also over more positions than the model has
    only=               kernels by the first word of their entries, e.g. conv_forward; default all
    precision=bf16      bf16 | fp16 | tf32
    processes=12        that compile side by side
    shown=12            how many of the largest gains to print
    out=                the table; default: the user's cache for this GPU, torch and triton

First many processes compile every candidate into Triton's cache, each its share; then one process
times them, in a training step and at the shapes that `benchmarks.run` would time. A candidate whose
result differs from the default's is rejected.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import harness, stopwatch
from benchmarks.cases import OPS
from benchmarks.compilers import run_shares
from benchmarks.harness import check_choice
from benchmarks.run import DEFAULTS as RUN_DEFAULTS, select
from benchmarks.steps import build_step
from diffusion.errors import writing
from triton_kernels.registry import rows
from triton_kernels.registry.search import Search, search
from triton_kernels.runtime.device import describe

_BOTH_WAYS = ("group_norm", "attention", "cross_attention")  # backward goes forward too
DEFAULTS = {
    "model": "unet64",
    "size": 64,
    "conv_resample": 0,
    "batch": (8, 32, 128),
    "what": ("step",),
    "op": ("all",),
    "longer": 0,
    "only": (),
    "processes": 12,
    "precision": "bf16",
    "shown": 12,
    "out": "",
    "part": -1,  # the share of a compiling process
}


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for what in settings["what"]:
        check_choice("what", what, ("step", "ops"))
    for op in settings["op"]:
        check_choice("op", op, (*OPS, "all"))
    device = harness.require_cuda()
    part, parts = settings["part"], settings["processes"]
    if part >= 0:
        with search(part, parts, timed=False, only=settings["only"]):
            for _ in _walk(settings, device):
                pass
        return 0
    path = Path(settings["out"]) if settings["out"] else rows.cache_path(describe(device))
    with writing(path):
        rows.save([], path)  # before it takes minutes to find out that this cannot be done
    if parts:
        run_shares("benchmarks.tune", arguments, parts)
    with search(only=settings["only"]) as found:
        try:
            for _ in _walk(settings, device):
                rows.save(found.rows, path)  # at once: a run may be cut short
        except KeyboardInterrupt:
            print("! interrupted; what was found until now is kept")
    report(found, settings["shown"])
    print(f"{len(found.rows)} shapes in {path}")
    return 0


def _walk(settings: dict, device: torch.device) -> Iterator[None]:
    """Launch whatever there is to be tuned, piece by piece."""
    for batch in settings["batch"]:
        if "step" in settings["what"]:
            provider = f"{harness.OURS}-{settings['precision']}"
            step = build_step(provider, settings["model"], batch, device, settings["size"])
            step.plain(0)
            del step
            stopwatch.release_memory()
            yield
        if "ops" in settings["what"]:
            yield from _run_ops(settings, batch, device)


def _run_ops(settings: dict, batch: int, device: torch.device) -> Iterator[None]:
    """Every pass of the public ops once, at the shapes of the model."""
    ops = OPS if "all" in settings["op"] else settings["op"]
    chosen = RUN_DEFAULTS | {
        "batch": (batch,),
        "model": settings["model"],
        "size": settings["size"],
        "conv_resample": settings["conv_resample"],
        "dtype": (settings["precision"],),
        "longer": settings["longer"],
    }
    for experiment in select(chosen, ops):
        if experiment.op in _BOTH_WAYS and experiment.pass_ == "fwd":
            continue
        harness.set_precision(experiment.dtype)
        experiment.providers[harness.OURS].prepare(experiment.inputs(device))()
        yield
    stopwatch.release_memory()


def report(found: Search, shown: int) -> None:
    """Print the shapes that gained most, and what was wrong."""
    times = {rows.described(row): row["us"] for row in found.times}
    gains = []
    for best, default in zip(found.rows, found.defaults, strict=True):
        before, after = times.get(rows.described(default)), times[rows.described(best)]
        if before is not None:  # else it was wrong
            gains.append((before - after, before, best))
    gains.sort(key=lambda gain: gain[0], reverse=True)
    for gain, before, best in gains[:shown]:
        print(f"{before:7.1f} -> {before - gain:7.1f} us  {rows.described(best)}")
    for row in found.rejected:
        print(f"! wrong result, left out: {rows.described(row)}")


if __name__ == "__main__":
    harness.run_entry(main)
