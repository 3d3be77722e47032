"""Timesteps drawn by their losses: what is trained stays the same on average, and a run that is
resumed or cut into micro-batches draws the same."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from diffusion.errors import ConfigError
from diffusion.formats.digests import SUMS, read_sums, sums_text
from diffusion.process.objective import Objective
from diffusion.process.schedule import make_schedule
from diffusion.process.timesteps import LossAwareTimesteps
from diffusion.runs.training import train
from diffusion.runtime.backend import TORCH_FP32

from ..end_to_end.run import TINY
from ..test_configs import composed

TOTAL, BATCH = 6, 48
LOSSES = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0, 8.0])  # of each timestep


def learned(batch_size=BATCH, steps=12, first=()):
    """After steps in which every timestep has had its loss."""
    timesteps = LossAwareTimesteps(TOTAL, batch_size, TORCH_FP32)
    for step in range(steps):
        rng = torch.tensor([7, step])
        for start in range(0, batch_size, 16):
            t, _ = timesteps.draw(rng, 16, start)
            timesteps.note(LOSSES[t], start)
        timesteps.finish(rng)
    return timesteps


def test_large_losses_are_drawn_more_often_and_count_less():
    timesteps = learned()
    t, importance = timesteps.draw(torch.tensor([1, 0]), 20_000, 0)
    share = np.bincount(t, minlength=TOTAL) / len(t)
    expected = 0.999 * LOSSES / LOSSES.sum() + 0.001 / TOTAL
    assert (np.abs(share - expected.numpy()) < 0.02).all()
    torch.testing.assert_close(timesteps.importance, 1 / (TOTAL * expected), rtol=1e-5, atol=0)
    assert torch.equal(importance, timesteps.importance[t])
    # the mean is that of evenly drawn timesteps, of which even the single ones differ little
    weighed = LOSSES[t] * importance
    assert weighed.mean().item() == pytest.approx(LOSSES.mean().item(), rel=0.01)
    assert weighed.std() < 0.1 * LOSSES.std()


def test_until_every_timestep_has_ten_losses_they_are_drawn_evenly():
    timesteps = LossAwareTimesteps(TOTAL, 1, TORCH_FP32)
    for k in range(10 * TOTAL - 1):
        timesteps.counts[k % TOTAL] += 1
    timesteps.history[:] = LOSSES
    timesteps.load({name: x.clone() for name, x in timesteps.state().items()})
    assert (timesteps.importance == 1).all()
    timesteps.counts[-1] += 1
    timesteps.load({name: x.clone() for name, x in timesteps.state().items()})
    assert timesteps.importance[0] > 4


def test_the_objective_weighs_what_it_draws():
    """And notes the losses as they are."""
    timesteps = learned(batch_size=BATCH)
    objective = Objective(make_schedule("linear", 50).respace(TOTAL), TORCH_FP32)
    even = objective.loss(lambda x, *_: x, images := torch.rand(BATCH, 2, 3, 1), RNG)
    aware = Objective(objective.schedule, TORCH_FP32, timesteps=timesteps)
    loss, parts = aware.loss(lambda x, *_: x, images, RNG)
    t, importance = timesteps.draw(RNG, BATCH, 0)
    torch.testing.assert_close(loss, parts["mse"] * importance)
    assert torch.equal(timesteps.losses, parts["mse"])
    assert not torch.equal(even[0], loss)
    given, _ = aware.loss(lambda x, *_: x, images, RNG, t=t)  # nothing is drawn, nothing weighs
    assert torch.equal(given, parts["mse"])


RNG = torch.tensor([3, 7])
SETTINGS = (
    *TINY,
    *("diffusion=cosine", "diffusion.num_timesteps=3", "diffusion.prediction=v_prediction"),
    *("diffusion.timestep_sampler=loss_second_moment", "optim.decay=none"),
    *("train.batch_size=12", "train.sample_every=0", "train.save_every=4"),
)


def run(folder, steps, *more):
    train(composed(*SETTINGS, f"train.steps={steps}", *more), folder)
    return folder / "checkpoints" / f"step_{steps:08d}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run in which losses have said what is drawn from the fifth step on, at the latest."""
    last = run(tmp_path_factory.mktemp("whole"), 8)
    assert load_file(last / "timesteps.safetensors")["counts"].min() > 10
    return last


def tensors(checkpoint):
    return {
        (path.name, name): x
        for path in sorted(checkpoint.glob("*.safetensors"))
        for name, x in load_file(path).items()
    }


def test_a_resumed_run_draws_the_same_to_the_bit(whole, tmp_path):
    run(tmp_path, 4)
    resumed = tensors(run(tmp_path, 8))
    expected = tensors(whole)
    assert resumed.keys() == expected.keys() and ("timesteps.safetensors", "counts") in expected
    assert all(torch.equal(resumed[key], expected[key]) for key in expected)


def test_micro_batches_draw_the_same(whole, tmp_path):
    parts, expected = tensors(run(tmp_path, 8, "train.accumulate=3")), tensors(whole)
    key = ("timesteps.safetensors", "counts")
    assert torch.equal(parts[key], expected[key])
    for name in ("history",):
        key = ("timesteps.safetensors", name)
        torch.testing.assert_close(parts[key], expected[key], rtol=1e-3, atol=1e-3)


def test_a_checkpoint_without_them_is_damaged(tmp_path):
    checkpoint = run(tmp_path, 4)
    file = checkpoint / "timesteps.safetensors"
    sums = {name: digest for name, digest in read_sums(checkpoint).items() if name != file.name}
    (checkpoint / SUMS).write_text(sums_text(sums))
    file.unlink()
    with pytest.raises(ConfigError, match="timesteps.safetensors does not exist"):
        run(tmp_path, 8)


def test_the_state_of_another_number_of_timesteps():
    with pytest.raises(ValueError, match=r"history is \[10, 2\]; expected \[10, 6\]"):
        learned(steps=0).load(LossAwareTimesteps(2, 1, TORCH_FP32).state())
    with pytest.raises(ValueError, match=r"counts is missing; expected \[6\]"):
        learned(steps=0).load({"history": torch.zeros(10, TOTAL)})
