"""Time the models that papers train beside torch.compile: training steps, and evaluations.

    python -m benchmarks.papers [key=value ...]

    models=...       any of configs/model, or of benchmarks/networks, for which nothing was tuned;
                     default: those that papers train
    batch=           images of a training step, one number a model or one for all; default: as a
                     GPU has them in the paper's training, or as it has room for
    evaluate=1,16,64 images of an evaluation; train: none
    what=train,evaluate
    precision=bf16   bf16, tf32 or fp32, one a model or one for all
    minutes=10       after which what has not begun to be timed is left out
    processes=12     that compile our kernels
    out=             a folder for the CSV; default benchmarks/results

Each training step and each evaluation has a process of its own. All of them compile PyTorch's side
by side, while others compile our kernels. Whichever is ready checks ours against the float32
baseline and times both in turns, each as one CUDA graph, while those that still compile are
stopped. A row is written as soon as it is known. As `benchmarks.train_step`, ours also clips, keeps
an EMA and draws a new batch.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import NamedTuple

import torch

from benchmarks import harness, precompile, stopwatch
from benchmarks.cases import IMAGES, images_of, meta_model
from benchmarks.harness import OURS, ROOT, Row, WrongResult, check_choice
from benchmarks.sampling import check_network, evaluation_step, shape_of
from benchmarks.steps import (
    Step,
    build_step,
    check_ours,
    our_model,
    random_labels,
    rehearse_check,
    rehearse_step,
)
from benchmarks.stopwatch import Timing
from diffusion.errors import ConfigError
from diffusion.plan.inference import sampling_network
from triton_kernels.runtime.dependent_launch import dependent_launches

# images that one GPU has in a step
_BATCHES = {
    "ddpm_cifar10": 128,
    "edm_ddpmpp_cifar10": 64,  # of 512, on eight GPUs
    "adm_imagenet64": 32,
    "adm_imagenet128": 8,  # of 256, on 32
    "ldm_churches": 96,
    "ldm_320": 32,
    "ddpm_lsun256": 8,  # of 64, on eight
    "ldm4_celeba": 16,
}
_PRECISIONS = ("bf16", "tf32", "fp32")
_KINDS = {"train": "train_step", "evaluate": "unet_forward"}  # the op of a row
DEFAULTS = {
    "models": tuple(IMAGES),
    "batch": (0,),
    "what": tuple(_KINDS),
    "precision": ("bf16",),
    "evaluate": (1, 16, 64),
    "minutes": 10.0,
    **precompile.SETTINGS,
    "out": "",
    "case": -1,  # the number of the case that a process times
}
_TURNS, _CALLS = 5, 6  # of each: turns, and calls in a row
_LAST = 20.0  # seconds that a case takes to be checked and timed; in the last nothing is begun
_MOST = 90.0  # after which a case is given up, so that the others have their turn
_CHECKED = 4  # images
_READY = "ready"


class Case(NamedTuple):
    """What one process times."""

    kind: str  # of _KINDS
    model: str
    batch: int
    precision: str = "bf16"

    def __str__(self) -> str:
        shape = shape_of(self.batch, images_of(self.model))
        return f"{self.kind} {shape} {self.model} {self.precision}"

    @property
    def providers(self) -> tuple[str, str]:
        """Ours and theirs."""
        return f"{OURS}-{self.precision}", f"compile-{self.precision}"


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    cases = choose_cases(settings)
    if settings["compile_for"]:
        return precompile.compile_kernels(partial(rehearse_all, cases), settings)
    device = harness.require_cuda()
    folder = Path(settings["out"] or harness.RESULTS)
    if settings["case"] >= 0:
        return time_case(cases[settings["case"]], device, folder)
    return run_all(cases, arguments, settings, device)


def choose_cases(settings: dict) -> list[Case]:
    """What the settings ask for, training first. ConfigError: something unknown."""
    models = settings["models"]
    for kind in settings["what"]:
        check_choice("what", kind, tuple(_KINDS))
    for precision in settings["precision"]:
        check_choice("precision", precision, _PRECISIONS)
    each = []
    for name in ("batch", "precision"):
        given = settings[name]
        if len(given) not in (1, len(models)):
            raise ConfigError(
                f"{name} has {len(given)} values for {len(models)} models; expected one or as many"
            )
        each.append(given * (len(models) // len(given)))
    found = []
    if "train" in settings["what"]:
        for model, batch, precision in zip(models, *each, strict=True):
            found.append(Case("train", model, batch or _BATCHES.get(model, 32), precision))
    if "evaluate" in settings["what"]:
        found += [
            Case("evaluate", model, batch, precision)
            for batch in settings["evaluate"]
            for model, precision in zip(models, each[1], strict=True)
        ]
    for case in found:
        meta_model(case.model, images_of(case.model).size)  # one that is unknown ends here
        if case.batch < 1:
            raise ConfigError(f"{case.kind}={case.batch}; expected at least 1 image")
    return found


# --- the process that starts the others -----------------------------------------------------------


class _Child:
    """The process of a case, what it has said, and whether it waits to be told to go."""

    def __init__(
        self, number: int, case: Case, arguments: Sequence[str], ready: Queue["_Child"]
    ) -> None:
        command = [sys.executable, "-m", "benchmarks.papers", *arguments, f"case={number}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.case = case
        # a session of its own, so that a signal reaches PyTorch's compiling processes as well
        self.process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes)
        self._reader = threading.Thread(target=self._read, args=(ready,), daemon=True)
        self._reader.start()

    def _read(self, ready: Queue["_Child"]) -> None:
        """Enter it into `ready` once: when it says so, or when it has ended."""
        entered = False
        for line in self.process.stdout:
            if line.strip() != _READY:
                print(line, end="", flush=True)
            elif not entered:
                entered = True
                ready.put(self)
        if not entered:
            ready.put(self)

    def go(self, seconds: float) -> bool:
        """Let it time, for so long at most. Whether it went well."""
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            return self.process.wait(max(seconds, 1)) == 0
        except (BrokenPipeError, subprocess.TimeoutExpired):
            return False

    def send(self, number: signal.Signals) -> None:
        """A signal, to it and to the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)


