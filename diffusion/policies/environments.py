"""Environments by name, and whether a policy can act in them."""

import importlib
from typing import Any, Protocol

import numpy as np

from ..data.action_chunks import PolicySpec
from ..errors import ConfigError
from ..push_disc.env import PushDisc

BUILT_IN = {"push_disc": PushDisc}


class Environment(Protocol):
    """What is used of gymnasium's interface."""

    observation_space: Any
    action_space: Any

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]: ...

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]: ...

    def render(self) -> np.ndarray | None: ...

    def close(self) -> None: ...


def make_environments(name: str, count: int, pictured: int = 0) -> list[Environment]:
    """`count` environments of a name: a built-in one, or an id that gymnasium knows; the first
    `pictured` of them render themselves as arrays of pixels.

    An id may begin with the module that registers it (MODULE:ID); for NAMESPACE/ID the module of
    the namespace's name is tried. Raises ConfigError if gymnasium or the environment is missing,
    or if it cannot be made.
    """
    modes = ["rgb_array"] * pictured + [None] * (count - pictured)
    if name in BUILT_IN:
        return [BUILT_IN[name](render_mode=mode) for mode in modes]
    try:
        import gymnasium
    except ImportError:
        raise ConfigError(
            f"env={name} is not built in ({', '.join(BUILT_IN)}), and gymnasium is not installed;"
            " pip install gymnasium"
        ) from None
    namespace = name.split("/")[0] if "/" in name and ":" not in name else ""
    if namespace.isidentifier() and name not in gymnasium.registry:
        try:
            importlib.import_module(namespace)
        except Exception as error:  # it is missing, or so is what it needs: anything
            raise ConfigError(
                f"env={name}: its package cannot be imported ({reason_of(error)}); install it, or"
                f" name the module that registers it: env=MODULE:{name}"
            ) from error
    try:
        # not every environment can be told how to draw itself: what is not drawn is not told
        return [gymnasium.make(name, **({"render_mode": mode} if mode else {})) for mode in modes]
    except Exception as error:  # of gymnasium, or whatever the environment's own code raises
        raise ConfigError(f"env={name} cannot be made: {reason_of(error)}") from error


def check_spaces(name: str, environment: Environment, spec: PolicySpec, policy: str) -> None:
    """Raise ConfigError unless what is observed and done there is what the policy knows."""
    sees, does = environment.observation_space, environment.action_space
    expected = (spec.observation_dim,), (spec.action_dim,)
    if tuple(_shape(space) for space in (sees, does)) != expected:
        raise ConfigError(
            f"env={name} observes {_shown(sees)} and acts in {_shown(does)}; the policy in {policy}"
            f" observes {spec.observation_dim} numbers and acts in {spec.action_dim}"
        )


def into_space(actions: np.ndarray, space: Any) -> np.ndarray:  # [..., A]
    """The nearest actions that a space of numbers between limits contains, in its dtype."""
    actions = np.clip(actions, space.low, space.high)
    whole = np.issubdtype(space.dtype, np.integer)
    return (np.rint(actions) if whole else actions).astype(space.dtype)


def frames_a_second(environment: Environment) -> float:
    """At which its pictures play as fast as what they show; 20 where it does not say."""
    told = getattr(environment, "metadata", {}).get("render_fps")
    return float(told) if isinstance(told, int | float) and told > 0 else 20.0


def reason_of(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _shape(space: Any) -> tuple[int, ...] | None:
    """Of an array of numbers between limits; None for any other space."""
    return tuple(space.shape) if hasattr(space, "low") and hasattr(space, "high") else None


def _shown(space: Any) -> str:
    shape = _shape(space)
    if shape is None:
        return type(space).__name__
    return f"{shape[0]} numbers" if len(shape) == 1 else f"an array {list(shape)}"
