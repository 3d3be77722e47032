"""Pictures of the task."""

import numpy as np
from PIL import Image, ImageDraw

from .task import DISC_RADIUS, PUSHER_RADIUS, TOLERANCE, parts

_FINER = 4  # drawn so many times as large and averaged down
_FLOOR, _WALL = (245, 243, 238), (120, 120, 126)
_GOAL, _CENTRE = (150, 200, 160), (70, 150, 90)
_DISC, _DISC_CENTRE = (84, 130, 190), (46, 84, 136)
_PUSHER = (217, 72, 1)


def draw_state(state: np.ndarray, size: int = 128) -> np.ndarray:  # uint8 [size, size, 3]
    """The world of a state [6], from above. The disc has reached the goal when the middle of its
    dot is in the dark ring, whose radius is the tolerance."""
    pusher, disc, goal = parts(np.asarray(state, dtype=np.float64))
    scale = size * _FINER
    canvas = Image.new("RGB", (scale, scale), _FLOOR)
    draw = ImageDraw.Draw(canvas)

    def circle(centre: np.ndarray, radius: float, colour: tuple[int, ...], ring: float = 0) -> None:
        x, y, r = centre[0] * scale, (1 - centre[1]) * scale, radius * scale
        box = (x - r, y - r, x + r, y + r)
        if ring:
            draw.ellipse(box, outline=colour, width=round(ring * scale))
        else:
            draw.ellipse(box, fill=colour)

    circle(goal, DISC_RADIUS, _GOAL)
    circle(disc, DISC_RADIUS, _DISC)
    circle(disc, 0.012, _DISC_CENTRE)
    circle(goal, TOLERANCE, _CENTRE, ring=0.008)
    circle(pusher, PUSHER_RADIUS, _PUSHER)
    draw.rectangle((0, 0, scale - 1, scale - 1), outline=_WALL, width=round(0.008 * scale))
    return np.asarray(canvas.reduce(_FINER))
