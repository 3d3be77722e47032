"""The physics of the task, for many worlds at once: a round pusher, a disc, a goal, four walls.

The world is the unit square, y upwards. A step moves the pusher straight towards a target, by at
most `SPEED`, in `SUBSTEPS` parts. The world is quasi-static: nothing has a speed of its own, and
contact is without friction. So where the pusher would overlap the disc, the disc gives way along
the line of their centres, by the overlap; where a wall stops the disc, the pusher gives way; and
where that does not help either, nothing moves in this part of the step.

Such contact is unstable: a disc that is not pushed exactly through its centre slips off to the
side, so that a policy has to watch and correct.

Only sums, products, quotients and square roots are taken, which IEEE 754 rounds in one way: a world
is the same to the bit alone and among others. A state is float64 [6]: pusher, disc and goal, x and
y of each.
"""

import numpy as np

PUSHER_RADIUS = 0.04
DISC_RADIUS = 0.08
REACH = PUSHER_RADIUS + DISC_RADIUS  # distance of the centres in contact
TOLERANCE = 0.03  # of the disc's centre to the goal's: success
SPEED = 0.03  # of the pusher, a step
SUBSTEPS = 5
MAX_STEPS = 150  # of an episode

_INNER = (0.25, 0.75)  # where discs and goals are put: a pusher fits between them and the wall
_OUTER = (0.08, 0.92)  # where pushers are put
_APART = 0.2  # disc and goal, at the start
_FREE = REACH + 0.02  # pusher and disc, at the start
_DEMONSTRATIONS = 2**63  # added to the index of one: it starts where no episode does
_ROUNDING = 1e-12


def initial_state(seed: int, index: int, demonstration: bool = False) -> np.ndarray:  # [6]
    """How episode `index` of this seed, or the demonstration of this index, starts; a function of
    its arguments alone (numpy's Philox, keyed by them)."""
    random = generator(seed, index, demonstration)
    while True:
        pusher, disc, goal = (random.uniform(*range_, 2) for range_ in (_OUTER, _INNER, _INNER))
        if distance(disc, goal) > _APART and distance(pusher, disc) > _FREE:
            return np.concatenate((pusher, disc, goal))


def generator(seed: int, index: int, demonstration: bool = False) -> np.random.Generator:
    """The random numbers of an episode or demonstration."""
    index += _DEMONSTRATIONS if demonstration else 0
    key = np.array((seed % 2**64, index % 2**64), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def step(
    state: np.ndarray,  # [..., 6]
    target: np.ndarray,  # [..., 2], where the pusher shall go
) -> np.ndarray:  # [..., 6]
    """The state one step later."""
    pusher, disc, goal = parts(state)
    way = target - pusher
    length = np.maximum(norm(way), _ROUNDING)
    way = way * (np.minimum(length, SPEED) / length) / SUBSTEPS
    for _ in range(SUBSTEPS):
        pusher, disc = _move(pusher, disc, way)
    return np.concatenate((pusher, disc, goal), axis=-1)


def _move(
    pusher: np.ndarray, disc: np.ndarray, way: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # pusher and disc afterwards
    moved = np.clip(pusher + way, PUSHER_RADIUS, 1 - PUSHER_RADIUS)
    pushed = np.clip(disc + _overlap(moved, disc), DISC_RADIUS, 1 - DISC_RADIUS)
    stopped = moved - _overlap(moved, pushed)
    stopped = np.clip(stopped, PUSHER_RADIUS, 1 - PUSHER_RADIUS)
    stuck = norm(pushed - stopped) < REACH - _ROUNDING
    return np.where(stuck, pusher, stopped), np.where(stuck, disc, pushed)


def _overlap(pusher: np.ndarray, disc: np.ndarray) -> np.ndarray:  # [..., 2]
    """By which vector the disc has to give way; exactly 0 where they do not touch."""
    apart = disc - pusher
    length = np.maximum(norm(apart), _ROUNDING)
    return apart / length * np.maximum(REACH - length, 0)


def succeeded(state: np.ndarray) -> np.ndarray:  # [..., 6] -> bool [...]
    """Whether the disc is at the goal."""
    _, disc, goal = parts(state)
    return distance(disc, goal) <= TOLERANCE


def parts(state: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pusher, disc and goal, [..., 2] each."""
    return state[..., :2], state[..., 2:4], state[..., 4:]


def norm(v: np.ndarray) -> np.ndarray:  # [..., 2] -> [..., 1]
    """Euclidean length."""
    return np.sqrt(v[..., :1] * v[..., :1] + v[..., 1:] * v[..., 1:])


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # [..., 2] each -> [...]
    """From a to b."""
    return norm(a - b)[..., 0]
