"""The built-in task: its physics, its expert, its demonstrations, its interface."""

import numpy as np
import pytest
import torch

from diffusion.data.push_disc import push_disc
from diffusion.errors import ConfigError
from diffusion.push_disc import task
from diffusion.push_disc.box import Box
from diffusion.push_disc.env import PushDisc
from diffusion.push_disc.expert import demonstrations, expert_action
from diffusion.push_disc.picture import draw_state


def starts(count, seed=0):
    return np.stack([task.initial_state(seed, i) for i in range(count)])


def stray(states, steps, seed=0):
    """The states on the way, [steps + 1, N, 6]: the pushers are sent anywhere, half of the time
    through the disc, often into walls and corners."""
    random, seen = np.random.default_rng(seed), [states]
    for t in range(steps):
        if t % 12 == 0:
            target = random.uniform(-0.1, 1.1, (len(states), 2))
        at_disc = (np.arange(len(states)) + t // 12) % 2 == 0
        disc = seen[-1][:, 2:4]
        through = disc + 0.3 * (disc - seen[-1][:, :2])
        seen.append(task.step(seen[-1], np.where(at_disc[:, None], through, target)))
    return np.stack(seen)


# --- physics ----------------------------------------------------------------------------------


def test_nothing_overlaps_and_nothing_leaves():
    seen = stray(starts(64), 300)
    pusher, disc, goal = task.parts(seen)
    assert task.distance(pusher, disc).min() >= task.REACH - 1e-9
    for centres, radius in ((pusher, task.PUSHER_RADIUS), (disc, task.DISC_RADIUS)):
        assert centres.min() >= radius and centres.max() <= 1 - radius
    assert (goal == goal[0]).all()
    assert (disc.max() == 1 - task.DISC_RADIUS) and (disc.min() == task.DISC_RADIUS)  # at walls


def test_the_disc_moves_only_when_touched():
    seen = stray(starts(64), 100)
    pusher, disc, _ = task.parts(seen)
    moved = (disc[1:] != disc[:-1]).any(axis=-1)
    within = task.distance(pusher[:-1], disc[:-1]) <= task.REACH + task.SPEED
    assert moved.any() and (~moved).any() and within[moved].all()
    touching = task.distance(pusher[1:], disc[1:]) <= task.REACH + task.SPEED / task.SUBSTEPS
    assert touching[moved].all()


def test_a_push_through_the_centre_goes_straight():
    state = np.array([0.3, 0.5, 0.5, 0.5, 0.9, 0.9])
    for _ in range(10):
        state = task.step(state, np.array([0.9, 0.5]))
    np.testing.assert_allclose(state[:4], [0.6, 0.5, 0.72, 0.5], atol=1e-12)


def test_a_push_beside_the_centre_slips_off():
    state = np.array([0.3, 0.51, 0.5, 0.5, 0.9, 0.9])
    for _ in range(12):
        state = task.step(state, np.array([0.9, 0.51]))
    assert state[3] < 0.47  # the pusher was above the centre, the disc goes down


def test_speed_and_arrival():
    state = task.initial_state(0, 0)
    pusher, disc, _ = task.parts(state)
    away = pusher + (pusher - disc)
    there = task.parts(task.step(state, away))[0]
    assert task.distance(pusher, there) == pytest.approx(task.SPEED)
    near = pusher + 0.2 * task.SPEED * (away - pusher) / task.norm(away - pusher)
    np.testing.assert_allclose(task.parts(task.step(state, near))[0], near, atol=1e-12)
    np.testing.assert_array_equal(task.step(state, pusher), state)


def test_a_disc_in_a_corner_stops_the_pusher():
    corner = 1 - task.DISC_RADIUS
    state = np.array([0.6, 0.6, corner, corner, 0.5, 0.5])
    for _ in range(30):
        state = task.step(state, np.array([1.0, 1.0]))
    assert (state[2:4] == corner).all()
    assert task.distance(state[:2], state[2:4]) == pytest.approx(task.REACH, abs=1e-9)


def test_alone_or_among_others_to_the_bit():
    seen = stray(starts(7), 60, seed=3)
    targets = np.random.default_rng(0).uniform(0, 1, (7, 2))
    together = task.step(seen[-1], targets)
    alone = [task.step(state, target) for state, target in zip(seen[-1], targets, strict=True)]
    np.testing.assert_array_equal(together, alone)


def test_starts():
    states = starts(200)
    pusher, disc, goal = task.parts(states)
    assert (task.distance(pusher, disc) > task.REACH).all()
    assert not task.succeeded(states).any()
    assert len(np.unique(states, axis=0)) == 200
    np.testing.assert_array_equal(states[5], task.initial_state(0, 5))
    assert (task.initial_state(0, 5, demonstration=True) != states[5]).any()
    assert (task.initial_state(1, 5) != states[5]).any()


# --- expert -----------------------------------------------------------------------------------


@pytest.mark.parametrize("disturbance", [0.0, 0.015])
def test_the_expert_succeeds(disturbance):
    made = demonstrations(400, 7, disturbance)
    assert sum(episode is not None for episode in made) > 0.95 * 400
    lengths = [len(actions) for _, actions in made]
    assert 20 < np.mean(lengths) < 60


def test_the_expert_has_two_ways():
    """In front of the disc its habit decides: the same state, left or right of it."""
    front = np.array([0.7, 0.5, 0.5, 0.5, 0.8, 0.5])  # pusher, disc and goal in a row
    left, right = (expert_action(front, np.array(side)) for side in (1.0, -1.0))
    assert abs(left[1] - 0.5) > 0.01 and left[1] - 0.5 == pytest.approx(0.5 - right[1])
    beside = np.array([0.45, 0.7, 0.5, 0.5, 0.8, 0.5])  # there one way is shorter
    np.testing.assert_array_equal(
        expert_action(beside, np.array(1.0)), expert_action(beside, np.array(-1.0))
    )


def test_the_mean_of_the_two_ways_is_none():
    """Why the task wants a policy of more than one mode: where the ways ever differ, their mean
    fails, though either succeeds."""
    side = np.ones(200)
    rates = {}
    for name, other in (("one way", side), ("mean", -side)):
        state, torn, done = starts(200), np.zeros(200, bool), np.zeros(200, bool)
        for _ in range(task.MAX_STEPS):
            ways = expert_action(state, side), expert_action(state, other)
            torn |= ~done & (np.abs(ways[0] - expert_action(state, -side)).max(axis=-1) > 1e-9)
            moved = task.step(state, (ways[0] + ways[1]) / 2)
            state = np.where(done[:, None], state, moved)
            done |= task.succeeded(state)
        assert 0.3 < torn.mean() < 0.8
        rates[name] = done[torn].mean()
    assert rates["one way"] > 0.95 and rates["mean"] < 0.05


def test_demonstrations_depend_on_seed_and_index_alone():
    many, few, other = (demonstrations(n, seed, 0.01) for n, seed in ((20, 4), (3, 4), (3, 5)))
    for a, b in zip(many[:3], few, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.dtype == np.float32
            np.testing.assert_array_equal(x, y)
    assert (many[0][0][0] != other[0][0][0]).any()
    assert demonstrations(0, 0) == []


# --- data set ---------------------------------------------------------------------------------


def test_data_set():
    data, again = push_disc(20, seed=1), push_disc(20, seed=1)
    assert torch.equal(data.train.actions, again.train.actions)
    assert torch.equal(data.held_out.conditions, again.held_out.conditions)
    assert (data.spec.observation_dim, data.spec.action_dim, data.episodes) == (6, 2, 20)
    assert data.train.actions.abs().max() <= 1 + 1e-6
    assert not torch.equal(push_disc(20, seed=2).train.actions[:9], data.train.actions[:9])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"episodes": 0}, "episodes=0"),
        ({"disturbance": -0.1}, "disturbance=-0.1"),
        ({"horizon": 0}, "horizon=0"),
        ({"episodes": 1}, "use 2, or dataset.held_out=0"),
    ],
    ids=str,
)
def test_wrong_options(options, named):
    with pytest.raises(ConfigError, match=named):
        push_disc(**{"episodes": 4, **options})


