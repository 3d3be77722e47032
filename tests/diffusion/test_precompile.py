"""Kernels that are compiled before they are needed."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from diffusion.errors import ConfigError
from diffusion.runs import precompile_worker as ahead_worker
from diffusion.runtime import backend, precompile as ahead
from triton_kernels.runtime.device import Device

from ..end_to_end.run import run

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda", 0)
HOPPER = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True, arch=90)


@pytest.mark.long
def test_a_rehearsal():
    """A step and a chain, as for a GPU, where there is none; with no time for their products."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.diffusion.recorded"]
    said = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=240
    )
    found = json.loads(said.stdout)
    kernels = Counter(found["train"])
    assert kernels["conv_forward_kernel"] + kernels["conv_tile_mma_kernel"] >= 4  # by shape
    assert {"_q_sample_kernel", "denoise_loss_bwd_kernel", "_adamw_kernel"} <= set(kernels)
    assert {"_normal_kernel", "_begin_step_kernel", "_denoise_step_kernel"} <= set(found["draw"])
    assert {"conv1d_stage_kernel", "_denoise_step_kernel"} <= set(found["act"])
    assert {"_square_sums_kernel", "_adamw_kernel"} <= set(found["policy"])
    assert len([name for name in found["policy"] if "conv" in name]) >= 12
    assert found["looked up"].count("_adamw_kernel") == 2
    assert found["train"] == found["again"] and found["left as it was"]
    assert found["slow imports"] == []  # a step that is planned, and the canary's reference


def test_a_data_set_that_is_larger_than_memory(monkeypatch):
    monkeypatch.setattr(ahead_worker, "_ENOUGH", 10_000)
    for count, expected in ((10**12, 52), (40, 40)):
        what = {"shape": [count, 8, 8, 3], "dtype": "uint8"}
        assert ahead_worker._unread(what).shape == (expected, 8, 8, 3)
    small = torch.zeros(5, 3, dtype=torch.int64)
    assert torch.equal(ahead_worker._unread(ahead.described(small)), small)
    assert ahead.described(None) is None is ahead_worker._unread(None)


COMPILED = """
import sys
import torch
from pathlib import Path
import triton_kernels
from diffusion.runs.precompile_worker import rehearsed
from tests.diffusion.recorded import HOPPER
from triton_kernels.attention.hopper_kernels import attention_fwd_head_kernel as gluon
from triton_kernels.runtime.compile_launches import compile_launches
from triton_kernels.runtime.launch_recorder import Launch

rng = torch.zeros(2, dtype=torch.int64)

def at_once(_):
    triton_kernels.draw_timesteps(rng, 5, 1000)
    triton_kernels.draw_flips(rng, 5)

def later(settings):
    gluon[(1,)](*settings)
    triton_kernels.normal((5, 8), rng, stream=0)
    gluon[(2,)](settings[0])

jobs = (at_once, later)
launches, needed = rehearsed(jobs, [1], HOPPER)
names = [launch.kernel.fn.__name__ for launch in launches]
assert names[needed] == gluon.fn.__name__ and names[-1] == "_normal_kernel", names  # Gluon's first
launches = [launch for launch in launches if launch.kernel is not gluon]
assert needed == 2
if sys.argv[1:] == ["broken"]:
    launches.insert(0, Launch(launches[0].kernel, ("no tensor",), {}))
try:
    print(sorted(compile_launches(launches, 90, 2)))
except RuntimeError as error:
    print(error)
assert not torch.cuda.is_initialized()
"""


def test_copies_compile_without_a_gpu(tmp_path, monkeypatch):
    """Each launch once; what is compiled already is found, and what fails stops no other."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compiled(*arguments):
        code, out, err = run("-c", COMPILED, *arguments)
        assert code == 0, err
        return out.strip(), err, sorted(tmp_path.rglob("*.cubin"))

    said, _, first = compiled("broken")
    assert said == "1 kernels did not compile; 0 copies died" and len(first) == 3
    said, errors, again = compiled()
    # Triton 3.6 links its launchers with a driver, which a machine without a GPU lacks
    lines = [x for x in errors.splitlines() if not x.startswith("a launcher is not built ahead: ")]
    assert said == "[0, 1, 2]" and again == first and lines == []


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Python code in the place of the worker; on a machine with a GPU."""
    code = []

    def start(environment, errors):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        command = [sys.executable, "-c", code[-1]]
        code.append(code[-1])
        return subprocess.Popen(command, **pipes, text=True, env=environment)

    monkeypatch.setattr(ahead, "_start", start)
    monkeypatch.setattr(ahead, "_may_compile", lambda device: device.type == "cuda")
    monkeypatch.setattr(ahead, "_processes", lambda memory: 4)
    monkeypatch.setattr(ahead, "describe", lambda device: HOPPER)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return code


