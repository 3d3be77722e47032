"""Rollouts from a plain dict: load the policy, act, say how well and how fast."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ..data.action_chunks import PolicySpec
from ..errors import ConfigError, check_writable, counted
from ..factory import SAMPLERS, check_sampler
from ..formats.checkpoint import Average
from ..policies.animation import save_gif
from ..policies.environments import (
    Environment,
    check_spaces,
    frames_a_second,
    make_environments,
    reason_of,
)
from ..policies.policy import Policy, load_policy
from ..policies.rollout import Episode, measure_latency, roll_out
from ..runtime.precompile import DRAWN, compile_ahead
from ..runtime.progress import Progress
from ..settings import construct


@dataclass(frozen=True)
class RolloutSettings:
    """The configuration; see configs/rollout.yaml."""

    ckpt: str
    env: str = "push_disc"
    n: int = 50
    seed: int = 0
    out: str | None = None
    shown: int = 9
    max_steps: int | None = None
    action_steps: int | None = None
    sampler: str | None = None
    steps: int | None = None
    ema: Average = True
    latency_calls: int = 100
    backend: str = "auto"
    device: str = "auto"
    precision: str | None = None

    def __post_init__(self) -> None:
        for key in ("n", "shown", "max_steps", "action_steps", "steps"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"{key}={value}; expected at least 1")
        if self.latency_calls < 0:
            raise ConfigError(f"latency_calls={self.latency_calls}; expected at least 0")
        if not 0 <= self.seed < 2**63 - self.n:
            raise ConfigError(f"seed={self.seed}; expected a whole number from 0 to 2^63 - 1 - n")
        if self.out is not None and (Path(self.out).suffix != ".gif" or Path(self.out).is_dir()):
            raise ConfigError(f"out={self.out}; expected a .gif")
        if self.sampler is not None:
            check_sampler(self.sampler)

    def load(self, backend: str) -> Policy:
        """The policy, by that backend. Raises ConfigError as `load_policy`."""
        return load_policy(
            self.ckpt,
            device=self.device,
            backend=backend,
            precision=self.precision,
            ema=self.ema,
            sampler=self.sampler,
            steps=self.steps,
        )


def rollout(config: dict) -> list[Episode]:
    """Act as configured, print what came of it, and return it."""
    settings = construct(RolloutSettings, config, "")
    policy = settings.load(settings.backend)
    _check_action_steps(settings.action_steps, policy.spec)
    pictured = 0 if settings.out is None else min(settings.shown, settings.n)
    environments = make_environments(settings.env, settings.n, pictured)
    try:
        check_spaces(settings.env, environments[0], policy.spec, settings.ckpt)
        observation = _first_observation(environments[0], settings)
        if pictured:
            _check_picture(environments[0], settings)
            check_writable(Path(settings.out))  # before the episodes, which may take long
        _compile_ahead(settings, policy)
        if settings.latency_calls:
            for timed in timed_policies(policy, settings):
                print(_latency(timed, observation, settings))
        with Progress(settings.n, unit="episode") as progress:

            def report(over: int, steps: int) -> None:
                progress.reach(over, said=f"step {steps}")

            episodes = roll_out(
                policy,
                environments,
                seed=settings.seed,
                action_steps=settings.action_steps,
                max_steps=settings.max_steps,
                pictured=pictured,
                progress=report,
            )
    finally:
        for environment in environments:
            environment.close()
    print(_outcome(settings.env, episodes))
    if pictured:
        out, filmed = Path(settings.out), episodes[:pictured]
        fps = frames_a_second(environments[0])
        save_gif([e.frames for e in filmed], [e.success for e in filmed], out, fps=fps)
        print(
            f"{out}: the first {counted(pictured, 'episodes')}, {out.stat().st_size / 1024:.0f} KiB"
        )
    return episodes


def timed_policies(policy: Policy, settings: RolloutSettings) -> Iterator[Policy]:
    """Whose latency is printed: the one that acts, and where nobody chose its backend the same by
    the other one."""
    yield policy
    if settings.backend == "auto" and policy.sampler.backend.name == "triton":
        yield settings.load("torch")


def rehearse_acting(settings: RolloutSettings) -> None:
    """Launch what a policy on Triton launches for these settings, for one observation and for all
    episodes; see `triton_kernels.runtime.launch_recorder`."""
    policy = settings.load("triton")
    for n in (1, settings.n):
        policy.rehearse(n)


def _compile_ahead(settings: RolloutSettings, policy: Policy) -> None:
    """So that the first action does not wait for a compiler."""
    backend, model = policy.sampler.backend, policy.model
    if backend.name != "triton":
        return
    kernels_of = {
        "model": {name: list(p.shape) for name, p in model.named_parameters()},
        "horizon": policy.spec.horizon,
        "precision": backend.precision,
        "episodes": settings.n,
    }
    device = next(model.parameters()).device
    compile_ahead("act", asdict(settings), kernels_of, device, DRAWN * model.num_parameters)


def _check_action_steps(action_steps: int | None, spec: PolicySpec) -> None:
    if action_steps is not None and action_steps > spec.most_action_steps:
        raise ConfigError(
            f"action_steps={action_steps}; a chunk of {spec.horizon} actions has"
            f" {spec.most_action_steps} from the last of {spec.observation_steps} observations on"
        )


def _first_observation(environment: Environment, settings: RolloutSettings) -> np.ndarray:
    try:
        return environment.reset(seed=settings.seed)[0]
    except Exception as error:  # a package that it needs is of another version: anything
        raise ConfigError(f"env={settings.env} cannot be reset: {reason_of(error)}") from error


def _check_picture(environment: Environment, settings: RolloutSettings) -> None:
    try:
        frame = environment.render()
    except Exception as error:  # what it draws with is missing, there is no display: anything
        raise ConfigError(
            f"env={settings.env} cannot draw itself ({reason_of(error)}); leave out={settings.out}"
            " away"
        ) from error
    if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3:
        raise ConfigError(f"env={settings.env} draws no pictures; leave out={settings.out} away")


def _latency(policy: Policy, observation: np.ndarray, settings: RolloutSettings) -> str:
    seen = np.stack([observation] * policy.spec.observation_steps)[None].astype(np.float32)
    took = 1e3 * measure_latency(policy, torch.from_numpy(seen), calls=settings.latency_calls)
    backend, device = policy.sampler.backend, next(policy.model.parameters()).device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    sampler = next(name for name, kind in SAMPLERS.items() if type(policy.sampler) is kind)
    p50, p99 = np.percentile(took, (50, 99))
    return (
        f"policy, backend {backend.name}, {backend.precision}, {where}, batch 1,"
        f" {counted(policy.sampler.num_steps, 'steps')} of {sampler}:"
        f" p50 {p50:.2f} ms, p99 {p99:.2f} ms over {counted(len(took), 'calls')}"
    )


def _outcome(name: str, episodes: list[Episode]) -> str:
    n = counted(len(episodes), "episodes")
    mean = f"mean return {np.mean([episode.total_reward for episode in episodes]):.3f}"
    steps = f"mean length {np.mean([episode.steps for episode in episodes]):.1f} steps"
    known = [episode.success for episode in episodes if episode.success is not None]
    if not known:
        return f"{name}: {n}, {mean}, {steps}; it does not say what a success is"
    share = 100 * sum(known) / len(episodes)
    return f"{name}: success rate {share:.1f} % ({sum(known)} of {n}), {mean}, {steps}"
