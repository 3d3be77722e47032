"""Folders of images as people have them: every mode, size and mishap."""

import json
import logging
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image, features

from diffusion.data import load_dataset
from diffusion.data.images import load_folder
from diffusion.errors import ConfigError

RAMP = np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5


def save(path, image=RAMP, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(path, **options)
    return path


def only(folder, **options):
    """The one image of a folder."""
    data = load_folder(folder, **options)
    assert len(data) == 1
    return data.images[0].numpy()


def test_same_size_is_bit_for_bit(tmp_path):
    save(tmp_path / "a.png")
    assert np.array_equal(only(tmp_path, size=4), RAMP)


AVIF = ["avif"] if "avif" in features.modules and features.check("avif") else []


@pytest.mark.parametrize(
    "suffix", ["png", "webp", "bmp", "gif", "jpg", "JPEG", "tiff", "pnm", *AVIF]
)
def test_formats(tmp_path, suffix):
    save(tmp_path / f"a.{suffix}", np.full((9, 9, 3), 200, np.uint8))
    assert np.abs(only(tmp_path, size=4).astype(int) - 200).max() <= 2


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_modes(tmp_path, mode, channels):
    """A white and a black half, in every mode of Pillow and every number of channels."""
    gray = np.zeros((8, 8), np.uint8)
    gray[:4] = 255
    if mode in ("I;16", "I"):
        image = Image.fromarray(gray.astype(np.uint16) * 257)
        image = image.convert("I") if mode == "I" else image
    elif mode == "F":
        image = Image.fromarray(gray.astype(np.float32) / 255)
    else:
        image = Image.fromarray(gray).convert("RGB").convert(mode)
    save(tmp_path / "a.tiff", image)
    out = only(tmp_path, size=8, channels=channels)
    assert out.shape == (8, 8, channels)
    assert (out[:4] == 255).all() and (out[4:, :, : min(channels, 3)] == 0).all()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_lab(tmp_path, channels):
    """Which rounds white to 254, as Pillow converts it."""
    save(tmp_path / "a.tiff", Image.new("RGB", (4, 4), "white").convert("LAB"))
    assert (only(tmp_path, size=4, channels=channels) >= 254).all()


def test_16_bit_gray_keeps_its_levels(tmp_path):
    values = (np.arange(64, dtype=np.uint16) * 1024).reshape(8, 8)
    save(tmp_path / "a.png", Image.fromarray(values))
    out = only(tmp_path, size=8, channels=1)[..., 0]
    assert np.abs(out - values / 257).max() <= 0.5


@pytest.mark.parametrize(
    ("background", "expected"), [("white", 255), ("black", 0), ("#808080", 128)]
)
def test_alpha_is_laid_over_the_background(tmp_path, background, expected):
    save(tmp_path / "a.png", np.zeros((4, 4, 4), np.uint8))  # black, fully transparent
    assert (only(tmp_path, size=4, background=background) == expected).all()


def test_transparent_palette(tmp_path):
    image = Image.fromarray(np.zeros((4, 4), np.uint8)).convert("P")
    save(tmp_path / "a.png", image, transparency=0)
    assert (only(tmp_path, size=4) == 255).all()


def test_real_alpha(real_data):
    kept = load_folder(real_data / "rgba", size=64, channels=4)
    flat = load_folder(real_data / "rgba", size=64)
    assert kept.images.shape == (30, 64, 64, 4) and flat.images.shape == (30, 64, 64, 3)
    clear = kept.images[..., 3] == 0
    assert clear.any() and (flat.images[clear] == 255).all()


def test_exif_orientation(tmp_path):
    upright = np.zeros((8, 8, 3), np.uint8)
    upright[:4] = 255
    turned = Image.fromarray(np.rot90(upright).copy())  # as a camera held sideways stores it
    exif = Image.Exif()
    exif[0x0112] = 6
    save(tmp_path / "a.png", turned, exif=exif)
    assert np.array_equal(only(tmp_path, size=8), upright)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)], ids=str)
def test_crop_is_central(tmp_path, shape):
    image = np.zeros((*shape, 3), np.uint8)
    middle = image[:, 8:16] if shape[1] > shape[0] else image[8:16]
    middle[:] = 255
    save(tmp_path / "a.png", image)
    assert (only(tmp_path, size=8) == 255).all()


def test_far_larger_is_averaged_not_sampled(tmp_path):
    checks = (np.indices((512, 512)).sum(0) % 2 * 255).astype(np.uint8)
    save(tmp_path / "a.png", Image.fromarray(checks))
    assert np.abs(only(tmp_path, size=8, channels=1).astype(int) - 127).max() <= 2


