"""Films of episodes, side by side, as one GIF."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ..errors import writing

_FRAME, _HELD = 4, 12  # pixels of border; frames for which the last picture stands
_OPEN, _GOOD, _BAD = (205, 205, 205), (46, 160, 67), (207, 34, 46)
_SHOWN_FPS = 10  # at most
_COLOURS = 64  # of the palette, one for the whole film


def save_gif(
    films: Sequence[Sequence[np.ndarray]],  # uint8 [H, W, 3] each, one film an episode
    verdicts: Sequence[bool | None],  # of each: success, failure, or it is not known
    out: Path,
    *,
    side: int = 128,  # pixels of the longer side of each
    fps: float = 20.0,  # of the films themselves
) -> None:
    """All films play at once; one that is over keeps its last frame, in a border that is green for
    a success and red for a failure. They play at their own speed, about ten frames a second of
    them. Raises ConfigError if `out` cannot be written."""
    every = math.ceil(fps / _SHOWN_FPS)
    films = [[_fit(frame, side) for frame in _thinned(film, every)] for film in films]
    length = max(len(film) for film in films) + _HELD
    columns = math.ceil(math.sqrt(len(films)))
    rows = math.ceil(len(films) / columns)
    width, height = films[0][0].size
    cell = width + 2 * _FRAME, height + 2 * _FRAME
    pictures = []
    for t in range(length):
        canvas = Image.new("RGB", (columns * cell[0], rows * cell[1]), (255, 255, 255))
        for i, (film, verdict) in enumerate(zip(films, verdicts, strict=True)):
            over = t >= len(film) - 1 and verdict is not None
            colour = (_GOOD if verdict else _BAD) if over else _OPEN
            x, y = i % columns * cell[0], i // columns * cell[1]
            canvas.paste(colour, (x + 1, y + 1, x + cell[0] - 1, y + cell[1] - 1))
            canvas.paste(film[min(t, len(film) - 1)], (x + _FRAME, y + _FRAME))
        pictures.append(canvas)
    palette = _palette(pictures)
    first, *rest = (
        picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures
    )
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_name(f".writing_{out.name}")  # on a full disk, what is there stays
        try:
            first.save(
                partial,
                format="GIF",
                save_all=True,
                append_images=rest,
                duration=round(1000 * every / fps),
                loop=0,
            )
            os.replace(partial, out)
        finally:
            partial.unlink(missing_ok=True)


def _thinned(film: Sequence[np.ndarray], every: int) -> list[np.ndarray]:
    """Each `every`-th frame, and the last."""
    kept = list(film[::every])
    return kept if (len(film) - 1) % every == 0 else [*kept, film[-1]]


def _fit(frame: np.ndarray, side: int) -> Image.Image:
    image = Image.fromarray(frame)
    if max(image.size) == side:
        return image
    scale = side / max(image.size)
    return image.resize([max(1, round(scale * length)) for length in image.size])


def _palette(pictures: list[Image.Image]) -> Image.Image:
    """Of the first, the last and the borders' colours, which are in neither or in both."""
    chosen = (pictures[0], pictures[len(pictures) // 2], pictures[-1])
    width, height = pictures[0].size
    sheet = Image.new("RGB", (width, height * len(chosen)))
    for i, picture in enumerate(chosen):
        sheet.paste(picture, (0, i * height))
    return sheet.quantize(_COLOURS, dither=Image.Dither.NONE)
