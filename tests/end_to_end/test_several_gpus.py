"""One, two and four GPUs train the same network and draw the same images; a run goes on with
another number of GPUs, and ends soon when one of its processes is killed."""

import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch

from benchmarks.curves import compare, difference, read_losses

from .processes import finish, ranks
from .run import rows, start, start_together
from .test_restarts import wait_for

COUNTS = [
    pytest.param(
        count,
        marks=pytest.mark.skipif(
            torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices"
        ),
    )
    for count in (2, 4)
]
SETTINGS = (
    *("model=unet64", "model.channel_mult=[2,4]", "model.num_res_blocks=1"),  # several buckets
    *("model.attention_resolutions=[2]", "dataset=elephants", "dataset.size=32"),
    *("dataset.count=500", "device=cuda", "train.batch_size=64", "train.log_every=1"),
    *("train.sample_every=0", "train.tensorboard=false", "optim.warmup=20"),
)
_PATIENCE = 300  # seconds
_WINDOW = 20  # steps that losses are averaged over before they are compared
pytestmark = pytest.mark.gpu


def succeed(processes):
    """Wait for processes, by name, and return what each has printed."""
    said = {}
    for name, process in processes.items():
        out, err = finish(process, _PATIENCE)
        assert process.returncode == 0, f"{name}: {err}"
        said[name] = out
    return said


@pytest.mark.parametrize("count", COUNTS)
def test_several_gpus_train_as_one(count, tmp_path):
    """The captured step of the fused plan, gradients summed over NCCL, at the same global batch.

    The sums over samples have another order on several GPUs, and bf16 makes of that what it makes
    of every small difference; as many micro-batches on one GPU have that order too, so they say how
    much.
    """
    settings = (*SETTINGS, "train.steps=200")
    paths = {name: tmp_path / name for name in ("one GPU", "in parts", "several GPUs")}
    one, parts, several = (f"run_dir={path}" for path in paths.values())
    said = succeed(
        {
            "one GPU": start("train.py", *settings, one),
            "in parts": start(
                "train.py", *settings, f"train.accumulate={count}", "device=cuda:1", parts
            ),
            "several GPUs": start_together(*settings, several, count=count),
        }
    )
    assert all("fused plan" in out for out in said.values())
    curves = {name: read_losses(path / "metrics.csv") for name, path in paths.items()}
    print(f"\n{compare(curves, _WINDOW)}")  # shown by pytest -s
    mean, most = difference(curves["several GPUs"], curves["one GPU"], _WINDOW)
    mean_of_order, most_of_order = difference(curves["in parts"], curves["one GPU"], _WINDOW)
    assert len(curves["several GPUs"]) == 200
    assert mean <= 2 * mean_of_order + 1e-6 and most <= 2 * most_of_order + 1e-6


@pytest.mark.parametrize("count", [pytest.param(1, id="1"), *COUNTS])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_run_of_two_gpus_goes_on_with_another_number(count, tmp_path):
    """Its losses are as close to those of one GPU as those of two micro-batches on one GPU are."""
    first, whole = "train.steps=60", "train.steps=120"
    paths = {name: tmp_path / name for name in ("alone", "in parts", "changed")}
    alone, parts, changed = (f"run_dir={path}" for path in paths.values())
    succeed(
        {
            "alone": start("train.py", *SETTINGS, whole, "device=cuda:1", alone),
            "in parts": start("train.py", *SETTINGS, whole, "train.accumulate=2", parts),
            "two GPUs": start_together(*SETTINGS, first, changed),
        }
    )
    last = (*SETTINGS, whole, changed)
    again = start("train.py", *last) if count == 1 else start_together(*last, count=count)
    assert succeed({"again": again})["again"].count("resuming from") == 1
    curves = {name: read_losses(path / "metrics.csv") for name, path in paths.items()}
    print(f"\n{compare(curves, _WINDOW)}")
    assert [len(curve) for curve in curves.values()] == [120] * 3
    mean, most = difference(curves["changed"], curves["alone"], _WINDOW)
    mean_of_order, most_of_order = difference(curves["in parts"], curves["alone"], _WINDOW)
    assert mean <= 2 * mean_of_order + 1e-6 and most <= 2 * most_of_order + 1e-6


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_other_process_ends_when_one_is_killed(tmp_path):
    """Within a minute, without restarts, and saying which one is gone."""
    run_dir = tmp_path / "run"
    settings = (*SETTINGS, "train.steps=100000", "train.save_every=20", f"run_dir={run_dir}")
    agent = start_together(*settings)
    wait_for((run_dir / "checkpoints" / "step_00000020").exists, agent)
    killed = time.monotonic()
    os.kill(ranks(agent.pid)[1], signal.SIGKILL)
    _, err = finish(agent, 60)
    print(f"\nended {time.monotonic() - killed:.1f} s after the kill")
    assert agent.returncode != 0 and "SIGKILL" in err


@pytest.mark.parametrize("count", COUNTS)
def test_several_gpus_draw_the_images_of_one(count, tmp_path):
    """In batches of the same size they are the same to the bit."""
    run_dir = tmp_path / "run"
    succeed({"train": start("train.py", *SETTINGS, "train.steps=20", f"run_dir={run_dir}")})
    settings = (f"ckpt={run_dir}", f"n={8 * count}", "steps=5", "batch_size=8", "device=cuda")
    one, several = tmp_path / "one.npz", tmp_path / "several.npz"
    succeed(
        {
            "one GPU": start("sample.py", *settings, f"out={one}"),
            "several GPUs": start_together(
                *settings, f"out={several}", script="sample.py", count=count
            ),
        }
    )
    a, b = (np.load(path)["arr_0"] for path in (one, several))
    assert a.shape == (8 * count, 32, 32, 3) and np.array_equal(a, b)


@pytest.mark.parametrize("count", COUNTS)
def test_several_gpus_judge_as_one(count, tmp_path):
    """tools/evaluate.py: the loss of images that were held out, shared among processes."""
    run_dir = tmp_path / "run"
    held = ("dataset.held_out=100", "train.eval_every=0", "train.eval_images=100")
    succeed({"train": start("train.py", *SETTINGS, *held, "train.steps=20", f"run_dir={run_dir}")})
    copies = [shutil.copytree(run_dir, tmp_path / name) for name in ("one", "several")]
    settings = ("metrics=[loss]", "device=cuda")
    succeed(
        {
            "one GPU": start("tools/evaluate.py", *settings, f"ckpt={copies[0]}"),
            "several GPUs": start_together(
                *settings, f"ckpt={copies[1]}", script="tools/evaluate.py", count=count
            ),
        }
    )
    one, several = (rows(path / "evaluations.csv") for path in copies)
    assert len(one) == len(several) == 1
    assert float(several[0]["held_out"]) == pytest.approx(float(one[0]["held_out"]), rel=1e-3)