def test_one_pixel_and_wide_targets(tmp_path):
    save(tmp_path / "a.png", np.full((1, 1, 3), 9, np.uint8))
    assert (only(tmp_path, size=[3, 50]) == 9).all()


def test_nested_folders_in_the_order_of_names(tmp_path):
    for i, name in enumerate(("b/2.png", "a/z/9.png", "c.png", "a/1.png")):
        save(tmp_path / name, np.full((2, 2, 3), i, np.uint8))
    save(tmp_path / ".hidden/x.png")
    (tmp_path / "notes.txt").write_text("not an image")
    data = load_folder(tmp_path, size=2)
    assert data.images[:, 0, 0, 0].tolist() == [3, 1, 0, 2]  # a/1, a/z/9, b/2, c
    assert data.labels is None  # c.png lies beside the folders


def test_files_of_other_endings_are_counted(tmp_path):
    """In a folder and in a zip; no others."""
    names = ("b.heic", "c/d.HEIC", "e.JPG.part", "README", ".hidden", "dataset.json")
    save(tmp_path / "photos" / "c" / "a.png")
    for name in names:
        (tmp_path / "photos" / name).write_text('{"labels": null}')
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for path in (tmp_path / "photos").rglob("*"):
            archive.write(path, path.relative_to(tmp_path))  # with entries of the folders
    for path in (tmp_path / "photos", tmp_path / "set.zip"):
        (note,) = load_folder(path, size=4).notes
        left_out = (
            "left out 4 files (2 .heic, 1 .part, 1 without an ending); read are .jpg, .jpeg, "
        )
        assert note.startswith(f"{path}: {left_out}")
    (tmp_path / "photos" / "c" / "a.png").unlink()
    with pytest.raises(ConfigError, match=r", and found 4 files \(2 .heic, 1 .part, 1 without an"):
        load_folder(tmp_path / "photos")


def test_class_folders(tmp_path):
    for name in ("dog/1.png", "cat/1.png", "cat/deep/2.png"):
        save(tmp_path / name)
    data = load_folder(tmp_path, size=2)
    assert data.class_names == ("cat", "dog") and data.labels.tolist() == [0, 0, 1]
    assert data.notes == ()
    data = load_folder(tmp_path, size=2, classes=False)
    assert data.labels is None and data.notes == ()


def test_class_folders_without_an_image_are_named(tmp_path):
    """They are no classes, in a folder and in a zip of it."""
    for name in ("dog/1.png", "cat/1.png"):
        save(tmp_path / "set" / name)
    for name in ("bird", ".cache", "empty/deep"):
        (tmp_path / "set" / name).mkdir(parents=True)
    (tmp_path / "set" / "bird" / ".hidden").write_text("")
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for path in (tmp_path / "set").rglob("*"):
            archive.write(path, path.relative_to(tmp_path))  # with entries of the folders
    for path in (tmp_path / "set", tmp_path / "set.zip"):
        data = load_folder(path, size=2)
        assert data.class_names == ("cat", "dog")
        assert data.notes == (f"{path}: 2 folders without an image are no class: bird, empty",)


def test_one_folder_is_no_class(tmp_path):
    save(tmp_path / "photos/1.png")
    assert load_folder(tmp_path, size=2).labels is None


def test_a_link_upwards_ends(tmp_path):
    save(tmp_path / "a/1.png")
    (tmp_path / "a/again").symlink_to(tmp_path, target_is_directory=True)
    assert len(load_folder(tmp_path, size=2)) == 1


def test_stylegan_zip(tmp_path):
    folder, labels = tmp_path / "src", []
    for i in range(3):
        save(folder / f"00000/img{i}.png", np.full((2, 2, 3), i, np.uint8))
        labels.append([f"00000/img{i}.png", 2 - i])
    (folder / "dataset.json").write_text(json.dumps({"labels": labels}))
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for path in folder.rglob("*.*"):
            archive.write(path, path.relative_to(folder))
    for path in (folder, tmp_path / "set.zip"):
        data = load_folder(path, size=2)
        assert data.labels.tolist() == [2, 1, 0] and data.class_names is None
        assert data.images[:, 0, 0, 0].tolist() == [0, 1, 2] and data.notes == ()
    (folder / "00000/img1.png").unlink()  # as where a download was interrupted
    data = load_folder(folder, size=2)
    assert data.labels.tolist() == [2, 0] and data.notes == (
        f"{folder}: dataset.json has labels of 1 image more than are there, such as 00000/img1.png",
    )


def test_labels_of_null_are_none_at_all(tmp_path):
    """And not the numbers of StyleGAN's sub-folders."""
    for name in ("00000/a.png", "00001/b.png"):
        save(tmp_path / name)
    (tmp_path / "dataset.json").write_text('{"labels": null}')
    data = load_folder(tmp_path, size=2)
    assert data.labels is None and data.class_names is None


