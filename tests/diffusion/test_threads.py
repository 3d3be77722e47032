"""How many threads a run on a CPU has, and what it says of how long it will take."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from diffusion.runs import estimate
from diffusion.runtime import host
from diffusion.training.progress import progress_line
from diffusion.training.trainer import TrainSettings

from ..end_to_end.processes import started

ROOT = Path(__file__).resolve().parents[2]
UNET64 = {"name": "unet", "model_channels": 64, "num_res_blocks": 2, "attention_resolutions": []}


@pytest.fixture
def machine(monkeypatch):
    """Of four processors, where PyTorch is not imported, and others are as busy as one says."""
    environment, clock = {}, {"busy": 100.0, "now": 50.0}
    monkeypatch.setattr(host, "os", type("os", (), {"environ": environment}))
    monkeypatch.setattr(host, "sys", type("sys", (), {"modules": {}}))
    monkeypatch.setattr(host, "_chosen", None)
    monkeypatch.setattr(host, "_allowed", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(host, "processors", lambda: 4)
    monkeypatch.setattr(host, "busy_seconds", lambda: (clock["busy"], clock["now"]))
    before = host.busy_seconds()

    def choose(others: float, seconds: float = 2.0):
        clock["busy"], clock["now"] = before[0] + others * seconds, before[1] + seconds
        host.choose_threads(before)
        return environment

    return choose, environment


@pytest.mark.parametrize(("others", "threads"), [(1.0, "3"), (0.6, "3"), (3.2, "1"), (9.0, "1")])
def test_others_are_left_their_processors(machine, others, threads):
    choose, environment = machine
    choose(others)
    assert environment["OMP_NUM_THREADS"] == threads and "GOMP_SPINCOUNT" in environment
    assert f"so the number of threads is {threads} (" in host.threads_chosen()
    assert host.threads_are_ours()


@pytest.mark.parametrize(("others", "seconds"), [(0.0, 2.0), (0.3, 2.0), (-1.0, 2.0), (4.0, 0.1)])
def test_alone_there_is_one_for_each_processor(machine, others, seconds):
    choose, environment = machine
    choose(others, seconds)
    assert list(environment) == ["GOMP_SPINCOUNT"] and host.threads_chosen() is None


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_says_stands(machine, name):
    choose, environment = machine
    environment[name] = "2"
    choose(3.0)
    assert environment == {name: "2"}
    assert host.threads_are_ours() == (name != "OMP_NUM_THREADS")


class _PyTorch:
    """Of which a program has imported one that is told numbers of threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def get_num_threads(self) -> int:
        return self.threads

    def set_num_threads(self, threads: int) -> None:
        self.threads = threads


@pytest.mark.parametrize(("before", "after"), [(4, 2), (3, 3)])
def test_pytorch_that_is_there_is_told_unless_somebody_has(machine, before, after):
    """In Python, where a program may have imported it: its library no longer reads what the
    environment says."""
    choose, environment = machine
    torch = host.sys.modules["torch"] = _PyTorch(before)
    choose(2.0)
    assert torch.threads == after and environment == {}
    assert (host.threads_chosen() is not None) == (before != after)


def test_training_from_python_leaves_others_their_processors():
    """Two threads beside a process that keeps one of two processors busy waited for each other for
    ten times as long as one takes."""
    code = """
import diffusion
from diffusion.runtime import host
host.choose_threads = lambda before: print("chosen") or 1 / 0
diffusion.train("nowhere")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "chosen" and "ZeroDivisionError" in done.stderr


def test_others_are_seen_and_this_process_is_not():
    """A process that is busy beside this one, which is busy as well."""
    code = "import time; print(flush=True)\nwhile True: pass"
    before = host.busy_seconds()
    other = started([sys.executable, "-c", code], stdout=subprocess.PIPE)
    other.stdout.readline()
    began = time.monotonic()
    start = host.busy_seconds()
    while time.monotonic() - start[1] < 1.0:
        pass
    end = host.busy_seconds()
    took = time.monotonic() - began
    other.kill()
    assert 1.0 <= end[1] - start[1] <= took and start[1] > before[1]
    assert end[0] - start[0] > 0.2  # what it got, on a machine that may be full


def test_a_run_takes_the_threads_before_pytorch_is_imported():
    """PyTorch's library reads the environment once, when it is loaded."""
    code = """
import os, sys
from triton_diffusion import commands
spins = lambda: os.environ["GOMP_SPINCOUNT"]
commands.call = lambda command, settings: print("torch" in sys.modules, spins())
commands.run("train")
"""
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=alone,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == f"False {host._SPINS}", done.stderr


# --- what it will take ----------------------------------------------------------------------------


def said(monkeypatch, model=UNET64, size=64, steps=1000, rate=lambda: 2e11, **train):
    monkeypatch.setattr(estimate, "rate", rate)  # of two cores
    config = {"dataset": {"name": "elephants", "size": size}, "model": model}
    return estimate.long_run(config, TrainSettings(steps=steps, **train), False)


@pytest.mark.parametrize(
    ("rate", "words"), [(0.44, "0.4 images/s  ETA 3 min"), (431.7, "432 images/s")]
)
def test_a_row_shows_the_rate_and_what_is_left(rate, words):
    row = {"step": 2, "images": 999, "loss": 0.5, "grad_norm": 1.0, "images_per_s": rate}
    assert words in progress_line(row, 12, 8, "images")


@pytest.mark.parametrize(
    ("loss", "norm", "words"),
    [(0.5, 1.0, "loss 0.5000  grad norm 1.000 "), (1.6e20, 5e7, "loss 1.6e+20  grad norm 5e+07 ")],
)
def test_a_row_of_a_run_that_diverges_is_short(loss, norm, words):
    row = {"step": 2, "images": 16, "loss": loss, "grad_norm": norm, "images_per_s": 1.0}
    assert words in progress_line(row, 12, 8, "images")


def test_a_run_that_takes_days_is_said_to(monkeypatch):
    line = said(monkeypatch, steps=100_000)
    assert "a step will take about" in line and " days; experiment=demo takes minutes" in line
    short = said(monkeypatch, model=UNET64, size=16, steps=10**7, batch_size=1)
    assert "a step will take about" in short and " ms, and train.steps" in short  # not about 0 s
    seconds = said(monkeypatch, steps=100_000, batch_size=64)
    assert float(line.split(" days")[0].split()[-1]) == pytest.approx(
        2 * float(seconds.split(" days")[0].split()[-1]), rel=0.02
    )


def test_a_short_one_and_an_unknown_one_are_not(monkeypatch):
    assert said(monkeypatch, steps=10) is None
    assert said(monkeypatch, size=None) is None  # as in a folder of images
    assert said(monkeypatch, model={"name": "unet1d"}) is None
    assert said(monkeypatch, model=UNET64 | {"num_head_channels": 7}) is None  # said elsewhere


def test_a_run_that_is_short_on_any_cpu_measures_nothing(monkeypatch):
    small = UNET64 | {"model_channels": 32, "channel_mult": [1], "num_res_blocks": 1}
    assert said(monkeypatch, model=small, size=8, steps=2, batch_size=4, rate=None) is None
    with pytest.raises(TypeError):
        said(monkeypatch, rate=None)


def test_a_rate_is_measured_in_a_moment():
    began = time.process_time()  # of this process, whoever runs beside it
    assert 1e8 < estimate.rate() < 1e14
    assert time.process_time() - began < 5
    assert torch.is_grad_enabled()
