"""The task as an environment with gymnasium's interface, whether gymnasium is installed or not.

Where it is, `PushDisc` is a gymnasium.Env, and importing this module registers it:
gymnasium.make("diffusion.push_disc.env:PushDisc-v0").
"""

from typing import Any

import numpy as np

from . import task
from .picture import draw_state

try:
    import gymnasium
    from gymnasium.spaces import Box
except ImportError:
    gymnasium = None
    from .box import Box


class PushDisc(gymnasium.Env if gymnasium else object):
    """Push the disc to the goal.

    Observation: float32 [6], the centres of pusher, disc and goal, x and y of each, in [0, 1].
    Action: float32 [2], where the pusher shall go, in [0, 1]; a step takes it `task.SPEED` far.
    Reward: minus the distance from disc to goal. An episode terminates when that is at most
    `task.TOLERANCE` (info["is_success"]), and is truncated after `task.MAX_STEPS` steps.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode: str | None = None, size: int = 128) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode={render_mode!r}; expected None or 'rgb_array'")
        self.render_mode, self.size = render_mode, size
        self.observation_space = Box(0.0, 1.0, (6,), np.float32)
        self.action_space = Box(0.0, 1.0, (2,), np.float32)
        self._seed: int | None = None
        self._index = 0  # of the episode, of those of this seed
        self._state: np.ndarray | None = None
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start episode 0 of a seed or, without one, the next episode of the seed before; the
        first seed of all is then drawn by the operating system.

        options["state"]: six numbers to start from instead.
        """
        if gymnasium:
            super().reset(seed=seed)
        if seed is None and self._seed is None:
            seed = int(np.random.SeedSequence().entropy % 2**63)
        if seed is None:
            self._index += 1
        else:
            self._seed, self._index = seed, 0
        given = (options or {}).get("state")
        if given is None:
            self._state = task.initial_state(self._seed, self._index)
        else:
            self._state = np.array(given, dtype=np.float64).reshape(6)
        self._steps = 0
        return self._observation(), self._info()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, info after one step towards `action` [2]."""
        if self._state is None:
            raise RuntimeError("step before the first reset")
        target = np.asarray(action, dtype=np.float64)
        if target.shape != (2,) or not np.isfinite(target).all():
            raise ValueError(f"action={action}; expected two finite numbers")
        self._state = task.step(self._state, target.clip(0, 1))
        self._steps += 1
        info = self._info()
        truncated = self._steps >= task.MAX_STEPS
        return self._observation(), -info["distance"], info["is_success"], truncated, info

    def render(self) -> np.ndarray | None:
        """uint8 [size, size, 3] with render_mode="rgb_array", else None."""
        if self.render_mode is None:
            return None
        if self._state is None:
            raise RuntimeError("render before the first reset")
        return draw_state(self._state, self.size)

    def close(self) -> None:
        """There is nothing to close."""

    def _observation(self) -> np.ndarray:
        return self._state.astype(np.float32)

    def _info(self) -> dict[str, Any]:
        _, disc, goal = task.parts(self._state)
        return {
            "distance": float(task.distance(disc, goal)),
            "is_success": bool(task.succeeded(self._state)),
        }


if gymnasium and "PushDisc-v0" not in gymnasium.registry:
    gymnasium.register("PushDisc-v0", entry_point=f"{__name__}:PushDisc")
