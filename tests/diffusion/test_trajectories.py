"""Rollouts: how they are cut, padded, normalised, split, and refused when they are bad."""

import numpy as np
import pytest
import torch

from diffusion.data.action_chunks import Normaliser, PolicySpec
from diffusion.data.batches import Batches
from diffusion.data.trajectories import load_trajectories
from diffusion.errors import ConfigError


def write(path, lengths=(12, 9, 20), o=3, a=2, **more):
    """Episode i: at time t the observation s + (0, 0.1, 0.2) and the action -s - (0, 0.1), where
    s = 100 i + t."""
    arrays = {}
    for i, length in enumerate(lengths):
        time = 100 * i + np.arange(length, dtype=np.float32)[:, None]
        arrays[f"observation_{i}"] = time + np.arange(o, dtype=np.float32) / 10
        arrays[f"action_{i}"] = -(time + np.arange(a, dtype=np.float32) / 10)
    np.savez(path, **{**arrays, **more})
    return str(path)


@pytest.fixture
def rollouts(tmp_path):
    return write(tmp_path / "a.npz")


SHORT = {"horizon": 4, "observation_steps": 2, "action_steps": 2}


def restored(data, chunks):
    """Times of the actions [M, horizon] and of the observations [M, steps] of each chunk."""
    spec = data.spec
    actions = spec.actions.restore(chunks.actions[:, 0])
    conditions = chunks.conditions.view(-1, spec.observation_steps, spec.observation_dim)
    times = spec.observations.restore(conditions)[..., 0]
    return (-actions[..., 0]).round().int().tolist(), times.round().int().tolist()


def test_chunks_of_an_episode(tmp_path):
    """One starts at every time; the ends of the episode are repeated, as Diffusion Policy does."""
    data = load_trajectories(write(tmp_path / "a.npz", lengths=(6,)), **SHORT, held_out=0)
    actions, observations = restored(data, data.train)
    assert actions == [[0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 5]]
    assert observations == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert data.train.actions.shape == (5, 1, 4, 2) and data.train.actions.is_contiguous()
    assert data.train.conditions.shape == (5, 2 * 3)
    assert data.train.actions.dtype == data.train.conditions.dtype == torch.float32
    assert len(data.held_out) == 0 and data.held_out.actions.shape == (0, 1, 4, 2)


@pytest.mark.parametrize("length", [16, 17, 40])
@pytest.mark.parametrize(("observed", "acted"), [(1, 1), (2, 8), (3, 14), (1, 16)])
def test_number_of_chunks(tmp_path, length, observed, acted):
    """Those of diffusion_policy's create_indices with pad_before = observation_steps - 1 and
    pad_after = action_steps - 1."""
    path = write(tmp_path / "a.npz", lengths=(length,))
    data = load_trajectories(
        path, horizon=16, observation_steps=observed, action_steps=acted, held_out=0
    )
    assert len(data.train) == length - 16 + (acted - 1) + (observed - 1) + 1


def test_an_episode_shorter_than_a_chunk(tmp_path):
    data = load_trajectories(write(tmp_path / "a.npz", lengths=(3,)), **SHORT, held_out=0)
    assert restored(data, data.train)[0] == [[0, 0, 1, 2], [0, 1, 2, 2]]


