"""The forms in which rollouts are read, and what is said of others."""

import numpy as np
import pytest

from diffusion.data.rollout_file import read_rollouts
from diffusion.data.trajectories import load_trajectories
from diffusion.errors import ConfigError

LENGTHS = (4, 1, 7)
ENDS = np.cumsum(LENGTHS)
STEPS = sum(LENGTHS)
OBSERVATIONS = np.arange(STEPS * 3, dtype=np.float64).reshape(STEPS, 3)
ACTIONS = -np.arange(STEPS * 2).reshape(STEPS, 2)
JOINED = {"obs": OBSERVATIONS, "action": ACTIONS}
FLAGS = np.isin(np.arange(STEPS), ENDS - 1)
FRAMES = {"img": np.zeros((STEPS, 4, 4, 3), np.uint8)}

FORMS = {
    "replay buffer": JOINED | FRAMES | {"episode_ends": ENDS},
    "in folders": {"data/state": OBSERVATIONS, "data/action": ACTIONS, "meta/episode_ends": ENDS},
    "D4RL": {
        "observations": OBSERVATIONS,
        "actions": ACTIONS.astype(np.float16),
        "rewards": np.zeros(STEPS),
        "terminals": FLAGS & (np.arange(STEPS) < 4),
        "timeouts": (FLAGS & (np.arange(STEPS) >= 4)).astype(np.float32)[:, None],
    },
    "the last is cut off": JOINED | {"dones": FLAGS & (np.arange(STEPS) < 6)},
    "numbered": {
        f"{kind}_{i}": part
        for kind, whole in (("observation", OBSERVATIONS), ("action", ACTIONS))
        for i, part in enumerate(np.split(whole, ENDS[:-1]))
    },
}


@pytest.mark.parametrize("arrays", FORMS.values(), ids=FORMS)
def test_forms(tmp_path, arrays):
    np.savez(tmp_path / "a.npz", **arrays)
    episodes = read_rollouts(tmp_path / "a.npz")
    assert [(len(o), len(a)) for o, a in episodes] == [(n, n) for n in LENGTHS]
    for i, whole in enumerate((OBSERVATIONS, ACTIONS)):
        joined = np.concatenate([episode[i] for episode in episodes])
        assert joined.dtype == np.float32 and (joined == whole).all()


def test_episodes_of_one_length(tmp_path):
    o, a = OBSERVATIONS.reshape(3, 4, 3), ACTIONS.reshape(3, 4, 2)
    np.savez(tmp_path / "a.npz", observations=o, actions=a)
    episodes = read_rollouts(tmp_path / "a.npz")
    assert all((x == y).all() for x, y in zip(episodes[2], (o[2], a[2]), strict=True))
    assert len(episodes) == 3


def test_a_folder(tmp_path):
    """An episode a file is read in the order of the names; a single one has to be split by time."""
    for i in (1, 0):
        np.savez(tmp_path / f"{i}.npz", observation=OBSERVATIONS + i, action=ACTIONS > -9)
    (tmp_path / "readme.txt").write_text("not read")
    first, second = read_rollouts(tmp_path)
    assert (first[0] == OBSERVATIONS).all() and (second[0] == OBSERVATIONS + 1).all()
    assert set(np.unique(first[1])) == {0, 1}
    steps = {"horizon": 4, "action_steps": 2}
    assert load_trajectories(str(tmp_path), **steps).episodes == 2
    with pytest.raises(ConfigError, match="single episode .* episode_ends says where they end"):
        load_trajectories(str(tmp_path / "0.npz"), **steps)
    np.savez(tmp_path / "2.npz", observation=OBSERVATIONS[:, :2], action=ACTIONS)
    with pytest.raises(ConfigError, match="2.npz: observation has 2 dimensions; .* have 3"):
        read_rollouts(tmp_path)


BAD = {
    "no actions": ({"obs": OBSERVATIONS, "acts": ACTIONS}, "the arrays obs, acts; expected obs"),
    "lengths": ({"obs": OBSERVATIONS, "action": ACTIONS[1:]}, "obs has 12 steps, action 11"),
    "pictures": ({"obs": FRAMES["img"], "action": ACTIONS}, r"uint8 \(12, 4, 4, 3\); expected num"),
    "ends early": (JOINED | {"episode_ends": ENDS[:2]}, "is 4, 5; expected .* ascending up to 12"),
    "twice": (JOINED | {"episode_ends": np.array([4, 4, 12])}, "is 4, 4, 12; expected the step"),
    "no ends": (JOINED | {"episode_ends": ENDS[:0]}, "expected the step behind"),
    "odd ends": (JOINED | {"episode_ends": ENDS / 2}, "float64 .* expected whole numbers"),
    "short flags": (JOINED | {"dones": FLAGS[1:]}, "expected one number for each of 12 steps"),
}


@pytest.mark.parametrize(("arrays", "named"), BAD.values(), ids=BAD)
def test_what_is_none(tmp_path, arrays, named):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ConfigError, match=named):
        read_rollouts(tmp_path / "a.npz")
