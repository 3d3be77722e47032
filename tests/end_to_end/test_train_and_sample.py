"""The main job as a user runs it, at the smallest size."""

import signal
import time

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from .processes import finish
from .run import TINY, begin, rows, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "a"
    command = (*TINY, f"run_dir={run_dir}", "train.steps=6", "train.save_every=2")
    code, _, err = run("train.py", *command)
    assert code == 0, err
    return run_dir


def test_everything_of_the_run_is_in_its_folder(trained):
    assert (trained / "config.yaml").is_file()
    assert (trained / "loss.png").is_file()
    assert (trained / "checkpoints" / "step_00000006" / "ema.safetensors").is_file()
    steps = [int(row["step"]) for row in rows(trained)]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert rows(trained)[-1]["images"] == "24"
    for field in ("loss", "lr", "grad_norm", "images_per_s"):
        assert all(float(row[field]) > 0 for row in rows(trained)), field


def test_sample_grid(trained, tmp_path):
    out = tmp_path / "grid.png"
    command = ("sample.py", f"ckpt={trained}", "n=3", "steps=2", f"out={out}", "device=cpu")
    code, _, err = run(*command, fresh=True)
    assert code == 0, err
    assert Image.open(out).size[0] > 100


def test_samples_do_not_depend_on_the_batch(trained, tmp_path):
    drawn = []
    for batch_size in (1, 3):
        out = tmp_path / f"{batch_size}.npz"
        code, _, err = run(
            "sample.py",
            f"ckpt={trained}/checkpoints/step_00000006",
            *("n=3", "steps=2", "sampler=ddpm", "seed=5", "device=cpu", f"out={out}"),
            f"batch_size={batch_size}",
        )
        assert code == 0, err
        drawn.append(np.load(out)["arr_0"].astype(int))
    assert drawn[0].shape == (3, 8, 8, 3)
    assert np.abs(drawn[0] - drawn[1]).max() <= 1


def test_guided_samples_of_a_conditional_model(tmp_path):
    classes = ("model.num_classes=3", "model.label_dropout=0.3")
    code, _, err = run("train.py", *TINY, f"run_dir={tmp_path}/run", "train.steps=2", *classes)
    assert code == 0, err
    code, out, err = run(
        "sample.py",
        f"ckpt={tmp_path}/run",
        *("n=3", "steps=3", "sampler=dpmpp_2m", "spacing=karras", "guidance=3", "device=cpu"),
    )
    assert code == 0, err
    assert "sample_step_00000002_dpmpp_2m3_spacing-karras_guidance3_0.png" in out
    assert len(list((tmp_path / "run" / "samples").glob("*_guidance3_0.png"))) == 1


def test_killed_and_resumed_equals_not_killed(trained, tmp_path):
    """SIGKILL after a checkpoint, then the same command: the same parameters, bit for bit."""
    run_dir = tmp_path / "b"
    command = (*TINY, f"run_dir={run_dir}", "train.steps=6", "train.save_every=2")
    process = begin("train.py", *command)
    waiting = time.monotonic() + 120
    while not (run_dir / "checkpoints" / "step_00000002").exists():
        assert process.poll() is None and time.monotonic() < waiting
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    finish(process, 60)
    code, out, err = run("train.py", *command)
    assert code == 0, err
    for name in ("model", "ema", "optimizer"):
        a = load_file(trained / "checkpoints" / "step_00000006" / f"{name}.safetensors")
        b = load_file(run_dir / "checkpoints" / "step_00000006" / f"{name}.safetensors")
        assert a.keys() == b.keys()
        assert all((a[key] == b[key]).all() for key in a), name
    assert [r["loss"] for r in rows(run_dir)] == [r["loss"] for r in rows(trained)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits(tmp_path, number):
    run_dir = tmp_path / "c"
    process = begin("train.py", *TINY, f"run_dir={run_dir}", "train.steps=100000")
    waiting = time.monotonic() + 120
    while not (run_dir / "metrics.csv").exists() or len(rows(run_dir)) < 2:
        assert process.poll() is None and time.monotonic() < waiting
        time.sleep(0.05)
    process.send_signal(number)
    _, err = finish(process, 60)
    assert process.returncode == 128 + number
    assert "saved" in err
    step = int(rows(run_dir)[-1]["step"])
    assert (run_dir / "checkpoints" / f"step_{step:08d}" / "state.json").is_file()


def test_the_jobs_of_a_sweep_do_not_draw_over_each_other(trained, tmp_path):
    def drawn(*arguments):
        command = ("sample.py", f"ckpt={trained}", "n=1", "steps=1", "device=cpu", "-m", "seed=0,1")
        code, _, err = run(*command, *arguments, cwd=tmp_path)
        assert code == 0, err
        found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png"))
        for name in found:
            (tmp_path / name).unlink()
        return found

    assert drawn("out=a.png") == ["a_0.png", "a_1.png"]
    assert drawn("out='b${seed}.png'") == ["b0.png", "b1.png"]
    assert drawn("out=c.png,d.png") == ["c.png", "d.png"]  # as was asked
