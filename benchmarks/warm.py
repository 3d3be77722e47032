"""Compile what benchmarks.train_step will time, side by side and before a clock runs.

    python -m benchmarks.warm [key=value ...]

    batch=8,32,128,512   images a step
    model=unet64     configs/model
    size=64          pixels
    providers=compile-bf16,triton-bf16   any of benchmarks.train_step
    minutes=10       after which what is not done is given up
    together=8       how many compile at a time

Each provider at each batch size is a process of its own that does one step. What it compiled, and
what it had measured to choose from, stays in the caches of Triton and Inductor (TRITON_CACHE_DIR
and TORCHINDUCTOR_CACHE_DIR): a later process starts fast, also after one that was given up.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import harness
from benchmarks.harness import ROOT, check_choice
from benchmarks.steps import PROVIDERS

DEFAULTS = {
    "batch": (8, 32, 128, 512),
    "model": "unet64",
    "size": 64,
    "providers": ("compile-bf16", "triton-bf16"),
    "minutes": 10.0,
    "together": 8,
}


class _Compiling(NamedTuple):
    process: subprocess.Popen
    name: str
    began: float


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    for provider in settings["providers"]:
        check_choice("providers", provider, PROVIDERS)
    harness.require_cuda()
    end = time.monotonic() + 60 * settings["minutes"]
    waiting = [(p, b) for p in settings["providers"] for b in settings["batch"]]
    running: list[_Compiling] = []
    failed = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        try:
            while (waiting or running) and time.monotonic() < end:
                while waiting and len(running) < settings["together"]:
                    running.append(_start(settings, *waiting.pop(0), folder))
                time.sleep(0.2)
                failed += _remove_done(running)
        finally:
            for one in running:
                _give_up(one)
    for provider, batch in waiting:
        print(f"{provider}, batch {batch}: not begun", flush=True)
    return int(failed + len(running) + len(waiting) > 0)


def _start(settings: dict, provider: str, batch: int, folder: str) -> _Compiling:
    command = [sys.executable, "-m", "benchmarks.train_step", f"batch={batch}", "modes=plain"]
    command += [f"providers={provider}", f"model={settings['model']}", f"size={settings['size']}"]
    command += ["steps=1", f"out={folder}/{provider}-{batch}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    return _Compiling(process, f"{provider}, batch {batch}", time.monotonic())


def _remove_done(running: list[_Compiling]) -> int:
    """Take those that are done off the list; returns how many of them failed."""
    failed = 0
    for one in list(running):
        code = one.process.poll()
        if code is not None:
            running.remove(one)
            failed += code != 0
            done = "done" if code == 0 else f"failed with code {code}"
            print(f"{one.name}: {done} after {time.monotonic() - one.began:.0f} s", flush=True)
    return failed


def _give_up(one: _Compiling) -> None:
    os.killpg(one.process.pid, signal.SIGKILL)  # with the processes that compile for it
    one.process.wait()
    seconds = time.monotonic() - one.began
    print(f"{one.name}: did not finish within {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    harness.run_entry(main)
