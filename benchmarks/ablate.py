"""Time a training step or an evaluation without some of its kernels: what each of them is worth.

    python -m benchmarks.ablate [key=value ...]

    kernels=         names of the registry, such as `single_tile` or `conv_means/single_tile`, each
                     left out alone; with `+` between them, together; default: each that
                     `select` takes (of a joined launch the plan may only ask whether it can)
    model=unet64     configs/model, or benchmarks/networks
    batch=32         images, or several such numbers
    what=train       train: a step; evaluate: an evaluation of the network, for sampling
    precision=bf16   of a step
    turns=5          of each: with all kernels, without
    processes=12     that compile kernels, of all batches together
    gpu=             such as h100: time nothing, say what would be launched on it

What is left out is switched off as by TRITON_KERNELS_OFF. Where that changes no launch, nothing is
timed. The step with all kernels and each variant are captured as CUDA graphs and timed in turns in
one process; the figures are medians of the turns. A kernel that an op cannot do
without is reported as such.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import goldens, harness
from benchmarks.cases import images_of, meta_model
from benchmarks.harness import OURS, ROOT, check_choice
from benchmarks.papers import Case, rehearse
from benchmarks.sampling import evaluation_step
from benchmarks.steps import Step, build_step
from diffusion.errors import ConfigError
from triton_kernels.registry import choose
from triton_kernels.registry.chips import chip
from triton_kernels.runtime.compile_launches import compile_launches
from triton_kernels.runtime.device import Device, describe, without
from triton_kernels.runtime.launch_recorder import rehearsal

DEFAULTS = {
    "kernels": ("",),
    "model": "unet64",
    "batch": (32,),
    "what": "train",
    "precision": "bf16",
    "turns": 5,
    "processes": 12,
    "gpu": "",
    "device": "",  # of a process that rehearses and compiles, as `describe` has it
    "report": "",  # its file
}
_CALLS = 6  # in a row, of each turn
_ALL = ""  # the variant that lacks nothing

Rehearsed = dict[str, dict[str, Any]]  # by variant: "launches" and "taken", or "error"


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    check_choice("what", settings["what"], ("train", "evaluate"))
    for variant in settings["kernels"]:
        try:
            with _left_out(variant):
                pass
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if settings["gpu"]:
        for case in _cases(settings):
            report(case, rehearse_variants(case, settings["kernels"], chip(settings["gpu"]).gpu))
        return 0
    if settings["device"]:
        (case,) = _cases(settings)
        gpu = Device(*json.loads(settings["device"]))
        found = rehearse_variants(case, settings["kernels"], gpu, settings["processes"])
        Path(settings["report"]).write_text(json.dumps(found))
        return 0
    device = harness.require_cuda()
    for case, found in _compiled(settings, arguments, describe(device)):
        report(case, found)
        time_case(case, _changed(found), settings["turns"], device)
    return 0


def _cases(settings: dict) -> list[Case]:
    model = settings["model"]
    meta_model(model, images_of(model).size)  # one that is unknown ends here
    return [Case(settings["what"], model, n, settings["precision"]) for n in settings["batch"]]


def _compiled(settings: dict, arguments: Sequence[str], gpu: Device) -> list:
    """Each case and its rehearsals, by a process a case, since these may not use CUDA."""
    cases = _cases(settings)
    share = max(settings["processes"] // len(cases), 1)
    with TemporaryDirectory() as folder:
        started = []
        for case in cases:
            path = Path(folder) / f"{case.batch}.json"
            command = [sys.executable, "-m", "benchmarks.ablate", *arguments]
            command += [f"batch={case.batch}", f"device={json.dumps(gpu)}", f"report={path}"]
            command += [f"processes={share}"]
            started.append((case, path, subprocess.Popen(command, cwd=ROOT)))
        for _, _, process in started:
            process.wait()
        return [(case, json.loads(path.read_text())) for case, path, _ in started]


def rehearse_variants(
    case: Case, variants: Sequence[str], gpu: Device, processes: int = 0
) -> Rehearsed:
    """What is launched with all kernels and without each of these; compiled, by processes."""
    found: Rehearsed = {_ALL: _rehearsed(case, _ALL, gpu, processes)}
    every, taken = found[_ALL]["launches"], found[_ALL]["taken"]
    for variant in sorted(taken) if list(variants) == [_ALL] else variants:
        found[variant] = _rehearsed(case, variant, gpu, processes, every)
    return found


def _rehearsed(
    case: Case, variant: str, gpu: Device, processes: int, known: Sequence[str] = ()
) -> dict[str, Any]:
    """`known` launches are compiled."""
    try:
        with goldens.recorded(gpu) as lines, choose.noted() as notes, _left_out(variant):
            rehearse(case, checked=False)
        taken = Counter(f"{d.op.name}/{d.choice.kernel.name}" for d in notes)
        if processes and lines != known:
            with rehearsal(gpu) as launches, _left_out(variant):
                rehearse(case)
            for _ in compile_launches(launches, gpu.arch, processes):
                pass
    except (ValueError, RuntimeError, AssertionError) as error:
        return {"error": harness.reason(error)}
    return {"launches": lines, "taken": taken}


def _left_out(variant: str) -> AbstractContextManager[None]:
    return without(variant.replace("+", ","))


def _changed(found: Rehearsed) -> list[str]:
    """The variants that launch something else."""
    every = found[_ALL]["launches"]
    return [v for v, its in found.items() if "launches" in its and its["launches"] != every]


def report(case: Case, found: Rehearsed) -> None:
    """A line for each variant: launches that it lacks and has instead."""
    every = Counter(found[_ALL]["launches"])
    for variant, its in found.items():
        if "error" in its:
            print(f"{case} without {variant}: impossible: {its['error']}")
            continue
        lines = Counter(its["launches"])
        gone, new = (_kernels(c) for c in (every - lines, lines - every))
        said = f"{gone} -> {new}" if variant else f"{len(its['launches'])} launches"
        print(
            f"{case} without {variant or 'nothing'}: {said if gone or not variant else 'the same'}"
        )
    sys.stdout.flush()


def _kernels(lines: Counter) -> str:
    """How often each kernel is launched."""
    kernels: Counter = Counter()
    for line, count in lines.items():
        kernels[line.split()[0]] += count
    return ", ".join(f"{count} {name}" for name, count in sorted(kernels.items()))


def time_case(case: Case, variants: Sequence[str], turns: int, device: torch.device) -> None:
    """Each variant in turns with all kernels."""
    if not variants:
        return
    harness.set_precision(case.precision)
    every = _step(case, device)
    run = every.captured()
    for variant in variants:
        with _left_out(variant):
            step = _step(case, device)
            pair = run, step.captured()
        torch.cuda.synchronize()
        times = [
            tuple(harness.time_steps(one, _CALLS, warm_up=1).median for one in pair)
            for _ in range(turns)
        ]
        a, b = (harness.quantiles(found).median for found in zip(*times, strict=True))
        gains = [100 * (y / x - 1) for x, y in times]
        print(
            f"{case}: {a / 1000:.4f} ms; without {variant} {b / 1000:.4f} ms: "
            f"{100 * (b / a - 1):+.2f} % ({min(gains):+.2f} to {max(gains):+.2f} by turn)",
            flush=True,
        )
        step.release()
        del step, pair
        harness.release_memory()


def _step(case: Case, device: torch.device) -> Step:
    build = build_step if case.kind == "train" else evaluation_step
    return build(f"{OURS}-{case.precision}", case.model, case.batch, device)


if __name__ == "__main__":
    harness.run_entry(main)