def compile_ahead(shapes=None, device=CUDA):
    ahead.compile_ahead("train", {"lr": 0.1}, shapes or {"batch": 8, "lr": 0.1}, device)


DONE = """
import json, os, sys, time
order = json.load(sys.stdin)
assert order["environment"]["TRITON_CACHE_DIR"] == os.environ["TRITON_CACHE_DIR"]
assert (order["job"], order["processes"]) == ("train", 4) and order["settings"] == {"lr": 0.1}
assert "RANK" not in os.environ and "WORLD_SIZE" not in os.environ
print("a library's note")
print(12, 10)
for number in (3, 11, 1, 0, 2, 4, 5, 6, 7, 8):
    print(number, flush=True)
time.sleep(0.3)
print(9, flush=True)
time.sleep(60)  # of what is needed later nobody waits
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


def test_without_a_terminal_lines_say_how_far_it_is(worker, capsys, monkeypatch):
    monkeypatch.setattr(ahead, "_SILENT", 0.1)
    worker.append(DONE)
    compile_ahead()
    assert "10 of 10 kernels compiled, about 0 s left" in capsys.readouterr().out


def test_how_long_it_takes_is_said_when_each_process_has_compiled_one(worker, capsys, monkeypatch):
    monkeypatch.setattr(ahead, "_SILENT", 0.0)
    worker.append(DONE)
    compile_ahead()
    lines = [x for x in capsys.readouterr().out.splitlines() if " of 10 kernels compiled" in x]
    assert len(lines) > 5  # of two processes' worth and more
    assert [("left" in x) for x in lines] == [int(x.split()[0]) > 4 for x in lines]


def test_the_worker_starts_early_where_nothing_is_compiled(worker, monkeypatch):
    started = []
    make = ahead._Worker
    monkeypatch.setattr(ahead, "_Worker", lambda: started.append(make()) or started[-1])
    monkeypatch.setattr(ahead, "_waiting", None)
    worker.append(DONE)
    ahead.prepare(CUDA)
    ahead.prepare(CUDA)
    assert len(started) == 1
    compile_ahead()  # by the same one
    assert len(started) == 1 and ahead._waiting is None
    ahead.prepare(CUDA)  # for this GPU and these versions something is compiled
    ahead.prepare(torch.device("cpu"))
    assert len(started) == 1
    started[0].end()


ORDERED = """
import json, os, sys, time
order = json.load(sys.stdin)
with open(os.environ["TRITON_CACHE_DIR"] + ".orders", "a") as file:
    print(order["environment"].get("TRITON_KERNELS_OFF", "nothing"), file=file)
