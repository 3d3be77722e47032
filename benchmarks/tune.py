"""Measure which tiles are fastest for the shapes of a model, and remember it.

    python -m benchmarks.tune [key=value ...]

    model=unet64        configs/model
    batch=8,32,128      images a step
    processes=12        that compile side by side
    out=                the table; default: the user's cache for this GPU, torch and triton

First many processes compile every candidate into Triton's cache, each its share; then one process
times them inside a training step. A candidate whose result differs from the default's is rejected.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from triton_kernels import tuning

from . import harness
from .steps import build_step

DEFAULTS = {
    "model": "unet64",
    "batch": (8, 32, 128),
    "processes": 12,
    "precision": "bf16",
    "out": "",
    "part": -1,  # the share of a compiling process
}
_SIZE = 64  # pixels
_SHOWN = 12  # of the shapes that gained most


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    device = harness.require_cuda()
    if settings["part"] >= 0:
        _step_in_search(settings, device, timed=False)
        return 0
    shares = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.tune", *arguments, f"part={part}"])
        for part in range(settings["processes"])
    ]
    failed = sum(share.wait() != 0 for share in shares)
    if failed:
        print(f"! {failed} of {len(shares)} compiling processes failed; the rest is compiled now")
    found = _step_in_search(settings, device, timed=True)
    path = Path(settings["out"]) if settings["out"] else tuning.cache_path()
    tuning.save(found.found, path)
    _report(found)
    print(f"{len(found.found)} shapes in {path}")
    return 0


def _step_in_search(settings: dict, device: torch.device, timed: bool) -> tuning.Search:
    part, parts = (0, 1) if timed else (settings["part"], settings["processes"])
    with tuning.search(part, parts, timed) as found:
        for batch in settings["batch"]:
            provider = f"{harness.OURS}-{settings['precision']}"
            step = build_step(provider, settings["model"], batch, device, _SIZE)
            step.plain(0)
            del step
            harness.release_memory()
    return found


def _report(found: tuning.Search) -> None:
    gains = []
    for name, times in found.times.items():
        if times:
            best = min(times, key=times.get)
            gains.append((times[found.defaults[name]] - times[best], name, best, times))
    gains.sort(reverse=True, key=lambda gain: gain[0])
    for gain, name, best, times in gains[:_SHOWN]:
        before = times[found.defaults[name]]
        print(f"{before:7.1f} -> {before - gain:7.1f} us  {name}  {best}")
    for line in found.rejected:
        print(f"! wrong result, left out: {line}")


if __name__ == "__main__":
    harness.run_entry(main)
