"""A scripted expert: goes round the disc until it is behind it, then pushes it to the goal.

It sees the present state alone and one habit: the side by which it passes a disc that stands
between it and its place, in the cases where neither side is clearly shorter. So demonstrations
have two modes there, and a policy that predicted their mean would run into the disc.
"""

import numpy as np

from .task import (
    MAX_STEPS,
    REACH,
    SPEED,
    distance,
    generator,
    initial_state,
    norm,
    parts,
    step,
    succeeded,
)

_CLEARANCE = 0.025  # between pusher and disc on the way round
_PUSH = 0.02  # the disc, a step
_BEHIND = 0.85  # cosine of the angle about the disc from which on it pushes
_TORN = 0.5  # in front of the disc, by more than this cosine: by which side is a habit

Episode = tuple[np.ndarray, np.ndarray]  # observations [L, 6], actions [L, 2]


def expert_action(
    state: np.ndarray,  # [..., 6]
    side: np.ndarray,  # [...], 1: leaves the disc on its right, -1: on its left
) -> np.ndarray:  # [..., 2]
    """Where the expert sends the pusher."""
    pusher, disc, goal = parts(state)
    direction = _unit(goal - disc)
    ray = _unit(pusher - disc)  # from the disc to the pusher
    away = norm(pusher - disc)
    behind = -_dot(direction, ray)  # cosine of the angle between the pusher and its place

    place = disc - direction * (REACH + 1.2 * _CLEARANCE)
    free = _passes(pusher, place, disc) | (behind > _BEHIND)
    # along the tangent to a circle about the disc, or out of the circle
    shorter = np.sign(_cross(ray, -direction))
    turn = np.where(-behind > _TORN, side[..., None], shorter)
    radius = REACH + _CLEARANCE
    sine = np.minimum(radius / away, 1)
    around = turn * sine * _left(ray) - np.sqrt(1 - sine * sine) * ray
    around = around + ray * np.maximum(radius - away, 0) / _CLEARANCE
    walk = np.where(free, place, pusher + SPEED * _unit(around))

    push = disc - direction * (REACH - _PUSH)
    pushes = (behind > _BEHIND) & (away < REACH + 2 * _CLEARANCE)
    way = np.where(pushes, push, walk) - pusher
    return pusher + way * np.minimum(1, SPEED / np.maximum(norm(way), 1e-12))


def demonstrations(
    count: int, seed: int, disturbance: float = 0.0
) -> list[Episode | None]:  # None where the expert failed
    """What the expert does in demonstrations 0 .. count - 1 of this seed, each until the disc is at
    the goal.

    The pusher is sent off by up to `disturbance` in x and y from where the expert wants it; what is
    recorded is what it wanted, so that there are recoveries to learn from (as DART does, Laskey et
    al. 2017).
    """
    if count == 0:
        return []
    state = np.stack([initial_state(seed, i, demonstration=True) for i in range(count)])
    noise, side = np.empty((MAX_STEPS, count, 2)), np.empty(count)
    for i in range(count):
        start = generator(seed, i, demonstration=True).bit_generator
        random = np.random.Generator(start.jumped())  # far from the draws of the initial state
        side[i] = random.choice((-1, 1))
        noise[:, i] = random.uniform(-disturbance, disturbance, (MAX_STEPS, 2))
    observations, actions = np.empty((MAX_STEPS, count, 6)), np.empty((MAX_STEPS, count, 2))
    lengths = np.full(count, -1)
    for t in range(MAX_STEPS):
        observations[t], actions[t] = state, expert_action(state, side)
        state = step(state, actions[t] + noise[t])
        lengths[(lengths < 0) & succeeded(state)] = t + 1
        if (lengths >= 0).all():
            break
    return [
        (observations[:n, i].astype(np.float32), actions[:n, i].astype(np.float32))
        if n > 0
        else None
        for i, n in enumerate(lengths.tolist())
    ]


def _passes(start: np.ndarray, end: np.ndarray, disc: np.ndarray) -> np.ndarray:  # bool [..., 1]
    """Whether the straight way does not come near the disc."""
    way = end - start
    along = _dot(disc - start, way) / np.maximum(_dot(way, way), 1e-12)
    nearest = start + np.clip(along, 0, 1) * way
    return distance(nearest, disc)[..., None] > REACH + _CLEARANCE / 2


def _unit(v: np.ndarray) -> np.ndarray:
    return v / np.maximum(norm(v), 1e-12)


def _left(v: np.ndarray) -> np.ndarray:
    """A quarter turn against the clock."""
    return np.concatenate((-v[..., 1:], v[..., :1]), axis=-1)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # [..., 1]
    return a[..., :1] * b[..., :1] + a[..., 1:] * b[..., 1:]


def _cross(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # [..., 1]
    return a[..., :1] * b[..., 1:] - a[..., 1:] * b[..., :1]
