"""A run goes on with its own settings, and says which were changed."""

import re

import pytest
import yaml

import diffusion
from diffusion.errors import ConfigError
from diffusion.presets import preset
from diffusion.runs.own_settings import completed
from triton_diffusion.entry import CONFIGS
from triton_diffusion.resume import own_settings

from ..test_configs import composed
from .run import TINY, rows, run

FIRST = (*TINY, "train.steps=1", "train.sample_every=0", "dataset.channels=1", "optim.lr=1e-3")
CHANGED = {  # settings of each group, as they are given and as they are said
    "optim.lr=1e-4": "optim.lr: 0.001 -> 0.0001",
    "optim.betas=[0.8,0.9]": "optim.betas: [0.9, 0.999] -> [0.8, 0.9]",
    "optim.ema_decay=0.5": "optim.ema_decay: 0.98 -> 0.5",
    "optim.weight_decay=0.1": "optim.weight_decay: 0.0 -> 0.1",
    "optim.clip_norm=2": "optim.clip_norm: 1.0 -> 2",
    "optim.decay=linear": "optim.decay: cosine -> linear",
    "train.accumulate=2": "train.accumulate: 1 -> 2",
    "train.steps=2": "train.steps: 1 -> 2",
    "dataset.flip=false": "dataset.flip: true -> false",
}


@pytest.fixture
def run_dir(tmp_path):
    code, _, err = run("train.py", *FIRST, f"run_dir={tmp_path}/run")
    assert code == 0, err
    return tmp_path / "run"


def settings(path):
    return yaml.safe_load(path.read_text())


def test_every_setting_that_changed_is_listed(run_dir):
    before = settings(run_dir / "config.yaml")
    code, out, err = run("train.py", f"run_dir={run_dir}", *CHANGED)
    assert code == 0, err
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert sorted(notes) == sorted(f"note: {line}" for line in CHANGED.values())
    log = (run_dir / "train.log").read_text()
    assert all(line in log for line in CHANGED.values())
    assert settings(run_dir / "config_until_step_00000001.yaml") == before
    after = settings(run_dir / "config.yaml")
    assert after["optim"]["lr"] == 1e-4 and after["dataset"]["channels"] == 1


@pytest.mark.long
def test_another_batch_size_goes_on_in_the_order_of_the_data(run_dir):
    """Behind the four images of the first step; what is said of the first two batches of two."""
    for steps, said in ((2, "goes on behind the 4 samples seen"), (3, "behind the 6 samples seen")):
        more = ("train.batch_size=2", f"train.steps={steps}")
        code, out, err = run("train.py", f"run_dir={run_dir}", *more)
        assert code == 0 and said in out and said in (run_dir / "train.log").read_text(), err
    assert [row["images"] for row in rows(run_dir)] == ["4", "6", "8"]
    code, out, _ = run("train.py", f"run_dir={run_dir}", "train.steps=4")
    assert code == 0 and "behind the 8 samples seen" in out  # other than 3 x 2


def test_a_run_takes_its_own_settings(run_dir):
    before = settings(run_dir / "config.yaml")
    code, out, err = run("train.py", f"run_dir={run_dir}", "train.steps=2")
    assert code == 0, err
    assert len(rows(run_dir)) == 2 and out.count("note: ") == 1
    before["train"]["steps"] = 2
    assert settings(run_dir / "config.yaml") == before
    # it is finished now, which it says whatever is asked to be shown of it, and changes nothing
    for more in ((), ("train.log_every=7",), FIRST + ("train.steps=2",)):
        code, out, err = run("train.py", f"run_dir={run_dir}", *more)
        assert code == 0 and "done already, after 2 steps, with a loss of" in out, err
    assert settings(run_dir / "config.yaml") == before


