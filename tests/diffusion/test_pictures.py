"""Grids of images: what is where, in which colours."""

import numpy as np
import pytest
from PIL import Image

from diffusion.tracking.pictures import grid, over_white

GAP, SIDE = 2, 64


def _at(picture: Image.Image, column: int, row: int) -> list[int]:
    """The colour in the middle of a place."""
    x, y = (GAP + i * (SIDE + GAP) + SIDE // 2 for i in (column, row))
    return list(picture.getpixel((x, y)))


@pytest.mark.parametrize(
    ("colour", "shown"),
    [
        ([9], [9, 9, 9]),
        ([9, 8], [9, 9, 9]),
        ([9, 8, 7], [9, 8, 7]),
        ([9, 8, 7, 255], [9, 8, 7]),
        ([9, 8, 7, 0], [255, 255, 255]),  # a colour that nobody sees
        ([255, 0, 100, 51], [255, 204, 224]),
        ([9, 8, 7, 6, 5], [9, 8, 7]),
    ],
    ids=str,
)
def test_colours(colour, shown):
    images = np.zeros((3, 4, 4, len(colour)), dtype=np.uint8)
    images[2] = colour
    picture = grid(images)
    assert picture.size == (GAP + 2 * (SIDE + GAP), GAP + 2 * (SIDE + GAP))
    assert _at(picture, 0, 1) == shown  # the third of two columns
    assert _at(picture, 1, 1) == [255, 255, 255]  # nothing


def test_over_white_is_what_pillow_does():
    images = np.random.default_rng(0).integers(256, size=(2, 5, 6, 4), dtype=np.uint8)
    for image, ours in zip(images, over_white(images), strict=True):
        white = Image.new("RGBA", (6, 5), "white")
        theirs = Image.alpha_composite(white, Image.fromarray(image)).convert("RGB")
        assert np.abs(np.asarray(theirs).astype(int) - ours).max() <= 1