def run_all(
    cases: Sequence[Case], arguments: Sequence[str], settings: dict, device: torch.device
) -> int:
    """Start everything; let each case that is compiled be timed, one at a time. 1 if a case has no
    row."""
    end = time.monotonic() + 60 * settings["minutes"]
    os.environ.setdefault("BENCHMARK_RUN", harness.provenance().run)
    compiling = precompile.start("benchmarks.papers", arguments, device)
    ready: Queue[_Child] = Queue()
    waiting = [_Child(i, case, arguments, ready) for i, case in enumerate(cases)]
    missing = 0
    try:
        with suppress(subprocess.TimeoutExpired):
            compiling.wait(timeout=_before(end))
        while waiting:
            try:
                child = ready.get(timeout=_before(end))
            except Empty:
                break
            waiting.remove(child)
            missing += not _time(child, waiting, end)
        for child in waiting:
            print(f"! {child.case}: not ready", flush=True)
        return int(missing > 0 or bool(waiting))
    finally:
        compiling.kill()
        for child in waiting:
            child.end()


def _before(end: float) -> float:
    """Seconds in which something may still begin to be timed."""
    return max(0.1, end - _LAST - time.monotonic())


def _time(child: _Child, others: Sequence[_Child], end: float) -> bool:
    """Let it time while the others stand still. Whether it went well."""
    for other in others:
        other.send(signal.SIGSTOP)
    try:
        left = end - time.monotonic()
        if child.process.poll() is None and left >= _LAST and child.go(min(left, _MOST)):
            return True
        print(f"! {child.case}: no time, or failed", flush=True)
        return False
    finally:
        child.end()
        for other in others:
            other.send(signal.SIGCONT)


# --- a process that compiles our kernels ----------------------------------------------------------


def rehearse_all(cases: Sequence[Case]) -> None:
    """What a process launches that compiles our kernels for the others."""
    for case in cases:
        rehearse(case)


