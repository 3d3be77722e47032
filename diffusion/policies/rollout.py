r"""The closed loop: a policy acts in environments and sees what comes of it.

Receding horizon (Chi et al. 2023, https://arxiv.org/abs/2303.04137): the policy is shown the last
`observation_steps` observations, draws a chunk of actions, acts out the first `action_steps` from
now on, and is shown again what there is to see.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .environments import Environment, into_space
from .policy import Policy

_WARM_UP = 3  # calls before latency is measured: they compile, and record a graph
_SUCCESS = ("is_success", "success")  # what environments call it in `info`


@dataclass
class Episode:
    """What became of one environment."""

    steps: int = 0
    total_reward: float = 0.0
    success: bool | None = None  # None: the environment does not say
    over: bool = False
    frames: list[np.ndarray] = field(default_factory=list)  # uint8 [H, W, 3], if it is pictured


def roll_out(
    policy: Policy,
    environments: list[Environment],
    *,
    seed: int,
    action_steps: int | None = None,  # None: as many as the policy was trained for
    max_steps: int | None = None,  # None: until the environment ends the episode
    pictured: int = 0,
    progress: Callable[[int, int], None] | None = None,  # (episodes over, steps made)
) -> list[Episode]:
    """One episode in each environment, all at once: a call of the policy serves all of them.

    Environment i starts from reset(seed=seed + i), and what is drawn for it depends on the seed, i
    and the time alone. An episode is a success if `info` has ever said so. The first `pictured`
    are rendered after each step. Raises ConfigError if an environment observes what is no finite
    number, or the policy draws such actions.
    """
    spec = policy.spec
    action_steps = spec.action_steps if action_steps is None else action_steps
    space = environments[0].action_space
    episodes = [Episode() for _ in environments]
    seen = []  # of each environment: its last observations, the first one repeated at the start
    for i, environment in enumerate(environments):
        observation, _ = environment.reset(seed=seed + i)
        first = _kept(observation)
        seen.append(deque([first] * spec.observation_steps, spec.observation_steps))
        if i < pictured:
            episodes[i].frames.append(np.array(environment.render()))
    call = 0
    while not all(episode.over for episode in episodes):
        observations = torch.from_numpy(np.array(seen))  # [N, steps, O]
        _check_finite(observations, episodes)
        # all of them are shown, the finished too: so the noise of each is its own
        actions = policy.act(observations, seed=_call_seed(seed, call), action_steps=action_steps)
        going_on = [not episode.over for episode in episodes]
        if not actions[going_on].isfinite().all():
            raise ConfigError("the policy draws actions that are no finite numbers")
        chunks = into_space(actions.cpu().numpy(), space)  # [N, action_steps, A]
        for i, (environment, episode) in enumerate(zip(environments, episodes, strict=True)):
            for action in chunks[i]:
                if episode.over:
                    break
                seen[i].append(_kept(_act(environment, action, episode, max_steps)))
                if i < pictured:
                    episode.frames.append(np.array(environment.render()))
        call += 1
        if progress is not None:
            over = sum(episode.over for episode in episodes)
            progress(over, max(episode.steps for episode in episodes))
    return episodes


def _kept(observation: np.ndarray) -> np.ndarray:  # float32 [O]
    """A copy: an environment may write the next one into the same array."""
    return np.array(observation, dtype=np.float32)


def _check_finite(
    observations: Tensor,  # [N, steps, O]
    episodes: list[Episode],
) -> None:
    for i in (~observations.isfinite().all(dim=(1, 2))).nonzero().flatten().tolist():
        if not episodes[i].over:  # what was seen last is of no use, and may be anything
            raise ConfigError(
                f"after {episodes[i].steps} steps of episode {i} the environment observes"
                f" {observations[i, -1].tolist()}; expected finite numbers"
            )


def _act(
    environment: Environment, action: np.ndarray, episode: Episode, max_steps: int | None
) -> np.ndarray:
    """One step, entered in the episode; the observation after it."""
    observation, reward, terminated, truncated, info = environment.step(action)
    episode.steps += 1
    episode.total_reward += float(reward)
    for key in _SUCCESS:
        if key in info:
            episode.success = bool(episode.success) or bool(info[key])
    episode.over = bool(terminated or truncated or episode.steps == max_steps)
    return observation


def _call_seed(seed: int, call: int) -> int:
    """The noise of each call is its own; spread over all seeds, so that those of neighbouring runs
    do not meet (the golden ratio, in 64 bits)."""
    return (seed + 0x9E3779B97F4A7C15 * (call + 1)) % 2**63


def measure_latency(
    policy: Policy,
    observations: Tensor,  # [1, observation_steps, O], on the host
    *,
    calls: int = 100,
    seconds: float = 10.0,
) -> np.ndarray:  # float64 [at most `calls`], seconds
    """How long a robot waits for its actions: from an observation on the host to the actions on the
    host, at batch 1, the device idle before. Stops after `calls`, or in the first call that ends
    after so many seconds."""
    device = next(policy.model.parameters()).device

    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for call in range(_WARM_UP):
        policy.act(observations, seed=call).cpu()
    took: list[float] = []
    while len(took) < calls and sum(took) < seconds:
        synchronise()
        began = time.perf_counter()
        policy.act(observations, seed=_WARM_UP + len(took)).cpu()
        synchronise()
        took.append(time.perf_counter() - began)
    return np.array(took)
