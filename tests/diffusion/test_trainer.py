"""What a run keeps while it diverges, and what it writes down when it is resumed."""

import json
import os
import signal

import pytest

from diffusion.errors import ConfigError
from diffusion.formats.checkpoint import read_state
from diffusion.formats.checkpoint_folder import latest_checkpoint, list_checkpoints
from diffusion.runs.sampling import sample
from diffusion.runs.training import train
from diffusion.runtime.interrupt import Interrupted
from diffusion.tracking.run_log import FIELDS, WALL_CLOCK, diverged_at
from diffusion.training import trainer
from diffusion.training.train_step import TrainStep

from ..end_to_end.run import TINY, rows
from ..test_configs import composed

QUIET = (*TINY, "train.sample_count=0", "optim.warmup=0")
EVERY = (*QUIET, "train.save_every=1", "train.keep=2")


def steps(run_dir):
    return [int(path.name[5:]) for path in list_checkpoints(run_dir / "checkpoints")]


@pytest.fixture
def good(tmp_path):
    train(composed(*EVERY, "train.steps=3"), tmp_path / "run")
    return tmp_path / "run"


# the update itself is not finite; or finite numbers that the next step cannot compute with
@pytest.mark.parametrize(("lr", "last"), [("1e39", 3), ("1e38", 4)])
def test_nothing_is_saved_while_steps_are_skipped(good, lr, last):
    with pytest.raises(ConfigError, match=f"last good .*step_{last:08d}; .* that one or") as caught:
        train(composed(*EVERY, f"optim.lr={lr}", "train.steps=9"), good)
    assert "at step 9, the last one: training has diverged" in str(caught.value)
    assert steps(good) == [last - 1, last]
    assert diverged_at(good) == 5
    with pytest.warns(UserWarning, match=f"step_{last:08d} diverged: its loss is not finite at st"):
        sample({"ckpt": str(good), "n": 1, "steps": 1, "device": "cpu"})
    train(composed(*EVERY, "train.steps=4", f"train.resume={good}/checkpoints/step_00000003"), good)
    assert diverged_at(good) is None and steps(good)[-1] == 4


def test_the_stop_names_the_last_good_one(good, monkeypatch):
    monkeypatch.setattr(trainer, "_PATIENCE", 3)
    with pytest.raises(
        ConfigError, match="in the 3 steps before 7: .* nothing was saved since; the"
    ):
        train(composed(*EVERY, "optim.lr=1e39", "train.steps=100"), good)
    assert steps(good) == [2, 3]


def test_there_may_be_no_good_one(tmp_path):
    with pytest.raises(ConfigError, match="there is no checkpoint; try a smaller optim.lr$"):
        train(composed(*EVERY, "optim.lr=1e39", "train.steps=2"), tmp_path / "run")


def test_a_signal_saves_nothing_then(good, monkeypatch):
    def call(self, step, wrapped=TrainStep.__call__):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return wrapped(self, step)

    monkeypatch.setattr(TrainStep, "__call__", call)
    with pytest.raises(Interrupted) as caught:
        train(composed(*EVERY, "optim.lr=1e39", "train.steps=100"), good)
    assert not caught.value.saved and caught.value.checkpoint.name == "step_00000003"
    assert steps(good) == [2, 3]


def test_a_skipped_step_puts_saving_off(tmp_path, monkeypatch):
    """One batch that cannot be computed with; the next update is made and saved."""

    def compute(self, wrapped=TrainStep._compute):
        if self.batches._index is not None and self._rng[1] == 3:
            self._share.fill_(float("nan"))
        wrapped(self)
        self._share.fill_(1 / self.batches.batch_size)

    monkeypatch.setattr(TrainStep, "_compute", compute)
    options = ("train.steps=7", "train.save_every=2", "train.keep=9")
    train(composed(*QUIET, *options), tmp_path / "run")
    assert steps(tmp_path / "run") == [2, 5, 6, 7]  # 4 updates: the fourth was left out
    state, _ = read_state(latest_checkpoint(tmp_path / "run" / "checkpoints"))
    assert state["skipped_steps"] == 1
    with pytest.warns(UserWarning, match="1 of the 7 updates of .* were left out"):
        sample({"ckpt": str(tmp_path / "run"), "n": 1, "steps": 1, "device": "cpu"})


class Killed(BaseException):
    pass


def train_killed_before(monkeypatch, step, config, run_dir):
    def call(self, number, wrapped=TrainStep.__call__):
        if number == step:
            raise Killed
        return wrapped(self, number)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(TrainStep, "__call__", call)
        train(config, run_dir)


def numbers(run_dir):
    compared = [field for field in FIELDS if field not in WALL_CLOCK]
    return [[row[field] for field in compared] for row in rows(run_dir)]


@pytest.mark.long
def test_the_metrics_of_a_resumed_run_are_those_of_an_unbroken_one(tmp_path, monkeypatch):
    """Resumed in the middle of an interval, killed behind a row, and with more steps than asked for
    at first."""
    options = (*QUIET, "train.log_every=4", "train.save_every=3", "optim.decay=none")
    config = composed(*options, "train.steps=14")
    train(config, tmp_path / "a")
    for step in (2, 5, 13):
        train_killed_before(monkeypatch, step, config, tmp_path / "b")
    train(config, tmp_path / "b")
    assert [row["step"] for row in rows(tmp_path / "a")] == ["4", "8", "12", "14"]
    assert numbers(tmp_path / "b") == numbers(tmp_path / "a")
    for count in (6, 10, 14):
        train(composed(*options, f"train.steps={count}"), tmp_path / "c")
    assert numbers(tmp_path / "c") == numbers(tmp_path / "a")
    seconds = [float(row["seconds"]) for row in rows(tmp_path / "c")]
    assert seconds == sorted(seconds)


def test_images_are_counted_on_when_the_batch_changes(tmp_path):
    options = (*QUIET, "train.log_every=2", "dataset.count=20")
    for steps, size in ((4, 5), (6, 2), (8, 10)):
        train(composed(*options, f"train.steps={steps}", f"train.batch_size={size}"), tmp_path)
    images = [int(row["images"]) for row in rows(tmp_path)]
    assert images == [10, 20, 24, 44]
    assert [float(row["epoch"]) for row in rows(tmp_path)] == [count / 20 for count in images]
    state, _ = read_state(latest_checkpoint(tmp_path / "checkpoints"))
    assert state["images"] == 44


def test_a_state_without_an_interval_is_gone_on_from(tmp_path):
    """As versions before this one wrote it."""
    options = (*QUIET, "train.log_every=4")
    train(composed(*options, "train.steps=3"), tmp_path / "run")
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    (checkpoint / "SHA256SUMS").unlink()
    state = json.loads((checkpoint / "state.json").read_text())
    del state["interval"]
    (checkpoint / "state.json").write_text(json.dumps(state | {"format": 1}))
    with pytest.warns(UserWarning, match="without digests"):
        train(composed(*options, "train.steps=5"), tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == ["3", "4", "5"]
