"""Elephants drawn by this project: a data set of any size that needs no download and no licence.

Every picture is a pure function of (seed, index): the same elephant appears at every resolution, on
every platform, whichever other pictures are drawn. The numbers come from numpy's Philox generator
(counter based, keyed by the pair); the shapes are polygons filled at several times the wanted
resolution and averaged down.

Coordinates are those of the elephant, which looks to the left: x runs from the trunk (-0.8) to the
tail (+0.6), y from the ground (0) to the back (about 1). One similarity transform takes them to the
picture. The label is what the trunk does.
"""

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageDraw

from ..errors import ConfigError
from ..runtime.host import processors
from ..runtime.progress import Progress
from .image_set import ImageSet, check_memory, parse_size

TRUNKS = ("trunk_down", "trunk_curled", "trunk_raised")

_PART = 64  # pictures that a process draws at a time
_LOOK = 0.5  # seconds between two looks of a process for the one that it draws for
_DRAWS = 32  # uniforms used by one picture, at most
_TURN = np.linspace(0, 2 * np.pi, 24, endpoint=False)
_CIRCLE = np.stack((np.cos(_TURN), np.sin(_TURN)), axis=1)

# what colours a picture is made of: float [.., 3] in 0..255
_SKIES = (  # top and horizon
    ((108, 172, 232), (205, 230, 246)),  # day
    ((130, 190, 235), (226, 238, 240)),  # hazy day
    ((232, 132, 88), (252, 214, 140)),  # dusk
    ((122, 110, 176), (246, 186, 170)),  # dawn
)
_GROUNDS = (  # horizon and foreground
    ((122, 178, 84), (84, 142, 58)),  # grass
    ((206, 184, 98), (172, 146, 70)),  # savanna
    ((232, 206, 152), (208, 174, 118)),  # sand
)
_BODIES = ((128, 130, 136), (110, 114, 122), (142, 128, 118), (112, 124, 146))  # grays, brown, blue
_INK, _IVORY, _PINK = np.array(((34, 34, 40), (248, 242, 222), (206, 150, 148)), dtype=float)


class _Draws:
    """The uniforms of one picture, taken in order."""

    def __init__(self, seed: int, index: int):
        key = np.array((seed % 2**64, index % 2**64), dtype=np.uint64)
        self._values = iter(np.random.Generator(np.random.Philox(key=key)).random(_DRAWS).tolist())

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * next(self._values)

    def choice(self, options: tuple) -> int:
        return int(next(self._values) * len(options))

    def chance(self, p: float) -> bool:
        return next(self._values) < p


class _Pen:
    """Fills polygons given in the elephant's coordinates: pixel = origin + scale (±x, -y)."""

    def __init__(
        self, canvas: Image.Image, origin: tuple[float, float], scale: float, mirror: bool
    ):
        self._draw = ImageDraw.Draw(canvas)
        self._origin = np.array(origin)
        self._axes = np.array((-scale if mirror else scale, -scale))

    def fill(self, points: np.ndarray, colour: np.ndarray) -> None:
        pixels = np.rint(points * self._axes + self._origin).astype(int)
        self._draw.polygon(pixels.ravel().tolist(), fill=_rgb(colour))


def _rgb(colour) -> tuple[int, int, int]:
    r, g, b = (min(255, max(0, int(c + 0.5))) for c in colour)
    return r, g, b


def _ellipse(x: float, y: float, rx: float, ry: float, tilt: float = 0.0) -> np.ndarray:
    points = _CIRCLE * (rx, ry)
    if tilt:
        c, s = np.cos(tilt), np.sin(tilt)
        points = points @ np.array(((c, s), (-s, c)))
    return points + (x, y)


