"""The built-in task as a user meets it: train, roll out, look; at a size at which nothing is
learned."""

import re

import pytest
from PIL import Image

from .run import run

TRAIN = (
    "experiment=push_disc",
    "device=cpu",
    "dataset.episodes=12",
    "dataset.horizon=8",
    "dataset.action_steps=4",
    "model.down_dims=[16,32]",
    "model.diffusion_step_embed_dim=16",
    "train.precision=fp32",
    "train.batch_size=16",
    "train.steps=4",
    "train.log_every=2",
    "train.sample_every=4",
    "train.sample_count=4",
    "train.sample_steps=3",
    "train.tensorboard=false",
    "optim.warmup=2",
)
ROLL = ("n=3", "max_steps=10", "steps=3", "latency_calls=4", "device=cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "a"
    code, out, err = run("train.py", *TRAIN, f"run_dir={run_dir}")
    assert code == 0, err
    assert "push_disc, 12 episodes" in out and "step 4: action_mse " in out
    return run_dir


def test_rollout(trained, tmp_path):
    film = tmp_path / "a.gif"
    code, out, err = run("tools/rollout.py", f"ckpt={trained}", *ROLL, f"out={film}", fresh=True)
    assert code == 0, err
    assert re.search(r"backend torch, fp32, CPU, batch 1, 3 steps of ddpm: p50 \S+ ms, p99", out)
    assert re.search(r"push_disc: success rate \S+ % \(\d of 3 episodes\), .* 10.0 steps", out)
    assert Image.open(film).n_frames > 5
    again = run("tools/rollout.py", f"ckpt={trained}", *ROLL, "latency_calls=0")[1]
    assert again.splitlines() == [line for line in out.splitlines() if "success rate" in line]


@pytest.mark.gpu
def test_both_backends_are_timed_on_a_gpu(trained):
    code, out, err = run("tools/rollout.py", f"ckpt={trained}", *ROLL, "device=cuda")
    assert code == 0, err
    assert re.findall(r"policy, backend (\w+), fp32, .*, batch 1,", out) == ["triton", "torch"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("ckpt=nowhere",), "nowhere does not exist"),
        (("ckpt=epoch=0550-score=0.969.ckpt",), "ckpt=epoch=0550-score=0.969.ckpt does not exist"),
        (("action_steps=8",), "action_steps=8; a chunk of 8 actions has 7 from the last of 2"),
        (("env=",), "env= is wrong; expected text"),
        (("out=/dev/null/a.gif",), "/dev/null/a.gif cannot be written"),
    ],
    ids=["checkpoint", "its_name", "action_steps", "env", "out"],
)
def test_wrong_setting(trained, overrides, expected):
    code, _, err = run("tools/rollout.py", f"ckpt={trained}", *ROLL, *overrides)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and len(lines) == 1 and expected in lines[0], err
