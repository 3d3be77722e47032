"""Compiles the kernels of ours that a benchmark launches, before it times anything.

    if settings["compile_for"]:
        return precompile.compile_kernels(partial(rehearse, settings), settings)
    device = harness.require_cuda()
    precompile.start("benchmarks.NAME", arguments, device).wait()

`start` starts the benchmark once more, as a process that uses no GPU. It does a dry run of all that
will be launched, and its forks compile it, side by side (`runtime/compile_launches.py`).
"""

import json
import subprocess
import time
from collections.abc import Callable, Sequence

import torch
from triton.runtime.jit import JITFunction

from benchmarks.compilers import command
from benchmarks.harness import ROOT
from triton_kernels.runtime.compile_launches import compile_launches
from triton_kernels.runtime.device import Device, describe
from triton_kernels.runtime.launch_recorder import rehearsal

# of a benchmark
SETTINGS = {
    "processes": 12,
    "compile_for": "",  # the GPU that a process compiles for, as `describe` has it
}


def start(
    module: str, arguments: Sequence[str], device: torch.device, *more: str
) -> subprocess.Popen:
    """Start a process that compiles what `module` with these arguments launches on `device`. Its
    `main` finds `compile_for` set, and calls `compile_kernels`. What it does not compile is
    compiled when it is launched."""
    chip = f"compile_for={json.dumps(describe(device))}"
    return subprocess.Popen(command(module, arguments, chip, *more), cwd=ROOT)


def await_compiled(process: subprocess.Popen, seconds: float) -> None:
    """Wait until it has compiled everything, or for so long: then it is ended, for nothing else is
    to run while something is timed."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # its forks end with the kernel that each compiles
        process.wait()


def chip_of(settings: dict) -> Device:
    """The GPU that this process compiles for."""
    return Device(*json.loads(settings["compile_for"]))


def compile_kernels(rehearse: Callable[[], None], settings: dict) -> int:
    """Compile what `rehearse` launches, over tensors in host memory that nobody writes, by so many
    `processes`. This process does not use CUDA. Returns 0, the code to exit with: who needs a
    kernel that does not compile says so."""
    torch.set_num_threads(1)
    began, gpu = time.monotonic(), chip_of(settings)
    with rehearsal(gpu) as launches:
        rehearse()
    launches.sort(key=lambda launch: type(launch.kernel) is JITFunction)  # Gluon's take long
    print(f"{len(launches)} kernels, known after {time.monotonic() - began:.0f} s", flush=True)
    done = 0
    try:
        for _ in compile_launches(launches, gpu.arch, settings["processes"]):
            done += 1
    except RuntimeError as error:
        print(f"! {error}", flush=True)
    print(f"{done} kernels compiled after {time.monotonic() - began:.0f} s", flush=True)
    return 0
