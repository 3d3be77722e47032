"""Settings and errors of the command lines."""

import dataclasses
import os

import pytest
import torch
import triton

from benchmarks import harness, run, sampling
from benchmarks.cases import model_cases
from diffusion.errors import ConfigError

from ..end_to_end.run import run as run_command
from .small import row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["opp=conv2d"], "opp is unknown; did you mean op?"),
        (["conv2d"], "conv2d is not of the form key=value"),
        (["op=conv"], "op=conv is unknown; choose from conv2d"),
        (["dtype=int8"], "dtype=int8 is unknown; choose from bf16"),
        (["batch=a"], "batch=a is not a whole number"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        run.main(arguments)


def test_unknown_models_and_empty_choices_are_named():
    with pytest.raises(ConfigError, match="model=unet65 is unknown; choose one of adm64, .*unet64"):
        model_cases("unet65", 1)
    settings = run.DEFAULTS | {"shape": "5x5", "batch": (1,)}
    with pytest.raises(ConfigError, match="nothing to time"):
        run.select(settings, ("conv2d",))


def test_processes_share_a_cache_of_kernels(monkeypatch):
    """Also those in which Inductor, which names another, has compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    seen = []
    with pytest.raises(SystemExit):
        harness.run_entry(lambda words: seen.append(os.environ["TRITON_CACHE_DIR"]) or 0)
    assert seen == [str(triton.knobs.cache.dir)]


def test_what_sampling_times():
    settings = harness.parse_settings(["batch=1,16", "chains=ddim50,ddpm"], sampling.DEFAULTS)
    tasks = sampling.choose_tasks(settings)
    assert tasks[0] == (None, "triton-bf16", 1) and tasks[-1] == (
        "ddpm",
        "diffusers-compile-bf16",
        16,
    )
    assert len(tasks) == 3 * 2 + 5 * 2
    assert sampling.split_chain("ddpm") == ("ddpm", 1000)
    with pytest.raises(ConfigError, match="chains=heun is unknown; choose from ddim, ddpm"):
        sampling.choose_tasks(settings | {"chains": ("heun20",)})


def test_settings_take_the_types_of_their_defaults():
    settings = harness.parse_settings(["batch=8,32", "op=conv2d"], run.DEFAULTS)
    assert settings["batch"] == (8, 32) and settings["op"] == ("conv2d",)
    assert dataclasses.asdict(row())["bytes"] == 2**35


@pytest.mark.parametrize("module", ["benchmarks.train_step", "diffusion.plan"])
def test_help_lists_the_settings(module):
    code, out, err = run_command("-m", module, "--help")
    assert code == 0 and not err
    assert f"python -m {module} " in out and "model" in out and "\n\n" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "module", ["run", "train_step", "profile", "sampling", "tune_sampling", "policy"]
)
def test_without_a_gpu_there_is_one_line(module):
    code, _, err = run_command("-m", f"benchmarks.{module}", fresh=module == "run")
    assert code == 2
    assert err == "error: benchmarks need a CUDA device, and PyTorch sees none\n"