def test_options_are_checked_before_a_demonstration_is_made(monkeypatch):
    monkeypatch.setattr("diffusion.data.push_disc.demonstrations", lambda *_: pytest.fail("made"))
    with pytest.raises(ConfigError, match="dataset.seed=-1"):
        push_disc(episodes=4, seed=-1)


# --- environment ------------------------------------------------------------------------------


def test_episode():
    """The expert, through the interface: float32 observations, one success at the end."""
    environment = PushDisc()
    observation, info = environment.reset(seed=3)
    assert observation.dtype == np.float32 and observation.shape == (6,)
    assert not info["is_success"]
    done = False
    while not done:
        action = expert_action(observation.astype(np.float64), np.array(1.0))
        observation, reward, terminated, truncated, info = environment.step(action)
        assert reward == -info["distance"]
        assert terminated == info["is_success"] == (info["distance"] <= task.TOLERANCE)
        done = terminated or truncated
    assert terminated and not truncated


def test_an_episode_is_truncated():
    environment = PushDisc()
    environment.reset(seed=0)
    ends = [environment.step(environment._state[:2])[2:4] for _ in range(task.MAX_STEPS)]
    assert ends == [(False, False)] * (task.MAX_STEPS - 1) + [(False, True)]


def test_resets():
    a, b = PushDisc(), PushDisc()
    first, second = a.reset(seed=5)[0], a.reset()[0]
    np.testing.assert_array_equal(b.reset(seed=5)[0], first)
    np.testing.assert_array_equal(b.reset()[0], second)
    assert (first != second).any()
    assert (PushDisc().reset()[0] != PushDisc().reset()[0]).any()
    given = [0.1, 0.1, 0.5, 0.5, 0.7, 0.7]
    np.testing.assert_array_equal(a.reset(options={"state": given})[0], np.float32(given))


