"""The launches of a plan before its first call are those of that call, also behind a file."""

import json
import pickle

import pytest
import torch

from diffusion import accelerate
from diffusion.errors import ConfigError
from diffusion.plan.calls import calls
from diffusion.runtime import backend
from tests.end_to_end.run import run
from tests.plan.compiled_ahead import NAMES
from triton_kernels.runtime.launch_file import write_launches
from triton_kernels.runtime.launch_recorder import Launch


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launches")
    code, out, err = run("-m", "tests.plan.compiled_ahead", str(folder))
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_call_launches_what_was_recorded(compared, name, trains):
    found = compared[f"{name}, {trains}"]
    assert found["launched"] and found["recorded"] == found["launched"] == found["read"]


def test_a_function_that_its_module_has_not_is_not_written(tmp_path):
    def local(x):
        return x

    with pytest.raises((pickle.PicklingError, AttributeError)):
        write_launches([Launch(local, (torch.ones(1),), {})], tmp_path / "launches")


def test_a_network_runs_without_what_could_not_be_compiled_ahead(monkeypatch, caplog):
    def fails(record, device):
        raise pickle.PicklingError("another function")

    monkeypatch.setattr(calls, "compile_recorded", fails)
    monkeypatch.setattr(calls, "compiles_ahead", lambda device: True)
    fast = accelerate(torch.nn.Linear(3, 3))
    with caplog.at_level("INFO"):
        assert fast(torch.ones(2, 3)).shape == (2, 3)
    assert "kernels are compiled at their first launch" in caplog.text


def test_a_gpu_without_right_kernels_is_named(monkeypatch):
    def wrong(device):
        raise RuntimeError("no kernel computes a small convolution: off by 3.0 %")

    monkeypatch.setattr(backend, "_settle", lambda device: None)
    monkeypatch.setattr(backend, "kernels_off", wrong)
    with pytest.raises(ConfigError, match="the kernels cannot be used on cuda:0: no kernel"):
        backend.ready_kernels(torch.device("cuda", 0))
    monkeypatch.setattr(backend, "kernels_off", lambda device: ["kernels named tma are off"])
    backend.ready_kernels(torch.device("cuda", 0))  # asked again, since it had failed
    backend.ready_kernels.cache_clear()
