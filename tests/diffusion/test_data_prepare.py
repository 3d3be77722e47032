"""tools/prepare.py as a user runs it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.data import load_dataset

ROOT = Path(__file__).resolve().parents[2]


def prepare(cwd, *settings):
    command = [sys.executable, str(ROOT / "tools/prepare.py"), *settings]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.fixture
def photos(tmp_path):
    """Two classes of small images."""
    for i in range(6):
        folder = tmp_path / "photos" / ("cats" if i < 3 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((10, 12, 3), 40 * i, np.uint8)).save(folder / f"{i}.png")
    return tmp_path


def test_folder_to_packed_to_bin(photos):
    done = prepare(photos, "src=photos", "out=sub/a.packed", "size=[8,4]")
    assert done.returncode == 0, done.stderr
    assert "6 images" in done.stdout and "0 skipped" in done.stdout
    packed = load_dataset("packed", path=photos / "sub/a.packed")
    folder = load_dataset("folder", path=photos / "photos", size=[8, 4])
    assert torch.equal(packed.images, folder.images) and torch.equal(packed.labels, folder.labels)
    assert packed.class_names == ("cats", "dogs")

    done = prepare(photos, "src=sub/a.packed", "out=a.bin")
    assert done.returncode == 0 and "labels are left out" in done.stdout
    assert torch.equal(load_dataset("packed", path=photos / "a.bin").images, folder.images)
    assert {path.name for path in photos.iterdir()} == {"photos", "sub", "a.bin"}  # no litter


def test_nothing_is_overwritten_unasked(photos):
    (photos / "a.packed").write_bytes(b"precious")
    done = prepare(photos, "src=photos", "out=a.packed")
    assert done.returncode == 2 and "overwrite=true" in done.stderr
    assert (photos / "a.packed").read_bytes() == b"precious" and "Traceback" not in done.stderr
    assert prepare(photos, "src=photos", "out=a.packed", "overwrite=true").returncode == 0
    assert load_dataset("packed", path=photos / "a.packed").size == (64, 64)


def test_the_script_is_short():
    assert len((ROOT / "tools/prepare.py").read_text().splitlines()) <= 80