def test_no_chunk_crosses_episodes(rollouts):
    data = load_trajectories(rollouts, **SHORT, held_out=0)
    for times in restored(data, data.train)[0]:
        assert len({time // 100 for time in times}) == 1


def test_ranges_are_those_of_the_training_episodes(rollouts):
    data = load_trajectories(rollouts, **SHORT, held_out=0.4)
    assert data.episodes == 3
    train = data.train.actions
    torch.testing.assert_close(train.amax((0, 1, 2)), torch.ones(2))
    torch.testing.assert_close(train.amin((0, 1, 2)), -torch.ones(2))
    kept, held = (
        {times[0] // 100 for times in restored(data, part)[0]}
        for part in (data.train, data.held_out)
    )
    assert len(kept) == 2 and len(held) == 1 and not kept & held


def test_held_out_episodes(rollouts):
    """At least one, never all; the seed chooses."""

    def held(share, seed=0):
        data = load_trajectories(rollouts, **SHORT, held_out=share, seed=seed)
        return frozenset(times[0] // 100 for times in restored(data, data.held_out)[0])

    assert [len(held(share)) for share in (0, 0.01, 0.6, 0.99)] == [0, 1, 2, 2]
    assert held(0.1) == held(0.1)
    assert len({held(0.1, seed) for seed in range(8)}) > 1


def test_tails_do_not_overlap(tmp_path):
    path = write(tmp_path / "a.npz", lengths=(40, 20))
    data = load_trajectories(path, **SHORT, held_out=0.25, split="tails")
    parts = [
        {t for times in restored(data, part)[0] for t in times}
        for part in (data.train, data.held_out)
    ]
    assert parts == [{*range(30), *range(100, 115)}, {*range(30, 40), *range(115, 120)}]


def test_constant_dimension(tmp_path):
    """It becomes 0, not a division by nothing, and comes back."""
    action = np.column_stack([np.full(9, 5.0), np.arange(9)]).astype(np.float32)
    path = write(tmp_path / "a.npz", lengths=(9,), action_0=action)
    data = load_trajectories(path, **SHORT, held_out=0)
    assert (data.train.actions[..., 0] == 0).all()
    assert (data.spec.actions.restore(data.train.actions)[..., 0] == 5).all()


def test_what_is_not_learned_from_is_said(tmp_path):
    action = np.linspace(0, [1, 5e-5], 9)
    path = write(tmp_path / "a.npz", lengths=(9, 2, 9), action_0=action, action_2=action)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **arrays | {"action_1": action[:2]})
    options = {"horizon": 8, "observation_steps": 2, "action_steps": 2, "held_out": 0}
    assert load_trajectories(path, **options).notes == (
        "too short for a chunk, with fewer than 6 steps: 1 episode",
        "of the actions dimension 1 varies by less than 0.0001 and is taken as constant; use"
        " smaller units if it is not",
    )


def test_normaliser_round_trip_and_state():
    rows = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32) * [1, 1e-3, 1e3, 1]
    normaliser = Normaliser.of(rows.astype(np.float32))
    x = torch.from_numpy(rows.astype(np.float32))
    assert normaliser.normalise(x).abs().max() <= 1 + 1e-6
    torch.testing.assert_close(normaliser.restore(normaliser.normalise(x)), x)
    spec = PolicySpec(16, 2, 8, normaliser, normaliser)
    back = PolicySpec.from_state(spec.state())
    assert torch.equal(back.actions.low, normaliser.low) and back.state() == spec.state()
    assert (back.action_dim, back.condition_dim) == (4, 8)


@pytest.mark.parametrize(("name", "o", "a"), [("hopper", 11, 3), ("walker2d", 17, 6)])
def test_real_rollouts(real_data, name, o, a):
    data = load_trajectories(str(real_data / "trajectories" / f"{name}.npz"))
    assert (data.spec.observation_dim, data.spec.action_dim) == (o, a)
    assert len(data.train) == len(data.held_out) == 1000 - 16 + 8 + 1
    assert data.train.actions.abs().max() <= 1 + 1e-6


OPTIONS = [
    ({"horizon": 0}, "horizon=0"),
    ({"horizon": 4.5}, "horizon=4.5"),
    ({"action_steps": 16}, "do not fit into dataset.horizon=16"),
    ({"held_out": 1}, "held_out=1"),
    ({"held_out": "a"}, "held_out=a"),
    ({"split": "tail"}, "choose one of episodes, tails"),
    ({"path": None}, "dataset.path is not set"),
    ({"path": "docs"}, "docs is a folder without an .npz; expected an .npz file of rollouts"),
    ({"seed": -1}, "dataset.seed=-1; expected a whole number, at least 0"),
    ({"horizon": 64}, "to train on is too short"),
    ({"horizon": 12, "split": "tails"}, "held out is too short"),
]


@pytest.mark.parametrize(("options", "named"), OPTIONS, ids=[str(o) for o, _ in OPTIONS])
def test_wrong_options(rollouts, options, named):
    with pytest.raises(ConfigError, match=named):
        load_trajectories(**{"path": rollouts, **options})


def test_a_single_episode_has_to_be_split_by_time(tmp_path):
    path = write(tmp_path / "a.npz", lengths=(50,))
    with pytest.raises(ConfigError, match="dataset.split=tails"):
        load_trajectories(path)
    assert len(load_trajectories(path, **SHORT, split="tails").held_out) > 0


X = np.zeros((9, 2), np.float32)
BAD = {
    "no action": ({"observation_0": X}, "action_i for i in none"),
    "other names": ({"obs": X, "act": X}, "holds the arrays obs, act; expected observation_i and"),
    "a gap": (
        {"observation_0": X, "observation_1": X, "action_0": X, "action_2": X},
        "for i in 0, 1 and action_i for i in 0, 2",
    ),
    "lengths": ({"observation_0": X, "action_0": X[:5]}, "has 9 steps, action_0 5"),
    "dimensions": (
        {f"{kind}_{i}": X[:, : 1 + i] for kind in ("observation", "action") for i in (0, 1)},
        "observation_1 has 2 dimensions; earlier episodes have 1",
    ),
    "flat": ({"observation_0": X, "action_0": X[:, 0]}, r"expected numbers \[steps, dims\]"),
    "empty": ({"observation_0": X, "action_0": X[:0]}, "expected numbers"),
    "text": ({"observation_0": X, "action_0": np.array([["a"]])}, "expected numbers"),
    "nan": ({"observation_0": X, "action_0": X * np.nan}, "not finite"),
    "overflow": ({"observation_0": X, "action_0": X.astype(float) + 1e300}, "not finite"),
    "pickled": ({"observation_0": X, "action_0": np.array([[None]])}, "cannot be read"),
}


@pytest.mark.parametrize(("arrays", "named"), BAD.values(), ids=BAD.keys())
def test_bad_contents(tmp_path, arrays, named):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ConfigError, match=named):
        load_trajectories(str(tmp_path / "a.npz"))


def test_numbers_of_episodes_may_begin_with_zeros(tmp_path):
    arrays = {f"{kind}_{i:03}": X + i for kind in ("observation", "action") for i in (0, 7, 10)}
    np.savez(tmp_path / "a.npz", **arrays)
    data = load_trajectories(str(tmp_path / "a.npz"), **SHORT, held_out=0)
    assert data.episodes == 3
    assert data.spec.actions.high.tolist() == [10, 10]


def test_bad_files(tmp_path, rollouts):
    whole = (tmp_path / "a.npz").read_bytes()
    np.save(tmp_path / "single.npy", X)
    compressed = tmp_path / "compressed.npz"
    np.savez_compressed(compressed, observation_0=np.random.rand(99, 2), action_0=X)
    damaged = bytearray(compressed.read_bytes())
    damaged[200:260] = bytes(60)
    for name, content in (
        ("text.npz", b"not an archive"),
        ("empty.npz", b""),
        ("half.npz", whole[: len(whole) // 2]),
        ("damaged.npz", bytes(damaged)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read") as error:
            load_trajectories(str(tmp_path / name))
        assert "\n" not in str(error.value) and "pickle" not in str(error.value)
    with pytest.raises(ConfigError, match="single array"):
        load_trajectories(str(tmp_path / "single.npy"))
    with pytest.raises(ConfigError, match="does not exist; expected an .npz file of rollouts"):
        load_trajectories(str(tmp_path / "nowhere.npz"))


@pytest.mark.parametrize("resident_bytes", [0, 2**30], ids=["on the host", "on the device"])
def test_batches_of_chunks(rollouts, resident_bytes):
    """Every action comes with its own condition, and every chunk once an epoch."""
    chunks = load_trajectories(rollouts, **SHORT, held_out=0).train
    batches = Batches(chunks, 5, 0, torch.device("cpu"), resident_bytes=resident_bytes)
    seen = []
    for step in range(len(chunks) // 5):
        batches.load(step)
        images, index, labels = batches.part(0, 5)
        images = images if index is None else images[index]
        for action, condition in zip(images, labels, strict=True):
            place = (chunks.actions == action).all(dim=(1, 2, 3)).nonzero().item()
            assert torch.equal(chunks.conditions[place], condition)
            seen.append(place)
    assert len(seen) == len(set(seen)) == len(chunks) // 5 * 5
