"""tools/average.py: profiles are what averages are, and what is made of several is the one that
training would have kept."""

import numpy as np
import pytest
import torch

from diffusion.errors import ConfigError
from diffusion.formats.checkpoint import read_weights, verify_checkpoint
from diffusion.formats.checkpoint_folder import latest_checkpoint
from diffusion.runs.sampling import sample
from diffusion.runs.training import train
from diffusion.training.averaging import average, combine, ema_profile, power_profile
from diffusion.training.optimizer import OptimizerSettings

from ..end_to_end.run import TINY
from ..test_configs import composed


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_the_profile_is_the_average(decay, warmup):
    optim = OptimizerSettings(ema_warmup=warmup)
    theta = np.random.default_rng(0).normal(size=41)  # the initial one first
    ema = theta[0]
    for step in range(40):
        rate = optim.ema_decay_at(step, decay)
        ema = rate * ema + (1 - rate) * theta[step + 1]
    profile = ema_profile(optim, decay, 40)
    assert profile.sum() == pytest.approx(1) and profile @ theta == pytest.approx(ema)
    assert ema_profile(optim, decay, 0).tolist() == [1]


@pytest.mark.parametrize("sigma_rel", [0.05, 0.1, 0.25])
def test_the_width_of_a_power_function(sigma_rel):
    steps = 10_000
    profile, t = power_profile(sigma_rel, steps), np.arange(steps + 1) / steps
    mean = profile @ t
    assert profile.sum() == pytest.approx(1) and profile[0] == 0
    assert (profile @ (t - mean) ** 2) ** 0.5 == pytest.approx(sigma_rel, rel=1e-3)


def test_a_length_between_two_from_snapshots():
    """Power functions of 0.05 and 0.1 at eight times, as EDM2 keeps them, make the one of 0.07 to a
    few per cent, also where steps are taken together."""
    for steps in (4_000, 60_000):
        snapshots = [
            power_profile(sigma_rel, steps * (i + 1) // 8)
            for i in range(8)
            for sigma_rel in (0.05, 0.1)
        ]
        weights, off = combine(snapshots, power_profile(0.07, steps))
        assert weights.sum() == pytest.approx(1) and off < 0.03
        assert combine(snapshots, snapshots[-1])[1] < 1e-6


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with three averages in each of its six checkpoints, and the same that kept another."""
    folder = tmp_path_factory.mktemp("runs")
    settings = ("train.steps=6", "train.save_every=1", "train.keep=9", "optim.lr=1e-2")
    settings += ("optim.ema_decay=0.98", "optim.ema_warmup=false")  # warm-up makes them alike
    for name, averages in (("a", "[0.9,0.5]"), ("b", "[0.9,0.5,0.7]")):
        more = f"optim.more_ema={averages}"
        train(composed(*TINY, *settings, more), folder / name)
    return folder


@pytest.mark.long
def test_it_is_what_training_would_have_kept(runs, capsys):
    path = average({"ckpt": str(runs / "a"), "decay": 0.7})
    last = latest_checkpoint(runs / "b" / "checkpoints")
    assert path.name == "ema_0.7.safetensors" and "sample with ema=0.7" in capsys.readouterr().out
    kept, trained = read_weights(last, 0.7), read_weights(last, False)
    made = read_weights(path.parent, 0.7)
    assert made.keys() == kept.keys()
    far = max((trained[name] - kept[name]).abs().max() for name in kept)
    near = max((made[name] - kept[name]).abs().max() for name in kept)
    assert near < 1e-4 * far
    settings = {"ckpt": str(runs / "a"), "n": 1, "steps": 1, "device": "cpu", "ema": 0.7}
    assert sample(settings).exists()
    with pytest.raises(ConfigError, match="is there already"):
        average({"ckpt": str(runs / "a"), "decay": 0.7})


def test_of_an_earlier_checkpoint(runs):
    """Nothing that came later has a part in it."""
    folder = runs / "b" / "checkpoints" / "step_00000003"
    made = read_weights(average({"ckpt": str(folder), "sigma_rel": 0.2}).parent, "sigma_rel_0.2")
    trained = [read_weights(folder.with_name(f"step_{step:08d}"), False) for step in (1, 2, 3)]
    name = next(iter(made))
    parts = zip(power_profile(0.2, 3)[1:], trained, strict=True)
    expected = sum(weight * theta[name] for weight, theta in parts)
    torch.testing.assert_close(made[name], expected, rtol=1e-4, atol=1e-6)


def test_a_decay_and_a_width_have_names_of_their_own(runs):
    """0.5 is a decay that the run kept; and 0.25 may be both."""
    for options in ({"decay": 0.25}, {"sigma_rel": 0.25}):
        average({"ckpt": str(runs / "a" / "checkpoints" / "step_00000005")} | options)
    folder = runs / "a" / "checkpoints" / "step_00000005"
    decay, width = read_weights(folder, 0.25), read_weights(folder, "sigma_rel_0.25")
    assert any((decay[name] != width[name]).any() for name in decay)
    verify_checkpoint(folder)  # with digests of what was added
    settings = {"ckpt": str(folder), "n": 1, "steps": 1, "device": "cpu", "ema": "sigma_rel_0.25"}
    assert "_emasigma_rel_0.25_" in sample(settings).name
    for wrong in ("maybe", "sigma_rel_../../x", "sigma_rel_0.1/x"):
        with pytest.raises(ConfigError, match="expected true, false, a decay"):
            sample(settings | {"ema": wrong})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give either decay"),
        ({"decay": 0.9, "sigma_rel": 0.1}, "give either decay"),
        ({"decay": 1.0}, "decay=1.0; expected a number in"),
        ({"sigma_rel": 0.3}, r"expected one in \(0, 0.2887\)"),
        ({"ckpt": "nowhere", "decay": 0.9}, "nowhere does not exist"),
    ],
    ids=str,
)
def test_wrong_settings(runs, options, words):
    with pytest.raises(ConfigError, match=words):
        average({"ckpt": str(runs / "a")} | options)


def test_too_few_averages(tmp_path):
    train(
        composed(*TINY, "train.steps=6", "optim.ema_decay=0.98", "optim.ema_warmup=false"), tmp_path
    )
    with pytest.raises(ConfigError, match="come no nearer than .* keep more checkpoints"):
        average({"ckpt": str(tmp_path), "decay": 0.2})
