"""The models that papers train, beside torch.compile."""

import os
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import harness, papers, precompile, stopwatch
from benchmarks.cases import IMAGES, UNTUNED, images_of, meta_model, model_settings
from diffusion.errors import ConfigError


def chosen(*arguments):
    return papers.choose_cases(harness.parse_settings(arguments, papers.DEFAULTS))


@pytest.mark.parametrize("name", UNTUNED)
def test_a_network_that_nobody_tuned_is_a_model_with_changes(name):
    images, settings = images_of(name), model_settings(name)
    network = meta_model(name, images.size, images.channels)
    assert network.in_channels == images.channels
    assert set(settings) <= set(model_settings("ddpm_cifar10")) | set(model_settings("unet64"))


def test_what_is_timed():
    every = chosen()
    assert [case for case in every if case.kind == "train"][1] == (
        "train",
        "edm_ddpmpp_cifar10",
        64,
        "bf16",
    )
    assert len(every) == len(IMAGES) * 4
    assert str(every[2]) == "train 32x64x64x3 adm_imagenet64 bf16"
    some = ("models=unet64,ldm_320", "batch=8", "what=evaluate,train", "evaluate=16")
    assert chosen(*some, "precision=bf16,tf32") == [
        ("train", "unet64", 8, "bf16"),
        ("train", "ldm_320", 8, "tf32"),
        ("evaluate", "unet64", 16, "bf16"),
        ("evaluate", "ldm_320", 16, "tf32"),
    ]
    for wrong, words in (
        ("models=unet65", "model=unet65 is unknown"),
        ("batch=1,2", "batch has 2 values for 6 models"),
        ("what=draw", "what=draw is unknown; choose from train, evaluate"),
        ("precision=bf16,tf32", "precision has 2 values for 6 models"),
        ("precision=fp8", "precision=fp8 is unknown; choose from bf16, tf32, fp32"),
        ("evaluate=0", "evaluate=0; expected at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            chosen(wrong)


CHILD = """
import sys, time
number = int(sys.argv[1])
if number == 1:
    sys.exit(1)
for _ in range([0, 0, 3000, 60][number]):  # compiling
    time.sleep(0.01)
    print("works", number, time.time(), flush=True)
print("ready", flush=True)
assert sys.stdin.readline() == "go\\n"
print("timed", number, time.time(), flush=True)
time.sleep(0.5)
print("ended", number, time.time(), flush=True)
"""


def test_what_is_ready_is_timed_while_the_others_stand_still(monkeypatch, capfd):
    """Of four cases the second fails, the third is not compiled in time, and the fourth still
    compiles when the first is timed."""
    start = subprocess.Popen

    def child(command, **options):
        number = command[-1].partition("=")
        code = CHILD if number[0] == "case" else "pass"
        return start([sys.executable, "-c", code, number[2]], **options)

    monkeypatch.setattr(papers.subprocess, "Popen", child)
    monkeypatch.setattr(papers, "_LAST", 0.5)
    monkeypatch.setattr(precompile, "describe", lambda device: ())
    began = time.monotonic()
    settings = papers.DEFAULTS | {"minutes": 5 / 60}
    cases = chosen("what=train")[:4]
    assert papers.run_all(cases, [], settings, torch.device("cpu")) == 1
    assert time.monotonic() - began < 15
    said = capfd.readouterr().out
    assert "! train 64x32x32x3 edm_ddpmpp_cifar10 bf16: no" in said
    assert "! train 32x64x64x3 adm_imagenet64 bf16: not ready" in said
    lines = [line.split() for line in said.splitlines()]
    found = [line for line in lines if line[0] in ("timed", "ended")]
    assert [line[:2] for line in found] == [
        ["timed", "0"],
        ["ended", "0"],
        ["timed", "3"],
        ["ended", "3"],
    ]
    times = [float(line[2]) for line in found]
    assert times == sorted(times)
    # whole lines: the third case is stopped within one
    worked = [float(line[2]) for line in lines if line[0] == "works" and len(line) == 3]
    assert any(at > times[3] for at in worked)  # the third, again
    for begins, ends in (times[:2], times[2:]):
        assert not [at for at in worked if begins + 0.1 < at < ends]


def test_both_are_timed_in_turns(monkeypatch):
    order = []

    def time_steps(run, steps, warm_up):
        order.append(run)
        return stopwatch.Timing(float(len(order)), 0.0, 0.0)

    monkeypatch.setattr(stopwatch, "time_steps", time_steps)
    found = list(papers.in_turns({"a": "first", "b": "second"}))
    assert order == ["first", "second"] * papers._TURNS
    assert found[0] == {"a": (1, 1, 1), "b": (2, 2, 2)}
    assert (found[-1]["a"].median, found[-1]["b"].median) == (5, 6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_timing_needs_a_gpu():
    with pytest.raises(ConfigError, match="need a CUDA device"):
        papers.main([])


REHEARSED = """
from benchmarks import papers
from triton_kernels.registry.chips import chip
from triton_kernels.runtime.launch_recorder import rehearsal

with rehearsal(chip("h200").gpu) as launches:
    papers.rehearse_all([papers.Case("evaluate", "unet_tiny", 2)])
print(len(launches))
"""


@pytest.mark.long
def test_what_compiles_ahead_knows_the_launches():
    """In a new process, which has recorded nothing yet, with Triton's compiler."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", REHEARSED]
    done = subprocess.run(command, env=env, cwd=harness.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
