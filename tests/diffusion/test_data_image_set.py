"""What holds for every data set: classes, sizes, channels, names and their errors."""

import pytest
import torch

from diffusion.data import load_dataset
from diffusion.data.image_set import ImageSet, parse_size, with_channels
from diffusion.errors import ConfigError

PETS = ImageSet(
    torch.zeros(2, 4, 6, 3, dtype=torch.uint8), torch.tensor([0, 2]), ("cat", "dog", "7"), "pets"
)


def test_shape():
    assert (len(PETS), PETS.size, PETS.channels) == (2, (4, 6), 3)


@pytest.mark.parametrize("size", [0, -1, 2.5, "64", [64], [1, 2, 3], [8, 0], None, True], ids=repr)
def test_wrong_size(size):
    with pytest.raises(ConfigError, match="size="):
        parse_size(size)


def test_channels_into_each_other():
    gray = torch.randint(0, 256, (2, 3, 4, 1), dtype=torch.uint8)
    assert torch.equal(with_channels(with_channels(gray, 3), 1), gray)
    with pytest.raises(ConfigError, match="channels=2"):
        with_channels(gray, 2)


def test_unknown_set_and_option():
    with pytest.raises(ConfigError, match="did you mean elephants"):
        load_dataset("elefants")
    with pytest.raises(ConfigError, match="did you mean background"):
        load_dataset("folder", backgroud="white")
    with pytest.raises(ConfigError, match="is no option of elephants"):
        load_dataset("elephants", path="somewhere")
