"""Time a training step or an evaluation without some of its kernels, or without rows of the plan's
fuse table: what each of them is worth.

    python -m benchmarks.ablate [key=value ...]

    kernels=         names of the registry, such as `single_tile` or `conv_few/single_tile`, each
                     left out alone; with `+` between them, together; default, without `rows`: each
                     that `select` takes (of a joined launch the plan may only ask whether it can)
    rows=            rows of the fuse table (`diffusion/plan/fuse/`) whose names have one of these
                     words, each left out alone; with `+` between whole names, together; `all`
    model=unet64     configs/model, or benchmarks/networks, or several; diffusers:ddpm_cifar10 or
                     FILE.py:FUNCTION: what `benchmarks.accelerated` times, in bf16
    batch=32         images, or several such numbers
    what=train       train: a step; evaluate: an evaluation of the network, for sampling
    precision=bf16   of a step
    turns=5          of each: with all, without
    processes=12     that rehearse and compile
    gpu=             such as h100: time nothing, say what would be launched on it

A kernel is switched off as by TRITON_KERNELS_OFF, a row by `leaving_out`. Every variant is
rehearsed without a GPU, a step twice, since the second finds memory that the first has made; where
it changes no launch, nothing is timed. The step with everything and
each variant are captured as CUDA graphs and timed in turns in one process; the figures are medians
of the turns, written as they are measured. A kernel that an op cannot do without is reported so.
"""

import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import accelerated, goldens, harness, precompile, stopwatch
from benchmarks.cases import images_of, meta_model
from benchmarks.harness import OURS, check_choice
from benchmarks.other_networks import network_of
from benchmarks.papers import Case, rehearse
from benchmarks.sampling import evaluation_step
from benchmarks.steps import Step, build_step
from diffusion.errors import ConfigError
from diffusion.plan.accelerate import Accelerated
from diffusion.plan.fuse.rows import ROWS, applied, leaving_out
from triton_kernels.registry import choose
from triton_kernels.registry.chips import chip
from triton_kernels.runtime.compile_launches import compile_unclaimed
from triton_kernels.runtime.device import Device, without
from triton_kernels.runtime.launch_recorder import rehearsal

DEFAULTS = {
    "kernels": (),
    "rows": (),
    "model": ("unet64",),
    "batch": (32,),
    "what": "train",
    "precision": "bf16",
    "turns": 5,
    **precompile.SETTINGS,
    "gpu": "",
    "report": "",  # the file of a process that compiles
}
_CALLS = 6  # in a row, of each turn
ALL = ""  # the variant that lacks nothing

Job = tuple[Case, list[str]]  # with variants; none: each kernel that is taken
Rehearsed = dict[str, dict[str, Any]]  # by variant: "launches" and "taken", or "error"


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    asked = jobs(settings)
    if settings["gpu"]:
        found = rehearse_jobs(asked, chip(settings["gpu"]).gpu, settings["processes"])
        for (case, _), its in zip(asked, found, strict=True):
            report(case, its)
        return 0
    if settings["compile_for"]:
        gpu = precompile.chip_of(settings)
        found = rehearse_jobs(asked, gpu, settings["processes"], compiles=True)
        Path(settings["report"]).write_text(json.dumps(found))
        return 0
    device = harness.require_cuda()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        if precompile.start("benchmarks.ablate", arguments, device, f"report={path}").wait():
            return 1  # it has said why
        found = json.loads(path.read_text())
    for (case, _), its in zip(asked, found, strict=True):
        report(case, its)
    for (case, _), its in zip(asked, found, strict=True):
        time_case(case, changed(its), settings["turns"], device)
    return 0


def jobs(settings: dict) -> list[Job]:
    """What the settings ask for. ConfigError: something unknown."""
    check_choice("what", settings["what"], ("train", "evaluate"))
    variants = list(settings["kernels"])
    for words in settings["rows"]:
        named = [name for name in ROWS if words == "all" or words in name]
        named = [words] if "+" in words else named
        if not named:
            raise ConfigError(f"rows={words} is unknown; there are {', '.join(ROWS)}")
        variants += [name for name in named if name not in variants]
    for variant in variants:
        try:
            with left_out(variant):
                pass
        except ValueError as error:
            raise ConfigError(str(error)) from error
    found = []
    for model in settings["model"]:
        if _is_other(model):  # one that is unknown ends here
            network_of(model)
        else:
            meta_model(model, images_of(model).size)
        for batch in settings["batch"]:
            found.append((Case(settings["what"], model, batch, settings["precision"]), variants))
    return found


# --- without a GPU --------------------------------------------------------------------------------


