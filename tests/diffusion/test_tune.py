"""tools/tune.py and tools/doctor.py, where there is no GPU and where one is pretended."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from diffusion.errors import ConfigError
from diffusion.runs import doctor, training, tune
from diffusion.runtime.backend import Backend
from triton_kernels.registry import choose, rows
from triton_kernels.registry.kernel import Kernel, Op
from triton_kernels.registry.search import search
from triton_kernels.registry.spec import Spec
from triton_kernels.runtime.device import Device

from ..end_to_end.run import run

ROOT = Path(__file__).resolve().parents[2]
TINY = {"name": "unet", "model_channels": 32, "channel_mult": [1, 1], "num_res_blocks": 1}
TINY |= {"attention_resolutions": []}
HOPPER = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True, arch=90)
ADA = Device(tma=False, num_sms=128, shared_memory=101_376, arch=89)

LISTED = """
import json
from diffusion.runs import tune
from tests.diffusion.test_tune import ADA, HOPPER, TINY

settings = tune.TuneSettings(model=TINY, diffusion={}, batch=2, size=16)
found = tune.to_measure(settings, HOPPER)
ada = tune.to_measure(settings, ADA)
print(json.dumps([found.shapes, found.known, found.kernels, ada.shapes, ada.known, str(ada)]))
"""


def test_what_would_be_measured_on_a_gpu_that_is_not_here(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DIFFUSION_CACHE", str(tmp_path))
    code, out, err = run("-c", LISTED)
    assert code == 0, err
    shapes, known, kernels, ada, ada_known, line = json.loads(out)
    assert shapes + known == pytest.approx(ada + ada_known, abs=6)  # kernels differ, layers do not
    assert shapes > 5 and kernels > shapes and ada > 5 and ada_known == 0
    assert line.startswith(f"{ada} of {ada} shapes have no row; ")


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DIFFUSION_CACHE", str(tmp_path))
    rows.table.cache_clear()
    yield rows.cache_path(HOPPER)
    rows.table.cache_clear()


class Tile(NamedTuple):
    tile: int


@dataclass(frozen=True)
class Channels(Spec):
    c: int


TILES = [Tile(64), Tile(128)]
OP = Op("op", ("c",), (Kernel("k", Tile, lambda *_: None, lambda *_: TILES),))


def measure(n):
    """A shape of which nothing is known, with two candidates."""
    choose.select(OP, Channels(n, "bf16", 8), HOPPER, lambda c: torch.ones(4))


def test_measuring_goes_on_where_it_was_stopped(shipped, monkeypatch, capsys):
    """Shapes with a row are passed over, each row is there at once, and minutes are kept to."""
    times = iter([30.0, 20.0, 30.0, 20.0, 30.0, 20.0])
    monkeypatch.setattr("triton_kernels.registry.search.time_call", lambda run, best: next(times))
    settings = tune.TuneSettings(model=TINY, diffusion={}, minutes=1)
    clock = [0.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: clock[0])

    def step(k):
        for n in (1, 2, 3):
            measure(n)
            clock[0] += 25

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found, complete = tune._measure(settings, HOPPER, step, shipped, 3, end=40.0)
    assert not complete and [row["n"] for row in found.rows] == [1, 2]
    assert [row["n"] for row in rows.read(shipped)] == [1, 2]
    assert {row["config"]["tile"] for row in rows.read(shipped)} == {128}
    found, complete = tune._measure(settings, HOPPER, step, shipped, 1, end=1000.0)
    assert complete and [row["n"] for row in found.rows] == [3] and found.passed == 2
    tune._report(found)
    said = capsys.readouterr().out
    assert "one call of each shape: 0.03 -> 0.02 ms" in said and "30.0 ->    20.0 us" in said


def test_again_measures_everything(shipped):
    rows.save([{"op": "op", "n": 1, "c": 8, "kernel": "k", "config": {"tile": 64}}], shipped)
    assert not rows.unmeasured(HOPPER, "op", 1, {"c": 8})
    assert rows.unmeasured(HOPPER, "op", 2, {"c": 8}) and rows.unmeasured(ADA, "op", 1, {"c": 8})
    settings = tune.TuneSettings(model=TINY, diffusion={}, again=True)
    assert tune._wanted(settings, HOPPER) is None
    with search(timed=False, wanted=lambda *_: False) as found:
        measure(1)
    assert (found.shapes, found.passed) == (0, 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch": 0}, "batch=0; expected at least 1"),
        ({"minutes": 0}, "minutes=0; expected a number above 0"),
        ({"model": {"name": "unet1d"}}, "tuning is for images, expected one of unet"),
        ({"gpu": "rtx9090"}, "gpu=rtx9090 is unknown; choose one of h100"),
    ],
)
def test_wrong_settings(given, words):
    with pytest.raises(ConfigError, match=words):
        tune.tune({"model": TINY, "diffusion": {}, "device": "cpu"} | given)


def test_training_says_that_nobody_has_timed_kernels_on_such_a_gpu(monkeypatch):
    triton, cuda = Backend("triton", None), torch.device("cuda", 0)
    monkeypatch.setattr(training, "describe", lambda device: ADA)
    (line,) = training._untuned(cuda, triton)
    assert "an sm_89 with 128 multiprocessors" in line and "tools/tune.py" in line
    assert list(training._untuned(torch.device("cpu"), triton)) == []
    monkeypatch.setattr(training, "describe", lambda device: HOPPER)
    assert list(training._untuned(cuda, triton)) == []


# --- the doctor -----------------------------------------------------------------------------------


def test_the_doctor_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_KERNELS_OFF", "hopper")
    path = tmp_path / "found.json"
    report = doctor.doctor({"out": str(path), "device": "cpu", "batch": 2})
    assert json.loads(path.read_text()) == report
    assert report["software"]["torch"] == torch.__version__
    assert report["host"]["environment"]["TRITON_KERNELS_OFF"] == "hopper"
    assert "PyTorch sees none" in report["gpu"] and "not tried" in report["kernels"]
    assert report["step"]["PyTorch's layers, ms"] > 0
    said = capsys.readouterr().out
    assert f"triton: {report['software']['triton']}" in said and f"attach {path}" in said


def test_what_is_wrong_is_in_the_report_and_the_rest_goes_on(tmp_path, monkeypatch):
    def broken(device):
        raise RuntimeError("no kernel computes a small convolution: ptxas\nmore")

    monkeypatch.setattr(doctor, "_kernels", broken)
    report = doctor.doctor({"out": None, "device": "cpu", "step": False})
    why = "RuntimeError: no kernel computes a small convolution: ptxas"
    assert report["kernels"] == {"failed": why} and "step" not in report


def test_the_doctor_names_kernels_that_are_off(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(doctor.canary, "kernels_off", lambda device: [])
    monkeypatch.setattr(doctor, "describe", lambda device: HOPPER._replace(hopper=False))
    monkeypatch.setattr(doctor, "switched_off", lambda: {"hopper": "the result is wrong"})
    found = doctor._kernels(cuda)
    assert found["kernels for Hopper GPUs"] == "off: the result is wrong"
    assert found["kernels that copy by the TMA unit"] == "on"
    assert found["rows of measurements"] > 100 and found["file of rows"] == "sm_90-132.jsonl"
    monkeypatch.setattr(doctor, "describe", lambda device: ADA)
    monkeypatch.setattr(doctor, "switched_off", dict)
    assert doctor._kernels(cuda)["kernels that copy by the TMA unit"] == "not for it"
