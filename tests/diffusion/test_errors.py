"""What messages are made of."""

import pytest

from diffusion.errors import counted


@pytest.mark.parametrize(
    ("number", "what", "said"),
    [
        (1, "images", "1 image"),
        (0, "images", "0 images"),
        (2, "images", "2 images"),
        (1, "classes", "1 class"),
        (1, "processes", "1 process"),
        (1, "pieces", "1 piece"),
        (10, "classes", "10 classes"),
    ],
)
def test_one_is_singular(number, what, said):
    assert counted(number, what) == said