def _tube(line: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """The outline of a stroke along `line` [K, 2] with a `radius` at each point and a round tip."""
    tangent = np.gradient(line, axis=0)
    tangent /= np.hypot(tangent[:, 0], tangent[:, 1])[:, None]
    normal = np.stack((-tangent[:, 1], tangent[:, 0]), axis=1) * radius[:, None]
    cap = np.linspace(np.pi / 2, -np.pi / 2, 6)[1:-1, None]
    tip = line[-1] + radius[-1] * np.cos(cap) * tangent[-1]
    tip = tip + np.sin(cap) * normal[-1]
    return np.concatenate((line + normal, tip, (line - normal)[::-1]))


def _walk(start: tuple[float, float], angles: np.ndarray, length: float) -> np.ndarray:
    """A curve [K + 1, 2] of the given length whose direction at step k is angles[k] (0: left, the
    way the elephant looks; positive: up)."""
    steps = np.stack((-np.cos(angles), np.sin(angles)), axis=1) * (length / len(angles))
    return np.concatenate(((start,), start + np.cumsum(steps, axis=0)))


def _background(d: _Draws, width: int, height: int, horizon: float) -> Image.Image:
    """Sky, sun, cloud, hill and ground, at the finer size; `horizon` is a share of the height."""
    sky, ground = _SKIES[d.choice(_SKIES)], _GROUNDS[d.choice(_GROUNDS)]
    border = int(horizon * height + 0.5)
    rows = np.empty((height, 1, 3))
    for (first, last), part in ((sky, rows[:border]), (ground, rows[border:])):
        blend = np.linspace(0, 1, len(part))[:, None, None]
        part[:] = np.array(first) * (1 - blend) + np.array(last) * blend
    column = Image.fromarray((rows * d.between(0.94, 1.04)).clip(0, 255).astype(np.uint8))
    canvas = column.resize((width, height), Image.Resampling.NEAREST)

    draw = ImageDraw.Draw(canvas)
    unit = min(width, height)
    sun, x, y = d.chance(0.4), d.between(0.1, 0.9) * width, d.between(0.08, 0.2) * height
    if sun:
        r = 0.075 * unit
        draw.ellipse((x - r, y - r, x + r, y + r), fill=(255, 240, 170))
    cloud, x, y = d.chance(0.4), d.between(0.15, 0.85) * width, d.between(0.08, 0.2) * height
    if cloud:
        white = tuple(int(c + 0.7 * (255 - c)) for c in sky[1])
        for dx, dy, r in ((-0.1, 0.02, 0.05), (0, 0, 0.07), (0.1, 0.02, 0.05)):
            cx, cy, rx, ry = x + dx * unit, y + dy * unit, 1.5 * r * unit, 0.8 * r * unit
            draw.ellipse((cx - rx, cy - ry, cx + rx, cy + ry), fill=white)
    hill, x = d.chance(0.4), d.between(0, 1) * width
    if hill:
        far = 0.55 * np.array(ground[0]) + 0.45 * np.array(sky[1])
        rx, ry = 0.5 * unit, 0.12 * unit
        draw.pieslice((x - rx, border - ry, x + rx, border + ry), 180, 360, fill=_rgb(far))
    return canvas


def _trunk(d: _Draws, kind: int, start: tuple[float, float], droop: float) -> np.ndarray:
    """Centre line of the trunk, [13, 2]."""
    s = np.linspace(0, 1, 12)
    bend = d.between(-0.2, 0.2)
    if kind == 0:  # hangs, the tip forward
        angles, length = (
            np.radians(-62) - droop - (0.45 + bend) * np.sin(np.pi * s) + 1.3 * s**3,
            0.62,
        )
    elif kind == 1:  # rolls in below the mouth
        angles, length = np.radians(-40) - droop - (2.6 + 2 * bend) * s**1.3, 0.72
    else:  # an S that ends in the air
        angles, length = np.radians(-58) + (3.0 + bend) * s**0.8, 0.68
    return _walk(start, angles, length)


@dataclass
class _Elephant:
    """What varies from one to the next; in the elephant's coordinates, angles in radians."""

    trunk: np.ndarray  # [13, 2] centre line
    tail: np.ndarray  # [7, 2] centre line
    head: tuple[float, float]
    swing: float  # of the feet, forwards
    ear_tilt: float
    ear_size: float
    tusk: bool
    hide: np.ndarray  # [3] colour


def _pose(d: _Draws, kind: int) -> _Elephant:
    swing = d.between(0.02, 0.11) * (1 if d.chance(0.5) else -1)
    nod = d.between(-0.06, 0.06)
    head = (-0.46, 0.77 + nod)
    return _Elephant(
        trunk=_trunk(d, kind, (head[0] - 0.1, head[1] - 0.02), nod),
        tail=_walk((0.4, 0.72), d.between(-3.3, -2.45) + np.linspace(-0.1, 0.9, 6), 0.42),
        head=head,
        swing=swing,
        ear_tilt=d.between(-0.25, 0.2),
        ear_size=d.between(0.9, 1.12),
        tusk=d.chance(0.65),
        hide=np.array(_BODIES[d.choice(_BODIES)]) * d.between(0.9, 1.1),
    )


def _leg(hip: float, foot: float, grow: float) -> np.ndarray:
    top, bottom = 0.105 + grow, 0.078 + grow
    foot = hip + foot
    x = (hip - top, foot - bottom, foot - bottom - 0.015, foot + bottom, hip + top)
    return np.stack((x, (0.55, 0.03, -grow, -grow, 0.55)), axis=1)


def _paint(pen: _Pen, e: _Elephant) -> None:
    """From the far side to the near side. A part that `grow`s is its own outline, filled first."""
    light, dark, line = e.hide * 1.14, e.hide * 0.74, e.hide * 0.42
    (x, y), edge = e.head, 0.022
    far = ((-0.2, -e.swing), (0.34, e.swing))  # hip, swing of the foot
    near = ((-0.29, e.swing), (0.25, -e.swing))

    def body(grow: float, colour: np.ndarray) -> None:
        for hip, foot in near:
            pen.fill(_leg(hip, foot, grow), colour)
        pen.fill(_ellipse(0.02, 0.66, 0.45 + grow, 0.275 + grow, 0.04), colour)
        pen.fill(_ellipse(0.22, 0.63, 0.25 + grow, 0.26 + grow), colour)

    def face(grow: float, colour: np.ndarray) -> None:
        pen.fill(_tube(e.trunk, np.linspace(0.108, 0.042, len(e.trunk)) + grow), colour)
        pen.fill(_ellipse(x, y, 0.185 + grow, 0.2 + grow, 0.35), colour)
        pen.fill(_ellipse(x, y - 0.17, 0.09 + grow, 0.07 + grow), colour)

    for hip, foot in far:
        pen.fill(_leg(hip, foot, edge), line)
        pen.fill(_leg(hip, foot, 0), dark)
    pen.fill(_tube(e.tail, np.linspace(0.034, 0.026, len(e.tail))), line)
    pen.fill(_ellipse(*e.tail[-1], 0.045, 0.065), _INK)
    body(edge, line)
    body(0, e.hide)
    face(edge, line)
    pen.fill(_ellipse(0.06, 0.78, 0.33, 0.12, 0.02), light)  # the sun on its back
    face(0, e.hide)
    if e.tusk:
        curve = _walk((x - 0.06, y - 0.16), np.radians((-50, -30, -5, 20)), 0.2)
        pen.fill(_tube(curve, np.array((0.036, 0.034, 0.03, 0.024, 0.012))), _IVORY)
    for grow, colour in ((edge, line), (0, light), (-0.05, (light + _PINK) / 2)):
        rx, ry = 0.145 * e.ear_size + grow, 0.215 * e.ear_size + grow
        pen.fill(_ellipse(x + 0.17, y - 0.03, rx, ry, e.ear_tilt), colour)
    pen.fill(_ellipse(x - 0.055, y + 0.055, 0.04, 0.046), _IVORY)
    pen.fill(_ellipse(x - 0.063, y + 0.055, 0.03, 0.036), _INK)
    for hip, foot in near:
        for toe in (-0.055, 0.0):
            pen.fill(_ellipse(hip + foot + toe, 0.022, 0.022, 0.026), light * 1.2)


def draw_elephant(seed: int, index: int, size: int | tuple[int, int]) -> np.ndarray:
    """Picture `index` of the set keyed by `seed`: uint8 [H, W, 3]; `size` is H = W or (H, W)."""
    return _draw(seed, index, *parse_size(size))[0]


def _draw(seed: int, index: int, height: int, width: int) -> tuple[np.ndarray, int]:
    """The picture and the index of its label in TRUNKS."""
    d = _Draws(seed, index)
    finer = 4 if max(height, width) <= 128 else 2
    w, h = width * finer, height * finer

    mirror, kind = d.chance(0.5), d.choice(TRUNKS)
    elephant = _pose(d, kind)

    # as large as fits, or somewhat smaller, and all of it inside the picture
    left = min(elephant.trunk[:, 0].min(), -0.65) - 0.07
    right = elephant.tail[:, 0].max() + 0.06
    scale = min(w / (right - left), h / 1.32) * d.between(0.84, 0.98)
    slack = (w - scale * (right - left)) / 2
    centre = (left + right) / 2 * scale
    x = w / 2 + (centre if mirror else -centre) + slack * d.between(-0.8, 0.8)
    feet = h / 2 + scale * (0.5 + d.between(-0.04, 0.04))

    canvas = _background(d, w, h, (feet - scale * d.between(0.12, 0.34)) / h)
    pen = _Pen(canvas, (x, feet), scale, mirror)
    shadow = np.array(canvas.getpixel((w // 2, h - 1))) * 0.72
    pen.fill(_ellipse(-0.02, 0.0, 0.56, 0.045), shadow)
    _paint(pen, elephant)
    return np.asarray(canvas.reduce(finer)), kind


def _draw_part(seed: int, height: int, width: int, part: range) -> tuple[np.ndarray, list[int]]:
    drawn = [_draw(seed, index, height, width) for index in part]
    return np.stack([picture for picture, _ in drawn]), [kind for _, kind in drawn]


@contextmanager
def _mapping(parts: int) -> Iterator[Callable]:
    """`map`, by as many processes as there are processors if there are many parts. They are copies
    of this one, which start at once, and leave a GPU alone."""
    count = min(processors(), parts // 2)
    if count < 2 or multiprocessing.current_process().daemon:  # which may have no children
        yield map
        return
    collects, context = gc.isenabled(), multiprocessing.get_context("fork")
    gc.disable()  # and so it is in the copies until `_begin_copy`
    try:
        with ProcessPoolExecutor(count, context, _begin_copy, (os.getpid(),)) as pool:
            yield pool.map
    finally:
        if collects:
            gc.enable()


def _begin_copy(parent: int) -> None:
    """A copy leaves what it has inherited alone: to destroy an object may mean to wait for its
    threads, which a copy does not have. And it ends with the process that it draws for."""
    gc.freeze()
    gc.enable()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)


def elephants(count: int = 4096, size: int | tuple[int, int] = 64, seed: int = 0) -> ImageSet:
    """`count` pictures as uint8 [count, H, W, 3], labelled by what the trunk does."""
    if seed < 0:
        raise ConfigError(f"dataset.seed={seed} is wrong; expected a whole number, at least 0")
    if count < 1:
        raise ConfigError(f"count={count} is wrong; the number of pictures is 1 or more")
    height, width = parse_size(size)
    check_memory(f"dataset.count={count}", (count, height, width, 3))
    images = np.empty((count, height, width, 3), dtype=np.uint8)
    labels = np.empty(count, dtype=np.int64)
    parts = [range(start, min(start + _PART, count)) for start in range(0, count, _PART)]
    draw = partial(_draw_part, seed, height, width)
    progress = Progress(count, unit="img", what="elephants", leave=False)
    with progress, _mapping(len(parts)) as over:
        for part, (pictures, kinds) in zip(parts, over(draw, parts), strict=True):
            images[part.start : part.stop], labels[part.start : part.stop] = pictures, kinds
            progress.reach(part.stop)
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), TRUNKS, name="elephants")
