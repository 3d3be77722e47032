"""tools/prepare.py as a user runs it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.data import load_dataset

from ..end_to_end.run import run

ROOT = Path(__file__).resolve().parents[2]


def prepare(cwd, *settings, fresh=False):
    return run("tools/prepare.py", *settings, cwd=cwd, fresh=fresh)


@pytest.fixture
def photos(tmp_path):
    """Two classes of small images."""
    for i in range(6):
        folder = tmp_path / "photos" / ("cats" if i < 3 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((10, 12, 3), 40 * i, np.uint8)).save(folder / f"{i}.png")
    return tmp_path


def test_folder_to_packed_to_bin(photos):
    code, out, err = prepare(photos, "src=photos", "out=sub/a.packed", "size=[8,4]", fresh=True)
    assert code == 0, err
    assert "6 images" in out and "0 skipped" in out
    packed = load_dataset("packed", path=photos / "sub/a.packed")
    folder = load_dataset("folder", path=photos / "photos", size=[8, 4])
    assert torch.equal(packed.images, folder.images) and torch.equal(packed.labels, folder.labels)
    assert packed.class_names == ("cats", "dogs")

    code, out, _ = prepare(photos, "src=sub/a.packed", "out=a.bin")
    assert code == 0 and "labels are left out" in out
    assert torch.equal(load_dataset("packed", path=photos / "a.bin").images, folder.images)
    assert {path.name for path in photos.iterdir()} == {"photos", "sub", "a.bin"}  # no litter


def test_nothing_is_overwritten_unasked(photos):
    (photos / "a.packed").write_bytes(b"precious")
    code, _, err = prepare(photos, "src=photos", "out=a.packed")
    assert code == 2 and "overwrite=true" in err
    assert (photos / "a.packed").read_bytes() == b"precious" and "Traceback" not in err
    assert prepare(photos, "src=photos", "out=a.packed", "overwrite=true")[0] == 0
    assert load_dataset("packed", path=photos / "a.packed").size == (64, 64)


def test_the_script_is_short():
    assert len((ROOT / "tools/prepare.py").read_text().splitlines()) <= 80