print(1, 1)
print(0, flush=True)
time.sleep(60)
"""


@pytest.fixture
def orders(worker, tmp_path, monkeypatch):
    """What is switched off in each order that a worker has begun."""
    monkeypatch.delenv("TRITON_KERNELS_OFF", raising=False)
    worker.append(ORDERED)
    file = tmp_path / "cache.orders"

    def listed():
        return file.read_text().split() if file.exists() else []

    return listed


def compiling(shapes=0):
    return ahead.compiling_ahead("train", {"lr": 0.1}, {"shapes": shapes}, CUDA)


def test_kernels_are_compiled_while_others_are_tried(orders, capsys):
    with compiling():
        assert "with 4 processes" in capsys.readouterr().out
        for _ in range(600):  # the worker begins before the block ends
            if orders():
                break
            time.sleep(0.1)
        assert orders() == ["nothing"]
    assert "1 kernels in" in capsys.readouterr().out
    with compiling():
        assert capsys.readouterr().out == ""
    assert orders() == ["nothing"]


def test_what_is_switched_off_meanwhile_is_compiled_without(orders, monkeypatch, capsys):
    with compiling():
        monkeypatch.setenv("TRITON_KERNELS_OFF", "hopper")
    assert orders()[-1] == "hopper" and "1 kernels in" in capsys.readouterr().out


def test_nothing_goes_on_where_no_kernel_is_right(orders, capsys):
    """The next job of a sweep is in the same process, and may want the same kernels."""
    with pytest.raises(ConfigError, match="cannot be used"), compiling():
        raise ConfigError("backend=triton cannot be used here")
    assert "kernels in" not in capsys.readouterr().out
    with compiling():
        assert "with 4 processes" in capsys.readouterr().out
    assert "1 kernels in" in capsys.readouterr().out


@pytest.mark.parametrize("code", ["raise RuntimeError('no ptxas')", "import sys; sys.exit(3)"])
def test_a_worker_that_fails_does_no_harm(code, worker, caplog):
    worker.append(code)
    compile_ahead()
    assert "compiling failed; other kernels compile at their first launch" in caplog.text
    assert ("no ptxas" in caplog.text) == ("no ptxas" in code)
    caplog.clear()
    compile_ahead()  # not again: it would fail every time
    assert caplog.text == ""


def test_where_nothing_is_compiled(worker, monkeypatch, tmp_path, capsys):
    worker.append("raise AssertionError")
    compile_ahead(device=torch.device("cpu"))
    with monkeypatch.context() as other:
        other.setattr(ahead, "_processes", lambda _: 3)  # no room for four
        compile_ahead()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))  # nothing can be written there
    compile_ahead()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("rank", "expected"), [(None, True), ("0", True), ("1", False)])
def test_the_first_process_of_a_machine_compiles(rank, expected, monkeypatch):
    monkeypatch.setattr(ahead.triton.knobs.runtime, "interpret", False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert ahead._may_compile(CUDA) is expected
    assert not ahead._may_compile(torch.device("cpu"))


def test_how_many_processes(monkeypatch):
    monkeypatch.setattr(ahead, "processors", lambda: 32)
    monkeypatch.setattr(ahead, "free_memory", lambda: 2**40)
    monkeypatch.delenv("TRITON_DIFFUSION_COMPILERS", raising=False)
    assert ahead._processes(0) == 16
    monkeypatch.setattr(ahead, "free_memory", lambda: 18 * 2**30)
    assert ahead._processes(0) == 9 and ahead._processes(3 * 2**30) == 6
    monkeypatch.setenv("TRITON_DIFFUSION_COMPILERS", "0")
    assert ahead._processes(0) == 0
    monkeypatch.setenv("TRITON_DIFFUSION_COMPILERS", "few")
    with pytest.raises(ConfigError, match="TRITON_DIFFUSION_COMPILERS=few .* a number"):
        ahead._processes(0)


def test_names_of_kernels_are_settled_before_the_first_is_tried(monkeypatch):
    """Else those that trying them launches have other names in the cache than the worker's."""
    order = []
    monkeypatch.setattr(backend, "settle_cache_keys", lambda: order.append("settled"))
    monkeypatch.setattr(backend, "settle_compiler", lambda device: order.append("assembler"))
    monkeypatch.setattr(backend, "kernels_off", lambda device: order.append("tried") or [])
    for name in ("auto", "triton"):
        order.clear()
        assert backend.choose_backend(name, "fp32", CUDA).name == "triton"
        assert order == ["settled", "assembler", "tried"]
        order.clear()
        assert backend.untried_backend(name, "fp32", CUDA).name == "triton"
        assert order == ["settled", "assembler"]
    order.clear()
    assert backend.choose_backend("auto", "fp32", torch.device("cpu")).name == "torch"
    assert backend.choose_backend("torch", "fp32", CUDA).name == "torch" and order == []


@pytest.mark.gpu
@pytest.mark.parametrize("job", ["TRAIN", "POLICY"])
def test_nothing_is_left_to_compile(job, tmp_path):
    """In a cache that was empty: a step finds what the worker has compiled."""
    script = """
import sys, torch
from diffusion.runs import precompile_worker
from diffusion.runtime import backend, precompile
from tests.diffusion import recorded
backend.choose_backend("triton", "bf16", torch.device("cuda", 0))  # as a run begins
device, job = torch.device("cuda", 0), getattr(recorded, sys.argv[2])
if sys.argv[1] == "ahead":
    precompile.compile_ahead("train", job, job, device)
else:
    precompile_worker._HOST = device
    precompile_worker.train(job)
    torch.cuda.synchronize()
"""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DIFFUSION_COMPILERS": "4",
    }

    def compiled(what: str) -> int:
        command = [sys.executable, "-c", script, what, job]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=240)
        return len(list(tmp_path.rglob("*.cubin")))

    before = compiled("ahead")
    assert before > 30 and compiled("step") <= 1.05 * before