@pytest.mark.parametrize("labelled", [False, True], ids=["class folders", "dataset.json"])
def test_zip_of_a_folder(tmp_path, labelled):
    """As `zip -r set.zip set` makes it: what is in it lies one folder deeper."""
    save(tmp_path / "a.png")
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for name in ("cat/1.png", "dog/1.png", "dog/2.png"):
            archive.write(tmp_path / "a.png", f"set/{name}")
        if labelled:
            labels = [["cat/1.png", 2], ["dog/1.png", 0], ["dog/2.png", 1]]
            archive.writestr("set/dataset.json", json.dumps({"labels": labels}))
    data = load_folder(tmp_path / "set.zip", size=2)
    assert data.labels.tolist() == ([2, 0, 1] if labelled else [0, 1, 1])
    assert data.class_names == (None if labelled else ("cat", "dog"))


def test_zip_of_a_folder_without_classes(tmp_path):
    save(tmp_path / "a.png")
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for i in range(2):
            archive.write(tmp_path / "a.png", f"set/{i}.png")
    assert load_folder(tmp_path / "set.zip", size=2).labels is None


def test_a_truncated_zip_is_said_to_be_one(tmp_path):
    save(tmp_path / "a.png")
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        archive.write(tmp_path / "a.png", "a.png")
    whole = (tmp_path / "set.zip").read_bytes()
    (tmp_path / "set.zip").write_bytes(whole[:-30])
    with pytest.raises(ConfigError, match="set.zip is no zip, or truncated"):
        load_folder(tmp_path / "set.zip")


def test_values_that_are_not_finite_are_no_image(tmp_path):
    save(tmp_path / "a.tiff", np.full((4, 4), np.nan, np.float32))
    with pytest.raises(ConfigError, match="a.tiff .*not finite"):
        load_folder(tmp_path, size=2)


@pytest.mark.parametrize(
    "content", ["{", '{"labels": [["a.png", 0.5]]}', '{"labels": []}', "[]"], ids=repr
)
def test_wrong_dataset_json(tmp_path, content):
    save(tmp_path / "a.png")
    (tmp_path / "dataset.json").write_text(content)
    with pytest.raises(ConfigError, match="dataset.json"):
        load_folder(tmp_path, size=2)


def test_a_corrupt_image_is_skipped_with_its_name(tmp_path, caplog):
    for i in range(100):
        save(
            tmp_path / f"{'even' if i % 2 == 0 else 'odd'}/{i:03}.png", np.full((2, 2), i, np.uint8)
        )
    (tmp_path / "odd/041.png").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        data = load_folder(tmp_path, size=2, channels=1)
    assert data.skipped == ("odd/041.png",) and "odd/041.png" in caplog.text
    pixel, odd = data.images[:, 0, 0, 0].long(), data.labels.bool()
    assert len(data) == 99 and torch.equal(pixel % 2 == 1, odd)


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut"])
def test_over_one_percent_corrupt_stops(tmp_path, damage):
    for i in range(99):
        save(tmp_path / f"{i:03}.png")
    good = save(tmp_path / "other.png")
    content = {"empty": b"", "garbage": b"no image", "cut": good.read_bytes()[:-40]}[damage]
    for name in ("x.png", "y.png"):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="2 of 102 .* more than the 1 % .*y.png") as caught:
        load_folder(tmp_path, size=4)
    assert "\n" not in str(caught.value) and " object" not in str(caught.value)
    assert "BufferedReader" not in str(caught.value)


def test_a_single_corrupt_file_of_a_few_is_left_out(tmp_path):
    (tmp_path / "b.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match="1 of 1 images cannot be decoded"):
        load_folder(tmp_path, size=4)
    save(tmp_path / "a.png")
    data = load_folder(tmp_path, size=4)
    assert len(data) == 1 and data.skipped == ("b.png",)


def test_missing_empty_and_wrong(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for path, message in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, "holds no image"),
        (tmp_path / "notes.txt", "is a file"),
        (None, "dataset.path is not set"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_dataset("folder", path=path)
    save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="channels=2"):
        load_folder(tmp_path, channels=2)
    with pytest.raises(ConfigError, match="background=nocolour"):
        load_folder(tmp_path, background="nocolour")


def test_real_photos(real_data):
    data = load_folder(real_data / "elephants", size=64)
    assert data.images.shape == (600, 64, 64, 3) and data.skipped == ()
    assert data.images.is_contiguous() and data.labels is None
    small = load_folder(real_data / "elephants", size=[24, 32])
    assert small.images.shape == (600, 24, 32, 3)
    middle = data.images[:, 8:56].float()  # the rows that the crop to 3:4 keeps
    assert abs(small.images.float().mean() - middle.mean()) < 0.5