def rehearse(case: Case, checked: bool = True) -> None:
    """Ask for all that a case launches, with parameters that nobody draws; `checked`: and what
    checks it."""
    if case.kind == "train":
        rehearse_step(case.model, case.precision, case.batch)
        if checked:
            rehearse_check(case.model, case.precision, _CHECKED)
        return
    images, host = images_of(case.model), torch.device("cpu")
    network = our_model(case.model, case.precision, torch.device("meta")).to_empty(device=host)
    plan = sampling_network(network.eval())
    labels = random_labels(network.num_classes, case.batch, host)
    tables = plan.tabulate(torch.tensor([500]), labels, case.batch)
    x = torch.empty(case.batch, images.size, images.size, images.channels)
    with dependent_launches(case.batch * images.size**2):  # as in `evaluation_step`
        plan.at_row(x, torch.zeros(1, dtype=torch.int64), tables)
    if checked:
        labels = random_labels(network.num_classes, _CHECKED, host)
        plan(x.new_empty(_CHECKED, *x.shape[1:]), torch.zeros(_CHECKED, dtype=torch.int64), labels)


# --- a process that times a case ------------------------------------------------------------------


def time_case(case: Case, device: torch.device, folder: Path) -> int:
    """Compile PyTorch's, wait, check ours, time both in turns and write the rows."""
    runs: dict[str, Callable[[int], object]] = {}
    kept: list[Step] = []  # what the graphs need
    began = time.monotonic()
    ours, theirs = case.providers

    def capture(provider: str) -> None:
        if case.kind == "train":
            kept.append(build_step(provider, case.model, case.batch, device))
        else:
            kept.append(evaluation_step(provider, case.model, case.batch, device))
        runs[provider] = kept[-1].captured()
        torch.cuda.synchronize()

    try:
        harness.set_precision(case.precision)
        capture(theirs)
        print(f"{case}: {theirs} compiled in {time.monotonic() - began:.0f} s", flush=True)
    except Exception as error:  # a library says what it likes of what it cannot do
        print(f"! {case}: {theirs} failed: {harness.reason(error)}", flush=True)
    print(_READY, flush=True)
    if not sys.stdin.readline():
        return 1
    try:
        _check(case, device)
        stopwatch.release_memory()
        capture(ours)
    except WrongResult as error:
        print(f"! {case}: ours is wrong and not timed: {error}", flush=True)
    except Exception as error:
        print(f"! {case}: ours failed: {harness.reason(error)}", flush=True)
    images = images_of(case.model)
    flops = meta_model(case.model, images.size, images.channels).flops_per_image * case.batch
    shape, origin = f"{shape_of(case.batch, images)} {case.model}", harness.provenance()
    train = case.kind == "train"
    for timings in in_turns(runs):
        rows = [
            Row(
                _KINDS[case.kind],
                shape,
                "any",
                "step" if train else "fwd",
                f"{provider} graph" if train else provider,
                *timing,
                0,
                flops * (3 if train else 1),
                *origin,
            )
            for provider, timing in timings.items()
        ]
        harness.add_rows(folder / f"{origin.gpu}.csv", rows)
    said = ", ".join(f"{name} {timing.median / 1000:.3f} ms" for name, timing in timings.items())
    ratio = ""
    if len(timings) == 2:
        ratio = f": {timings[theirs].median / timings[ours].median:.2f}"
    print(f"{case}: {said}{ratio}", flush=True)
    return int(len(timings) < 2)


def _check(case: Case, device: torch.device) -> None:
    """Against the float32 baseline, of fewer images."""
    if case.kind == "train":
        errors = check_ours(case.model, case.precision, device, batch=_CHECKED)
        print("{}: gradient off by {:.1e}, reference {:.1e}".format(case, *errors), flush=True)
    else:
        check_network(case.model, case.precision, device, batch=_CHECKED)


def in_turns(runs: dict[str, Callable[[int], object]]) -> Iterator[dict[str, Timing]]:
    """The timing of each, after every turn that all have had."""
    times: dict[str, list[Timing]] = {name: [] for name in runs}
    for _ in range(_TURNS):
        for name, run in runs.items():
            times[name].append(stopwatch.time_steps(run, _CALLS, warm_up=1))
        yield {
            name: stopwatch.quantiles([t.median for t in found]) for name, found in times.items()
        }


if __name__ == "__main__":
    harness.run_entry(main)
