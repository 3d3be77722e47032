"""Pairs of images: which belong together, what becomes of broken ones, super-resolution."""

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.data import expected_classes, expected_condition, load_dataset
from diffusion.errors import ConfigError


def write(folder, names, value=0, size=(8, 8), mode="RGB"):
    for i, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size[::-1], (value + 10 * i,) * len(mode)).save(path)
    return folder


def load(path, condition, **options):
    options = {"condition": condition and str(condition), "size": 8} | options
    return load_dataset("pairs", path=str(path), **options)


def test_pairs_are_of_one_name(tmp_path):
    learned = write(tmp_path / "a", ["x/1.png", "x/2.png", "y/10.png"])
    given = write(tmp_path / "b", ["x/1.bmp", "x/2.bmp", "y/10.bmp"], 100, (16, 16))
    data = load(learned, given, condition_channels=1)
    assert data.images.shape == (3, 8, 8, 4) and data.image_shape == (8, 8, 3)
    assert data.images[:, 0, 0].tolist() == [[10 * i] * 3 + [100 + 10 * i] for i in range(3)]
    assert data.labels.tolist() == [0, 0, 1] and data.class_names == ("x", "y")
    assert data.condition.channels == 1 and torch.equal(data.learned, data.images[..., :3])
    assert expected_classes("pairs", path=str(learned)) == 2
    assert expected_condition("pairs", condition_channels=1) == 1
    assert expected_condition("array", condition=[2, 0]) == 2


def test_images_that_are_cropped_apart_are_said(tmp_path):
    """Of another aspect ratio, but not of another size, nor by less than a pixel of the set."""
    learned = write(tmp_path / "a", ["1.png", "2.png", "3.png"], size=(100, 66))
    given = write(tmp_path / "b", ["1.png"], size=(50, 33))
    assert load(learned, write(given, ["2.png", "3.png"], size=(33, 21))).notes == ()
    write(given, ["3.png"], size=(66, 100))
    assert load(learned, given).notes[-1] == (
        "the two images of 1 of 3 pairs differ in their aspect ratio, first those of 3.png, 100x66"
        " and 66x100: what is cropped from one is left in the other"
    )
    assert not any("aspect" in note for note in load(learned, None, condition_size=4).notes)


def test_alpha_is_a_mask(tmp_path):
    learned = write(tmp_path / "a", ["1.png", "2.png"])
    given = write(tmp_path / "b", ["1.png", "2.png"], 50, mode="RGBA")
    data = load(learned, given, condition_channels=4)
    assert data.images.shape == (2, 8, 8, 7) and data.images[1, 0, 0, 3:].tolist() == [60] * 4


def test_images_are_their_own_conditions_reduced(tmp_path):
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    (tmp_path / "a").mkdir()
    Image.fromarray(ramp).save(tmp_path / "a" / "1.png")
    Image.fromarray(255 - ramp).save(tmp_path / "a" / "2.png")
    data = load(tmp_path / "a", None, size=16, condition_size=4)
    assert torch.equal(data.learned[0], torch.from_numpy(ramp))
    small = Image.fromarray(ramp).resize((4, 4), Image.Resampling.LANCZOS, reducing_gap=3.0)
    expected = np.asarray(small.resize((16, 16), Image.Resampling.BICUBIC))
    assert np.array_equal(data.images[0, ..., 3:].numpy(), expected)
    assert data.condition.size == (4, 4)


def test_a_pair_of_which_one_is_broken_is_left_out(tmp_path):
    names = [f"{i}.png" for i in range(5)]
    learned, given = write(tmp_path / "a", names), write(tmp_path / "b", names, 100)
    (given / "3.png").write_bytes(b"no image")
    data = load(learned, given)
    assert data.images[:, 0, 0, 0].tolist() == [0, 10, 20, 40]
    assert data.images[:, 0, 0, 3].tolist() == [100, 110, 120, 140]
    assert data.skipped == ("3.png",)


@pytest.mark.parametrize(
    ("learned", "given", "words"),
    [
        (["1.png", "2.png"], ["1.png"], "1 of 2 images of .*a has none of its name in .*b, fir"),
        (["1.png"], ["1.png", "7.png"], "1 of 2 images of .*b has none of its name in .*a, fir"),
        (["1.png"], ["1.png", "7.png", "8.png"], "2 of 3 images of .*b have none of their name"),
        (["1.png"], ["1.png", "1.bmp"], "b has two images for one: 1.bmp and 1.png"),
        (["1.png", "1.bmp"], ["1.png"], "a has two images of the name 1"),
    ],
    ids=[
        "no condition",
        "nothing to learn",
        "twice nothing to learn",
        "two conditions",
        "two to learn",
    ],
)
def test_images_that_are_alone(tmp_path, learned, given, words):
    with pytest.raises(ConfigError, match=words):
        load(write(tmp_path / "a", learned), write(tmp_path / "b", given))


def test_what_is_missing_is_said(tmp_path):
    learned = write(tmp_path / "a", ["1.png", "2.png"])
    with pytest.raises(ConfigError, match="dataset.path is not set"):
        load_dataset("pairs")
    with pytest.raises(ConfigError, match="dataset.condition is not set; .*condition_size=SIDE"):
        load(learned, None)
    with pytest.raises(ConfigError, match="condition_size=16 is larger than the images, 8x8"):
        load(learned, None, condition_size=16)
    with pytest.raises(ConfigError, match="channels=2 is wrong"):
        load(learned, learned, condition_channels=2)
