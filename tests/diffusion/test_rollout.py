"""The closed loop, with policies that are simple functions, and what is said of wrong settings."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.data.action_chunks import Normaliser, PolicySpec
from diffusion.errors import ConfigError
from diffusion.policies.animation import save_gif
from diffusion.policies.environments import check_spaces, frames_a_second, make_environments
from diffusion.policies.rollout import measure_latency, roll_out
from diffusion.push_disc.box import Box
from diffusion.push_disc.env import PushDisc
from diffusion.push_disc.expert import expert_action
from diffusion.runs import rollout as rollout_run
from diffusion.runs.rollout import RolloutSettings, rollout, timed_policies


def spec(horizon=8, observation_steps=2, action_steps=4, o=6, a=2):
    limits = [Normaliser(torch.zeros(d), torch.ones(d)) for d in (o, a)]
    return PolicySpec(horizon, observation_steps, action_steps, *limits)


class Scripted:
    """Acts by a function of the newest observations [N, O]; keeps what it was shown."""

    def __init__(self, function, **shape):
        self.spec, self.function = spec(**shape), function
        self.model = torch.nn.Linear(1, 1)
        self.shown, self.seeds = [], []

    def act(self, observations, *, seed, first=0, action_steps=None):
        self.shown.append(observations)
        self.seeds.append(seed)
        actions = np.float32(self.function(observations[:, -1].double().numpy()))
        count = self.spec.action_steps if action_steps is None else action_steps
        return torch.from_numpy(actions)[:, None].expand(-1, count, -1)


class Counter:
    """Observes how many steps it has made, ends after `length`; success at step `good`."""

    def __init__(self, length, good=None):
        self.length, self.good, self.count = length, good, 0
        self.observation_space, self.action_space = Box(0, 99, (1,)), Box(-1, 1, (1,))
        self.actions = []

    def reset(self, *, seed=None):
        self.count, self.seed = 0, seed
        return np.zeros(1), {}

    def step(self, action):
        self.count += 1
        self.actions.append(float(action[0]))
        info = {} if self.good is None else {"is_success": self.count == self.good}
        return np.array([self.count]), 2.0, self.count == self.length, False, info

    def render(self):
        return np.full((8, 8, 3), self.count, np.uint8)


def test_receding_horizon():
    """What is shown at each call: the last two observations, the first one repeated."""
    policy = Scripted(lambda o: 5 * np.ones_like(o), o=1, a=1)
    worlds = [Counter(9), Counter(3)]
    long, short = roll_out(policy, worlds, seed=7, pictured=1)
    assert [shown[0, :, 0].tolist() for shown in policy.shown] == [[0, 0], [3, 4], [7, 8]]
    assert (long.steps, short.steps) == (9, 3) and worlds[1].count == 3
    assert long.total_reward == 18 and long.success is None
    assert set(worlds[0].actions) == {1.0}  # clipped to the space
    assert [world.seed for world in worlds] == [7, 8]
    assert [int(frame[0, 0, 0]) for frame in long.frames] == list(range(10)) and not short.frames
    assert len(set(policy.seeds)) == 3 and all(0 <= seed < 2**63 for seed in policy.seeds)


def test_other_action_steps_and_limits():
    policy = Scripted(lambda o: o, o=1, a=1)
    (episode,) = roll_out(policy, [Counter(99)], seed=0, action_steps=6, max_steps=8)
    assert episode.steps == 8
    assert [shown[0, -1, 0].item() for shown in policy.shown] == [0, 6]


def test_actions_are_of_the_kind_of_the_space():
    policy = Scripted(lambda o: o + 0.6, o=1, a=1)
    for dtype, expected in ((np.int64, [1, 1, 1, 1, 5]), (np.float64, [0.6] * 4 + [4.6])):
        world = Counter(5)
        world.action_space = Box(0, 5, (1,), dtype)
        done = []
        world.step = lambda a, step=world.step, done=done: done.append(a) or step(a)
        roll_out(policy, [world], seed=0)
        assert {action.dtype for action in done} == {np.dtype(dtype)}
        np.testing.assert_allclose(np.concatenate(done), expected, rtol=1e-6)


def test_observations_that_are_no_numbers():
    """Where an episode goes on; the last one of all may be anything."""

    class Lost(Counter):
        def step(self, action):
            observation, *rest = super().step(action)
            return observation * (np.nan if self.count >= 4 else 1), *rest

    policy = Scripted(lambda o: o, o=1, a=1)
    with pytest.raises(ConfigError, match=r"after 4 steps of episode 1 .* observes \[nan\]"):
        roll_out(policy, [Counter(9), Lost(9)], seed=0)
    assert [e.steps for e in roll_out(policy, [Counter(9), Lost(4)], seed=0)] == [9, 4]


def test_an_environment_that_writes_into_what_it_gave():
    class Same(Counter):
        def reset(self, *, seed=None):
            self.state, self.picture = np.zeros(1), np.zeros((8, 8, 3), np.uint8)
            return self.state, super().reset(seed=seed)[1]

        def step(self, action):
            self.state[:], *rest = super().step(action)
            return self.state, *rest

        def render(self):
            self.picture[:] = self.count
            return self.picture

    policy = Scripted(lambda o: o, o=1, a=1)
    (episode,) = roll_out(policy, [Same(5)], seed=0, pictured=1)
    assert [shown[0, :, 0].tolist() for shown in policy.shown] == [[0, 0], [3, 4]]
    assert [int(frame[0, 0, 0]) for frame in episode.frames] == list(range(6))


def test_actions_that_are_no_numbers():
    policy = Scripted(lambda o: o * np.nan, o=1, a=1)
    with pytest.raises(ConfigError, match="draws actions that are no finite numbers"):
        roll_out(policy, [Counter(9)], seed=0)


def test_progress():
    told = []
    worlds = [Counter(9), Counter(3)]
    roll_out(Scripted(lambda o: o, o=1, a=1), worlds, seed=0, progress=lambda *a: told.append(a))
    assert told == [(1, 4), (1, 8), (2, 9)]


def test_success_is_remembered():
    policy = Scripted(lambda o: o, o=1, a=1)
    episodes = roll_out(policy, [Counter(9, good=4), Counter(9, good=20)], seed=0)
    assert [episode.success for episode in episodes] == [True, False]


def test_the_expert_in_the_loop():
    """Observing at each step it is the expert; and a policy that stays where it is fails."""
    expert = Scripted(lambda o: expert_action(o, np.ones(len(o))), action_steps=1)
    worlds = make_environments("push_disc", 20)
    assert sum(e.success for e in roll_out(expert, worlds, seed=0)) > 0.95 * 20
    idle = roll_out(Scripted(lambda o: o[:, :2]), worlds[:3], seed=0, max_steps=10)
    assert [e.success for e in idle] == [False] * 3


def test_latency():
    policy = Scripted(lambda o: o[:, :2])
    took = measure_latency(policy, torch.zeros(1, 2, 6), calls=7)
    assert took.shape == (7,) and (took > 0).all()
    assert len(policy.shown) == 7 + 3
    assert len(measure_latency(policy, torch.zeros(1, 2, 6), calls=7, seconds=1e-9)) == 1


@pytest.mark.parametrize(
    ("chosen", "found", "expected"),
    [("auto", "triton", ["torch"]), ("auto", "torch", []), ("triton", "triton", [])],
)
def test_who_is_timed(chosen, found, expected, monkeypatch):
    """On a GPU both backends, unless one was chosen."""
    monkeypatch.setattr(RolloutSettings, "load", lambda settings, backend: backend)
    policy = SimpleNamespace(sampler=SimpleNamespace(backend=SimpleNamespace(name=found)))
    settings = RolloutSettings(ckpt="a", backend=chosen)
    assert list(timed_policies(policy, settings)) == [policy, *expected]


# --- film -------------------------------------------------------------------------------------


def test_film(tmp_path):
    worlds = make_environments("push_disc", 3, pictured=3)
    expert = Scripted(lambda o: expert_action(o, np.ones(len(o))), action_steps=1)
    episodes = roll_out(expert, worlds, seed=0, pictured=3)
    out = tmp_path / "deep" / "a.gif"
    save_gif([e.frames for e in episodes], [True, False, None], out)
    film = Image.open(out)
    longest = max(len(e.frames) for e in episodes)
    assert film.size == (2 * 136, 2 * 136) and film.n_frames >= longest // 2
    assert out.stat().st_size < 300_000
    film.seek(film.n_frames - 1)
    last = np.asarray(film.convert("RGB")).astype(int)
    good, bad = last[2, 68], last[2, 136 + 68]
    assert good.argmax() == 1 and bad.argmax() == 0  # green and red borders
    assert [path.name for path in out.parent.iterdir()] == ["a.gif"]


@pytest.mark.parametrize(
    ("fps", "frames", "duration"), [(10, 60, 100), (20, 31, 100), (125, 6, 100), (4, 60, 250)]
)
def test_a_film_plays_at_its_own_speed(tmp_path, fps, frames, duration):
    """No two frames are the same, which would be joined: a dot moves."""
    film = [np.zeros((8, 8, 3), np.uint8) for _ in range(60)]
    for i, frame in enumerate(film):
        frame[i // 8, i % 8] = 255
    environment = SimpleNamespace(metadata={"render_fps": fps})
    save_gif([film], [None], tmp_path / "a.gif", side=8, fps=frames_a_second(environment))
    film = Image.open(tmp_path / "a.gif")
    assert (film.n_frames, film.info["duration"]) == (frames, duration)


def test_a_film_of_other_pictures(tmp_path):
    """They are shrunk; not every environment draws squares."""
    frames = [np.full((300, 600, 3), value, np.uint8) for value in (0, 90, 180)]
    save_gif([frames], [None], tmp_path / "a.gif", side=64)
    assert Image.open(tmp_path / "a.gif").size == (64 + 8, 32 + 8)


# --- errors -----------------------------------------------------------------------------------


def test_without_gymnasium(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match="pip install gymnasium") as caught:
        make_environments("gym_pusht/PushT-v0", 1)
    assert "push_disc" in str(caught.value) and "\n" not in str(caught.value)


class FakeError(Exception):
    pass


@pytest.fixture
def fake_gymnasium(monkeypatch):
    """As much of gymnasium as is used, so that what is said does not hang on its being there."""

    def make(name, **options):
        if name not in gymnasium.registry:
            raise FakeError(f"Environment `{name}`\ndoesn't exist.")
        return gymnasium.registry[name](**options)

    gymnasium = SimpleNamespace(
        registry={"Push-v0": PushDisc, "json/Push-v0": PushDisc, "Plain-v0": lambda: Counter(3)},
        make=make,
        error=SimpleNamespace(Error=FakeError),
    )
    monkeypatch.setitem(sys.modules, "gymnasium", gymnasium)
    return gymnasium


def test_an_environment_of_gymnasium(fake_gymnasium):
    made = make_environments("Push-v0", 3, pictured=2)
    assert [e.render_mode for e in made] == ["rgb_array", "rgb_array", None]
    assert len(make_environments("json/Push-v0", 1)) == 1


def test_an_environment_that_knows_no_render_mode(fake_gymnasium):
    assert len(make_environments("Plain-v0", 2)) == 2
    with pytest.raises(ConfigError, match="env=Plain-v0 cannot be made: .*render_mode"):
        make_environments("Plain-v0", 2, pictured=1)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("Nothing-v0", "env=Nothing-v0 cannot be made: Environment `Nothing-v0` doesn't exist."),
        ("nowhere_at_all/Push-v1", "No module named 'nowhere_at_all'"),
        ("json/Nothing-v0", "env=json/Nothing-v0 cannot be made"),
    ],
)
def test_an_environment_that_is_missing(fake_gymnasium, name, named):
    with pytest.raises(ConfigError, match=named) as caught:
        make_environments(name, 1)
    assert "\n" not in str(caught.value)


def test_spaces_that_do_not_match():
    check_spaces("push_disc", PushDisc(), spec(), "runs/a")
    with pytest.raises(ConfigError) as caught:
        check_spaces("push_disc", PushDisc(), spec(o=11, a=3), "runs/a")
    assert str(caught.value) == (
        "env=push_disc observes 6 numbers and acts in 2 numbers; the policy in runs/a observes"
        " 11 numbers and acts in 3"
    )
    other = SimpleNamespace(observation_space=Box(0, 1, (96, 96, 3)), action_space=object())
    with pytest.raises(ConfigError, match=r"observes an array \[96, 96, 3\] and acts in object;"):
        check_spaces("other", other, spec(), "runs/a")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n": 0}, "n=0; expected at least 1"),
        ({"steps": 0}, "steps=0"),
        ({"latency_calls": -1}, "latency_calls=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"out": "a.mp4"}, "out=a.mp4; expected a .gif"),
        ({"sampler": "rk4"}, "sampler=rk4 is unknown"),
        ({"nn": 3}, "nn is unknown; did you mean n?"),
        ({"n": "many"}, "n=many is wrong; expected a whole number"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_settings(settings, named):
    with pytest.raises(ConfigError, match=named.replace("?", r"\?")):
        rollout({"ckpt": "nowhere", **settings})


@pytest.mark.parametrize(
    ("drawn", "named"),
    [
        (None, "draws no pictures; leave out=a.gif away"),
        (np.zeros((4, 4)), "draws no pictures"),
        (ImportError("pygame is\nmissing"), r"cannot draw itself \(pygame is missing\); leave out"),
    ],
    ids=["nothing", "no picture", "an error"],
)
def test_an_environment_that_cannot_be_filmed(drawn, named):
    def render():
        if isinstance(drawn, Exception):
            raise drawn
        return drawn

    environment = SimpleNamespace(render=render)
    with pytest.raises(ConfigError, match=named):
        rollout_run._check_picture(environment, RolloutSettings("a", env="b", out="a.gif"))


def test_an_environment_that_cannot_be_reset():
    def reset(seed):
        raise AttributeError("no attribute\n'add_collision_handler'")

    with pytest.raises(ConfigError, match="^env=b cannot be reset: no attribute 'add_coll"):
        rollout_run._first_observation(SimpleNamespace(reset=reset), RolloutSettings("a", env="b"))


def test_every_setting_is_in_the_configuration():
    from omegaconf import OmegaConf

    from triton_diffusion.entry import CONFIGS

    listed = OmegaConf.load(CONFIGS / "rollout.yaml")
    fields = RolloutSettings.__dataclass_fields__
    assert set(listed) - {"defaults", "hydra"} == set(fields)
    for name, field in fields.items():
        assert name == "ckpt" or listed[name] == field.default, name