def rehearse_jobs(
    asked: Sequence[Job], gpu: Device, processes: int, compiles: bool = False
) -> list[Rehearsed]:
    """What each job launches with everything and without each variant, by so many forks of this
    process, which does not use CUDA. `compiles`: and compile it."""
    torch.set_num_threads(1)
    found: list[Rehearsed] = [{} for _ in asked]
    with TemporaryDirectory() as claims:
        shared = gpu, Path(claims) if compiles else None
        context = multiprocessing.get_context("fork")
        with context.Pool(processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:

            def ask(job: int, variant: str) -> tuple[int, str, Any]:
                return job, variant, pool.apply_async(rehearsed, (asked[job][0], variant, *shared))

            waiting = [ask(i, ALL) for i in range(len(asked))]
            waiting += [ask(i, v) for i, (_, variants) in enumerate(asked) for v in variants]
            # processes that would have nothing to do rehearse the same, and compile a part of it
            count = len(waiting)
            spare = range(processes - count if compiles else 0)
            helping = [ask(*waiting[i % count][:2])[2] for i in spare]
            for job, variant, result in waiting:
                found[job][variant] = its = result.get()
                if variant == ALL and not asked[job][1]:
                    waiting += [ask(job, kernel) for kernel in sorted(its["taken"])]
            for result in helping:
                result.get()
    return found


def rehearsed(case: Case, variant: str, gpu: Device, claims: Path | None = None) -> dict[str, Any]:
    """What a case launches without this variant: "launches", and "taken" of the registry, and which
    "rows" apply; or "error". Compiled where it has a folder in which kernels are claimed."""
    try:
        with (
            rehearsal(gpu) as launches,
            goldens.recorded(gpu) as lines,
            choose.noted() as notes,
            applied() as rows,
            left_out(variant),
        ):
            _rehearse(case)
        if claims is not None:
            if variant == ALL:  # `evaluation_step` checks it
                with rehearsal(gpu) as checked:
                    _rehearse(case, checked=True)
                launches = [*launches, *checked]
            compile_unclaimed(launches, gpu.arch, claims)
    except (ValueError, RuntimeError, AssertionError) as error:
        return {"error": harness.reason(error)}
    taken = Counter(f"{d.op.name}/{d.choice.kernel.name}" for d in notes)
    return {"launches": lines, "taken": taken, "rows": sorted(rows)}


def _rehearse(case: Case, checked: bool = False) -> None:
    if _is_other(case.model):
        host = torch.device("cpu")
        model = accelerated.Model(case.model)
        accelerated.runner(case.kind, model, case.batch, host, Accelerated)()
    else:
        rehearse(case, checked)


def _is_other(model: str) -> bool:
    """Whether it is a network of `benchmarks.accelerated`."""
    return ":" in model


def left_out(variant: str) -> AbstractContextManager[None]:
    """Within the block these rows, or kernels, are not there. ValueError: one is unknown."""
    if variant == ALL:
        return nullcontext()
    names = variant.split("+")
    return leaving_out(*names) if names[0] in ROWS else without(",".join(names))


def changed(found: Rehearsed) -> list[str]:
    """The variants that launch something else: other kernels of ours, or of PyTorch, which only the
    rows say that apply."""
    every = found[ALL]
    return [
        variant
        for variant, its in found.items()
        if "launches" in its
        and (its["launches"] != every["launches"] or set(variant.split("+")) & set(every["rows"]))
    ]


def report(case: Case, found: Rehearsed) -> None:
    """A line for each variant: launches that it lacks and has instead."""
    every, others = Counter(found[ALL]["launches"]), changed(found)
    two = case.kind == "train" and not _is_other(case.model)  # as `rehearse_step` makes
    of = " of two steps" if two else ""
    for variant, its in found.items():
        if "error" in its:
            print(f"{_named(case)} without {variant}: impossible: {its['error']}")
            continue
        lines = Counter(its["launches"])
        gone, new = (_kernels(c) for c in (every - lines, lines - every))
        said = f"{gone} -> {new}" if variant else f"{len(its['launches'])} launches{of}"
        if variant and not gone:
            said = "other calls of PyTorch" if variant in others else "the same"
        print(f"{_named(case)} {f'without {variant}' if variant else 'as a whole'}: {said}")
    sys.stdout.flush()


def _named(case: Case) -> str:
    if _is_other(case.model):
        return f"{case.kind} {case.batch} {case.model} {case.precision}"
    return str(case)


def _kernels(lines: Counter) -> str:
    """How often each kernel is launched."""
    kernels: Counter = Counter()
    for line, count in lines.items():
        kernels[line.split()[0]] += count
    return ", ".join(f"{count} {name}" for name, count in sorted(kernels.items()))


# --- on a GPU -------------------------------------------------------------------------------------


def time_case(case: Case, variants: Sequence[str], turns: int, device: torch.device) -> None:
    """Each variant in turns with everything."""
    if not variants:
        return
    harness.set_precision(case.precision)
    every = _step(case, device)
    run = every.captured()
    for variant in variants:
        began = time.monotonic()
        try:
            with left_out(variant):
                step = _step(case, device)
                pair = run, step.captured()
        except (ValueError, RuntimeError, AssertionError) as error:
            print(f"! {_named(case)} without {variant}: {harness.reason(error)}", flush=True)
            continue
        torch.cuda.synchronize()
        made = time.monotonic() - began
        times = [
            tuple(stopwatch.time_steps(one, _CALLS, warm_up=1).median for one in pair)
            for _ in range(turns)
        ]
        a, b = (stopwatch.quantiles(found).median for found in zip(*times, strict=True))
        gains = [100 * (y / x - 1) for x, y in times]
        print(
            f"{_named(case)}: {a / 1000:.4f} ms; without {variant} {b / 1000:.4f} ms: "
            f"{100 * (b / a - 1):+.2f} % ({min(gains):+.2f} to {max(gains):+.2f} by turn);"
            f" made in {made:.1f} s",
            flush=True,
        )
        step.release()
        del step, pair
        stopwatch.release_memory()


def _step(case: Case, device: torch.device) -> Step:
    if _is_other(case.model):
        model = accelerated.Model(case.model)
        run = accelerated.runner(case.kind, model, case.batch, device, Accelerated)
        return Step(lambda _: run(), lambda: accelerated.captured(run))
    build = build_step if case.kind == "train" else evaluation_step
    return build(f"{OURS}-{case.precision}", case.model, case.batch, device)


if __name__ == "__main__":
    harness.run_entry(main)