def test_a_run_takes_its_own_settings_from_python_too(run_dir):
    """Also as it was begun on the command line; a dict without `name` changes some of a group."""
    before = settings(run_dir / "config.yaml")
    diffusion.train(run_dir)  # it is done, and says so
    assert settings(run_dir / "config.yaml") == before
    diffusion.train(run_dir, optim={"lr": 1e-4}, dataset={"flip": False}, steps=2)
    before["optim"]["lr"], before["dataset"]["flip"], before["train"]["steps"] = 1e-4, False, 2
    assert settings(run_dir / "config.yaml") == before
    assert [row["step"] for row in rows(run_dir)] == ["1", "2"]
    with pytest.raises(ConfigError, match="another model: model.num_res_blocks is 1 there, 2 here"):
        diffusion.train(run_dir, model={"num_res_blocks": 2}, steps=3)
    chosen = completed(run_dir, {"optim": "adamw", "device": "cuda"}, {})
    assert chosen["optim"] == preset("optim", "adamw") and chosen["device"] == "cuda"
    assert chosen["dataset"] == before["dataset"] and chosen["backend"] == before["backend"]
    near = (
        f"run_dir={run_dir.with_name('rum')} has no run to resume; did you mean run_dir={run_dir}"
    )
    with pytest.raises(ConfigError, match=re.escape(near)):
        diffusion.train(run_dir.with_name("rum"), steps=3)


def test_what_is_given_wins(run_dir):
    """A group that is chosen comes with its own settings, an experiment with those it has."""
    code, out, _ = run("train.py", f"run_dir={run_dir}", "optim=adamw", "--cfg", "job")
    assert code == 0
    shown = yaml.safe_load(out)
    assert shown["optim"]["lr"] != 1e-3 and shown["dataset"]["channels"] == 1
    code, out, _ = run("train.py", f"run_dir={run_dir}", "experiment=demo", "--cfg", "job")
    shown = yaml.safe_load(out)
    assert (shown["train"]["steps"], shown["optim"]["lr"]) == (1400, 2e-3)
    assert (shown["optim"]["warmup"], shown["train"]["sample_steps"]) == (50, 2)
    assert shown["model"]["model_channels"] == 16 and shown["dataset"]["channels"] == 1


def test_settings_of_another_data_set_can_be_given(tmp_path):
    """Keys that only the run's own groups have."""
    command = ("experiment=push_disc", "dataset.episodes=8", "model.down_dims=[32,64]")
    command += ("device=cpu", "train.batch_size=4", "train.sample_every=0", "train.steps=1")
    quick = ("train.precision=fp32", "train.log_every=1", "train.tensorboard=false")
    code, _, err = run("train.py", *command, *quick, f"run_dir={tmp_path}/run")
    assert code == 0, err
    # it knows the key, so it comes to say that the policy was trained with another value
    code, _, err = run(
        "train.py", f"run_dir={tmp_path}/run", "dataset.action_steps=3", "train.steps=2"
    )
    assert code == 2 and "action_steps is 4 there, 3 here" in err


def test_any_text_comes_through(tmp_path):
    odd = {"path": "it's a [b], {c} = \\ \\' \"d\" \\", "name": "folder", "numbers": [1e-30, 1e300]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"dataset": odd, "train": {"init": "=,"}}))
    taken = composed(*own_settings([f"run_dir={tmp_path}"], [CONFIGS]))
    assert taken["dataset"] == odd and taken["train"]["init"] == "=,"


@pytest.mark.parametrize("text", ["model: unet", "[", "- a", "optim: {lr: [}"])
def test_settings_that_cannot_be_read_are_one_line(run_dir, text):
    (run_dir / "config.yaml").write_text(text)
    code, _, err = run("train.py", f"run_dir={run_dir}", "train.steps=2")
    (line,) = err.splitlines()
    assert code == 2 and line.startswith(f"error: {run_dir}/config.yaml cannot be read: "), err


def test_a_folder_without_a_run_is_one_line(run_dir):
    """A name that was mistyped, or a folder above: with settings that only say where and how long
    nothing begins."""
    for name, said in (
        (run_dir.with_name("rum"), f"did you mean run_dir={run_dir}? a new run needs"),
        (run_dir.with_name("other"), f"no run to resume; runs: {run_dir}; a new run needs"),
        (run_dir.parent, f"no run to resume; runs: {run_dir}; a new run needs"),
    ):
        there = name.exists()
        code, out, err = run("train.py", f"run_dir={name}", "train.steps=2", "device=cpu")
        (line,) = err.splitlines()
        assert code == 2 and line.startswith(f"error: run_dir={name} has no run") and said in line
        assert out == "" and name.exists() == there


@pytest.mark.parametrize(
    "more", [("dataset=folder",), ("optim.lr=1",), ("train.resume=a",), ("-m", "train.steps=1,2")]
)
def test_a_new_run_begins_where_something_says_what_it_trains(tmp_path, more):
    assert own_settings([f"run_dir={tmp_path}/new", *more], [CONFIGS]) == []
