"""A policy from rollouts to actions, as a user trains it, at the smallest size."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from diffusion.errors import ConfigError
from diffusion.plan.inference1d import InferenceUNet1d
from diffusion.policies.policy import load_policy

from .run import rows, run

TINY = (
    "dataset=trajectories",
    "model=unet1d_small",
    "diffusion=policy",
    "diffusion.prediction=sample",  # learns this task in a second
    "device=cpu",
    "dataset.horizon=8",
    "dataset.action_steps=4",
    "model.down_dims=[16,32]",
    "model.diffusion_step_embed_dim=16",
    "train.precision=fp32",
    "train.batch_size=16",
    "train.log_every=4",
    "train.sample_count=8",
    "train.sample_steps=5",
    "train.tensorboard=false",
    "optim.lr=1e-2",
    "optim.warmup=2",
    "optim.ema_decay=0.8",
)
STEPS = ("train.steps=60", "train.sample_every=20", "train.save_every=20")


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Actions that follow from the observations: the sine and cosine that are seen, times 3 and
    shifted by 1."""
    path = tmp_path_factory.mktemp("data") / "circle.npz"
    arrays = {}
    for i in range(4):
        angle = 0.3 * np.arange(40, dtype=np.float32) + i
        arrays[f"observation_{i}"] = np.stack([np.sin(angle), np.cos(angle)], axis=1)
        arrays[f"action_{i}"] = 3 * arrays[f"observation_{i}"] + 1
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="module")
def trained(rollouts, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "a"
    command = (*TINY, *STEPS, f"dataset.path={rollouts}", f"run_dir={run_dir}")
    code, out, err = run("train.py", *command)
    assert code == 0, err
    assert "step 60: action_mse " in out and "37 held out" in out
    return run_dir


@pytest.mark.long
def test_it_learns_and_says_how_well(trained):
    scores = rows(trained / "scores.csv")
    assert [row["step"] for row in scores] == ["20", "40", "60"]
    errors = [float(row["action_mse"]) for row in scores]
    assert errors[2] < 0.05  # of a variance of 0.5
    # both ranges are those of sine and cosine: the error in the units of the data is 3^2 as large
    assert float(scores[2]["action_mse_original"]) == pytest.approx(9 * errors[2], rel=0.02)
    assert Image.open(trained / "samples" / "step_00000060.png").size[0] > 100
    losses = [float(row["loss"]) for row in rows(trained / "metrics.csv")]
    assert losses[-1] < losses[0]


def test_a_policy_from_a_checkpoint_alone(trained):
    """It gives the actions of its data, in their units; by the seed and the row alone."""
    policy = load_policy(trained, device="cpu", steps=10)
    angle = torch.tensor([[0.0, 0.3], [2.0, 2.3]])
    seen = torch.stack([angle.sin(), angle.cos()], dim=2)  # [N, steps, 2]
    actions = policy.act(seen, seed=3)
    assert actions.shape == (2, 4, 2)
    following = angle[:, -1:] + 0.3 * torch.arange(4)
    expected = 3 * torch.stack([following.sin(), following.cos()], dim=2) + 1
    assert (actions - expected).square().mean() < 0.1 * expected.var()
    torch.testing.assert_close(policy.act(seen[1:], seed=3, first=1), actions[1:])
    assert not torch.allclose(policy.act(seen, seed=4), actions)
    assert torch.equal(policy.act(seen.numpy(), seed=3), actions)
    longest = policy.spec.horizon - policy.spec.observation_steps + 1
    assert policy.act(seen, seed=3, action_steps=longest).shape[1] == longest
    with pytest.raises(ValueError, match=f"action_steps={longest + 1}; expected 1 to {longest}"):
        policy.act(seen, seed=3, action_steps=longest + 1)
    with pytest.raises(ValueError, match=r"expected \[N, 2, 2\]"):
        policy.act(seen[:, :1], seed=0)


def test_triton_acts_as_pytorch_does(trained):
    """Through the network in real time, without a GPU in the interpreter."""
    theirs, ours = (
        load_policy(trained, device="auto", backend=backend, steps=2)
        for backend in ("torch", "triton")
    )
    assert isinstance(ours.denoiser, InferenceUNet1d)
    seen = torch.tensor([[[0.0, 1.0], [0.3, 0.95]]])
    torch.testing.assert_close(ours.act(seen, seed=3), theirs.act(seen, seed=3), atol=1e-3, rtol=0)


def test_resumed_equals_not_interrupted(trained, rollouts, tmp_path):
    run_dir = tmp_path / "b"
    command = (*TINY, f"dataset.path={rollouts}", f"run_dir={run_dir}", *STEPS[1:])
    for steps in (40, 60):
        code, _, err = run("train.py", *command, f"train.steps={steps}")
        assert code == 0, err
    for name in ("model", "ema", "optimizer"):
        a, b = (
            load_file(folder / "checkpoints" / "step_00000060" / f"{name}.safetensors")
            for folder in (trained, run_dir)
        )
        assert all(torch.equal(a[key], b[key]) for key in a), name
    assert rows(run_dir / "scores.csv") == rows(trained / "scores.csv")


def fails(script, *command):
    code, _, err = run(script, *command)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and len(lines) == 1, err
    return lines[0]


def test_resuming_with_other_ranges_is_refused(trained, rollouts):
    command = (*TINY, f"dataset.path={rollouts}", f"run_dir={trained}", "train.steps=80")
    assert "ranges of its" in fails("train.py", *command, "dataset.held_out=0.6")


def test_sample_says_that_it_draws_images(trained):
    assert "is a policy" in fails("sample.py", f"ckpt={trained}")


def test_load_policy_says_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_policy(tmp_path / "nowhere")


def test_damage_and_divergence_are_said(trained, tmp_path):
    run_dir = shutil.copytree(trained, tmp_path / "run")
    checkpoints = run_dir / "checkpoints"
    metrics = run_dir / "metrics.csv"
    last = rows(run_dir)[-1]["loss"]
    metrics.write_text(metrics.read_text().replace(f",{last},", ",nan,"))
    with pytest.warns(UserWarning, match="diverged: its loss is not finite at step 60"):
        load_policy(run_dir, device="cpu", steps=1)
    shutil.copy(checkpoints / "step_00000040" / "ema.safetensors", checkpoints / "step_00000060")
    metrics.unlink()
    with pytest.raises(ConfigError, match="60/ema.safetensors is damaged.* one is .*_00000040$"):
        load_policy(run_dir, device="cpu", steps=1)
    older = checkpoints / "step_00000040"
    state = json.loads((older / "state.json").read_text())
    (older / "SHA256SUMS").unlink()  # as versions before this one wrote it
    policies = {}, {"observations": 1}, state["policy"] | {"actions": {"low": "x"}}
    for i, policy in enumerate(policies):
        # each of its own, for the warning comes once for a checkpoint
        folder = shutil.copytree(older, tmp_path / str(i) / older.name)
        (folder / "state.json").write_text(json.dumps(state | {"format": 1, "policy": policy}))
        with pytest.raises(ConfigError, match="state.json is damaged: policy"):
            with pytest.warns(UserWarning, match="without digests"):
                load_policy(folder, device="cpu", steps=1)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("dataset.horizon=7",), "dataset.horizon=7 has to be a multiple of 2"),
        (("diffusion=learned",), "is for images"),
        (("train.fid_images=9",), "train.fid_images=9 is for images"),
        (("dataset.path=nowhere.npz",), "nowhere.npz"),
    ],
)
def test_wrong_setting(rollouts, tmp_path, overrides, expected):
    command = (*TINY, f"dataset.path={rollouts}", f"run_dir={tmp_path}/run", "train.steps=1")
    assert expected in fails("train.py", *command, *overrides)
    assert not (tmp_path / "run").exists()
