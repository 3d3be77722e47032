"""Demonstrations of the built-in task, made at the start: no file, no download.

Demonstration i is a function of (seed, i) alone; see `push_disc.expert`.
"""

from ..errors import ConfigError
from ..push_disc.expert import demonstrations
from .action_chunks import ActionChunks
from .trajectories import check_options, cut_episodes


def push_disc(
    episodes: int = 2000,
    *,
    seed: int = 0,
    disturbance: float = 0.015,
    horizon: int = 16,
    observation_steps: int = 2,
    action_steps: int = 4,
    held_out: float = 0.1,
) -> ActionChunks:
    """`episodes` demonstrations, less those in which the expert failed, cut into chunks as
    `load_trajectories` does. `seed` chooses the demonstrations and which of them are held out.
    Raises ConfigError for impossible options."""
    if type(episodes) is not int or episodes < 1:
        raise ConfigError(f"dataset.episodes={episodes}; expected a whole number, at least 1")
    if not 0 <= disturbance <= 0.1:
        raise ConfigError(f"dataset.disturbance={disturbance}; expected a length from 0 to 0.1")
    check_options(horizon, observation_steps, action_steps, held_out, "episodes", seed)
    if episodes == 1 and held_out > 0:
        raise ConfigError(
            "dataset.episodes=1 of which one is held out; use 2, or dataset.held_out=0"
        )
    made = [made for made in demonstrations(episodes, seed, disturbance) if made is not None]
    if not made:
        raise ConfigError(
            f"dataset.disturbance={disturbance}: the expert reaches the goal in none of"
            f" {episodes} episodes; use a smaller one"
        )
    return cut_episodes(
        made,
        "push_disc",
        horizon=horizon,
        observation_steps=observation_steps,
        action_steps=action_steps,
        held_out=held_out,
        split="episodes",
        seed=seed,
    )