def test_misuse():
    with pytest.raises(ValueError, match="render_mode='human'"):
        PushDisc(render_mode="human")
    environment = PushDisc()
    with pytest.raises(RuntimeError, match="before the first reset"):
        environment.step([0.5, 0.5])
    with pytest.raises(RuntimeError, match="before the first reset"):
        PushDisc(render_mode="rgb_array").render()
    environment.reset(seed=0)
    for action in ([0.5], [np.nan, 0.5]):
        with pytest.raises(ValueError, match="two finite numbers"):
            environment.step(action)


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_spaces_without_gymnasium(dtype):
    """A loop that acts at random, as gymnasium's users begin."""
    a, b = Box(-2, 3, (2, 3), dtype), Box(-2, 3, (2, 3), dtype)
    a.seed(1), b.seed(1)
    points = np.stack([a.sample() for _ in range(200)])
    assert points.dtype == dtype and all(point in a for point in points)
    assert points.min() < -1.5 and points.max() > 2.5 and (points[0] == b.sample()).all()
    assert a.low.shape == (2, 3) and a.contains(a.low) and a.contains(a.high)
    for wrong in (a.high + 1, points[0, 0], points[0].astype(np.float64) + 0.1):
        assert wrong not in a


def test_random_actions():
    environment = PushDisc()
    assert environment.reset(seed=0)[0] in environment.observation_space
    for _ in range(5):
        observation, *_ = environment.step(environment.action_space.sample())
        assert observation in environment.observation_space


def test_picture():
    environment = PushDisc(render_mode="rgb_array", size=64)
    environment.reset(options={"state": [0.25, 0.75, 0.5, 0.5, 0.75, 0.25]})
    frame = environment.render()
    assert frame.shape == (64, 64, 3) and frame.dtype == np.uint8
    np.testing.assert_array_equal(frame, draw_state(environment._state, 64))
    colour = {name: frame[y, x].tolist() for name, y, x in (("pusher", 16, 16), ("goal", 50, 50))}
    assert colour["pusher"][0] > 200 > colour["pusher"][1]  # upwards is up: y = 0.75 is row 16
    assert colour["goal"][1] == max(colour["goal"])
    assert PushDisc().render() is None


def test_gymnasium_finds_nothing_wrong():
    gymnasium = pytest.importorskip("gymnasium")
    from gymnasium.utils.env_checker import check_env

    made = gymnasium.make("diffusion.push_disc.env:PushDisc-v0", render_mode="rgb_array")
    assert isinstance(made.unwrapped, PushDisc)
    check_env(made.unwrapped)
