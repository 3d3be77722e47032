"""Kernels that are compiled before they are needed."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from diffusion.errors import ConfigError
from diffusion.runs import precompile_worker as ahead_worker
from diffusion.runtime import precompile as ahead

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda", 0)


def test_a_rehearsal():
    """A step and a chain, as for a GPU, where there is none; with no time for their products."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.diffusion.recorded"]
    said = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    found = json.loads(said.stdout)
    kernels = Counter(found["train"])
    assert kernels["conv_forward_kernel"] + kernels["conv_tiles_kernel"] >= 4  # by shape
    assert {"_q_sample_kernel", "denoise_loss_bwd_kernel", "_adamw_kernel"} <= set(kernels)
    assert {"_normal_kernel", "_begin_step_kernel", "_denoise_step_kernel"} <= set(found["draw"])
    assert {"conv1d_stage_kernel", "_denoise_step_kernel"} <= set(found["act"])
    assert {"_square_sums_kernel", "_adamw_kernel"} <= set(found["policy"])
    assert len([name for name in found["policy"] if "conv" in name]) >= 12
    assert found["train"] == found["again"] and found["left as it was"]


def test_a_data_set_that_is_larger_than_memory(monkeypatch):
    monkeypatch.setattr(ahead_worker, "_ENOUGH", 10_000)
    for count, expected in ((10**12, 52), (40, 40)):
        what = {"shape": [count, 8, 8, 3], "dtype": "uint8"}
        assert ahead_worker._unread(what).shape == (expected, 8, 8, 3)
    small = torch.zeros(5, 3, dtype=torch.int64)
    assert torch.equal(ahead_worker._unread(ahead.described(small)), small)
    assert ahead.described(None) is None is ahead_worker._unread(None)


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Python code in the place of the processes that compile; on a machine with a GPU."""
    code = []

    def start(command, settings, errors, start=ahead._start):
        arguments = command[command.index("diffusion.runs.precompile_worker") + 1 :]
        return start([sys.executable, "-c", code[-1], *arguments], settings, errors)

    monkeypatch.setattr(ahead, "_start", start)
    monkeypatch.setattr(ahead, "_compiles", lambda device: device.type == "cuda")
    monkeypatch.setattr(ahead, "_processes", lambda memory: 4)
    monkeypatch.setattr(ahead, "_free", lambda device: 2**33)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return code


def compile_ahead(shapes=None, device=CUDA):
    ahead.compile_ahead("train", {"lr": 0.1}, shapes or {"batch": 8, "lr": 0.1}, device)


DONE = """
import json, os, sys
job, gpu, part, parts = sys.argv[1:]
assert (job, gpu, parts) == ("train", "0", "4") and json.load(sys.stdin) == {"lr": 0.1}
assert "RANK" not in os.environ and "WORLD_SIZE" not in os.environ
print("a library's note")
print(int(part) + 1)
for _ in range(int(part) + 1):
    print(flush=True)
"""


def test_it_is_done_once_for_each_set_of_shapes(worker, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    worker.append(DONE)
    compile_ahead()
    said = capsys.readouterr().out + capsys.readouterr().err
    assert "with 4 processes" in said and "10 kernels in" in said
    for shapes in ({"batch": 8, "lr": 0.1}, {"batch": 8, "lr": 0.2}):  # as large a rate
        compile_ahead(shapes)
        assert capsys.readouterr().out == ""
    for shapes in ({"batch": 16, "lr": 0.1}, {"batch": 8, "lr": 0.0}):
        compile_ahead(shapes)
        assert "10 kernels in" in capsys.readouterr().out


@pytest.mark.parametrize("code", ["raise RuntimeError('no ptxas')", "import sys; sys.exit(3)"])
def test_a_process_that_fails_does_no_harm(code, worker, caplog):
    worker.append(code)
    compile_ahead()
    assert "a process that compiles failed" in caplog.text
    assert ("no ptxas" in caplog.text) == ("no ptxas" in code)
    caplog.clear()
    compile_ahead()  # not again: where a GPU allows a single process, it would fail every time
    assert caplog.text == ""


def test_where_nothing_is_compiled(worker, monkeypatch, tmp_path, capsys):
    worker.append("raise AssertionError")
    compile_ahead(device=torch.device("cpu"))
    with monkeypatch.context() as other:
        other.setenv("LOCAL_RANK", "1")
        compile_ahead()
    for what, value in (("_processes", 3), ("_free", 2**31)):  # no room for four
        with monkeypatch.context() as other:
            other.setattr(ahead, what, lambda _, value=value: value)
            compile_ahead()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))  # nothing can be written there
    compile_ahead()
    assert capsys.readouterr().out == ""


def test_how_many_processes(monkeypatch):
    monkeypatch.setattr(ahead, "processors", lambda: 32)
    monkeypatch.setattr(ahead, "free_memory", lambda: 2**40)
    monkeypatch.delenv("TRITON_DIFFUSION_COMPILERS", raising=False)
    assert ahead._processes(0) == 16
    monkeypatch.setattr(ahead, "free_memory", lambda: 18 * 2**30)
    assert ahead._processes(0) == 6 and ahead._processes(3 * 2**29) == 3
    monkeypatch.setenv("TRITON_DIFFUSION_COMPILERS", "0")
    assert ahead._processes(0) == 0
    monkeypatch.setenv("TRITON_DIFFUSION_COMPILERS", "few")
    with pytest.raises(ConfigError, match="TRITON_DIFFUSION_COMPILERS=few .* a number"):
        ahead._processes(0)


@pytest.mark.gpu
@pytest.mark.parametrize("job", ["TRAIN", "POLICY"])
def test_nothing_is_left_to_compile(job, tmp_path):
    """In a cache that was empty: a step finds what four processes have compiled."""
    script = """
import sys, torch
from pathlib import Path
from diffusion import ahead, ahead_worker
from tests.diffusion import rehearsed
device, job = torch.device("cuda", 0), getattr(rehearsed, sys.argv[2])
if sys.argv[1] == "ahead":
    ahead.compile_ahead("train", job, job, device)
else:
    ahead_worker._HOST = device
    ahead_worker.train(job)
    torch.cuda.synchronize()
"""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DIFFUSION_COMPILERS": "4",
    }

    def compiled(what: str) -> int:
        command = [sys.executable, "-c", script, what, job]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return len(list(tmp_path.rglob("*.cubin")))

    before = compiled("ahead")
    assert before > 30 and compiled("step") <= 1.05 * before
