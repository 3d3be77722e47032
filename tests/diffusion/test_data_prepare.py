"""tools/prepare.py as a user runs it."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.data import load_dataset, parts
from diffusion.data.images import Decoder
from diffusion.errors import ConfigError
from diffusion.runs.prepare import prepare as write

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
    assert load_dataset("packed", path=photos / "a.packed").size == (10, 12)


def test_a_name_that_no_file_can_have(photos):
    code, _, err = prepare(photos, "src=photos", "out=a.packed", f"encode={'x' * 300}")
    assert code == 2 and "too long for the name of a file" in err and "Traceback" not in err


def test_the_script_is_short():
    assert len((ROOT / "tools/prepare.py").read_text().splitlines()) <= 80


# --- sizes ----------------------------------------------------------------------------------------


def test_without_a_size_images_are_as_they_are(photos):
    code, _, err = prepare(photos, "src=photos", "out=a.packed")
    assert code == 0 and "enlarged" not in err
    packed = load_dataset("packed", path=photos / "a.packed")
    assert packed.size == (10, 12) and packed.images[:, 0, 0, 0].tolist() == [0, 40, 80] + [
        *(120, 160, 200)
    ]
    assert load_dataset("folder", path=photos / "photos").size == (10, 12)
    Image.new("RGB", (9, 7)).save(photos / "photos" / "cats" / "odd.png")
    code, _, err = prepare(photos, "src=photos", "out=b.packed")
    assert code == 2 and "images of 2 sizes (6 of 10x12, 1 of 7x9); give size=" in err
    with pytest.raises(ConfigError, match="2 sizes"):
        load_dataset("folder", path=photos / "photos")


def test_enlarging_is_said(photos):
    code, _, err = prepare(photos, "src=photos", "out=a.packed", "size=[11,8]")
    expected = (
        "note: 6 of 6 images are smaller than 11x8 and were enlarged, the smallest from 10x12"
    )
    assert code == 0 and expected in err
    (note,) = load_dataset("folder", path=photos / "photos", size=[11, 8]).notes
    assert note in err
    assert load_dataset("folder", path=photos / "photos", size=[10, 8]).notes == ()


def test_files_that_are_left_out_are_counted(photos):
    (photos / "photos" / "a.heic").write_bytes(b"")
    code, _, err = prepare(photos, "src=photos", "out=a.packed", "size=10", "workers=2")
    assert code == 0 and err.count("note: ") == 1
    assert "note: photos: left out 1 file (1 .heic); read are .jpg, " in err


def test_an_enlarged_image_is_one_of_those_that_were_read(photos):
    """Beside one that cannot be decoded; both say the same."""
    Image.new("RGB", (12, 9)).save(photos / "photos" / "cats" / "small.png")
    (photos / "photos" / "cats" / "broken.png").write_bytes(b"no image")
    code, _, err = prepare(photos, "src=photos", "out=a.packed", "size=10")
    expected = "1 of 7 images is smaller than 10x10 and was enlarged from 9x12, which makes it soft"
    assert code == 0 and f"note: {expected}" in err
    (note,) = load_dataset("folder", path=photos / "photos", size=10).notes
    assert note.startswith(expected)


# --- by parts -------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path, monkeypatch):
    """40 images in parts of 4; one of them is corrupt."""
    monkeypatch.setattr(parts, "PART", 4)
    (tmp_path / "src").mkdir()
    for i in range(40):
        image = np.full((6, 6, 3), i, np.uint8)
        Image.fromarray(image).save(tmp_path / "src" / f"{i:02d}.png")
    (tmp_path / "src" / "07.png").write_bytes(b"broken")
    return tmp_path


def whole(folder, name="whole.packed"):
    write(src=str(folder / "src"), out=str(folder / name))
    return (folder / name).read_bytes()


class Killed(BaseException):
    """As if the process had ended here."""


@pytest.mark.parametrize("suffix", [".packed", ".bin"])
@pytest.mark.parametrize("after", [0, 1, 7, 21, 39])
def test_what_was_begun_is_gone_on_with(many, monkeypatch, capsys, suffix, after):
    expected = whole(many, f"whole{suffix}")
    decoded, original = [], Decoder._decode

    def dying(self, name):
        decoded.append(name)
        return original(self, name)

    def progress(self, part, report, write=parts._Parts._write):
        if part * 4 + 3 >= after:
            raise Killed
        write(self, part, report)

    monkeypatch.setattr(Decoder, "_decode", dying)
    out = many / f"a{suffix}"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(parts._Parts, "_write", progress)
        write(src=str(many / "src"), out=str(out))
    assert not out.exists()
    before = set(decoded)
    decoded.clear()
    write(src=str(many / "src"), out=str(out))
    assert out.read_bytes() == expected and not before & set(decoded)
    assert len(before) == after // 4 * 4
    said = capsys.readouterr()
    assert "39 images" in said.out and "skipped 1 corrupt of 40: 07.png" in said.err
    assert (f"{after // 4} of 10 parts were there already" in said.out) == (after > 3)
    assert sorted(p.name for p in many.iterdir()) == sorted(["src", f"whole{suffix}", out.name])


def test_other_settings_begin_anew(many, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(parts._Parts, "finish", lambda self: (_ for _ in ()).throw(Killed))
        write(src=str(many / "src"), out=str(many / "a.packed"), size=3)
    assert whole(many, "a.packed") == whole(many)
    assert sorted(p.name for p in many.iterdir()) == ["a.packed", "src", "whole.packed"]


def test_an_error_leaves_nothing(many):
    for i in range(5):
        (many / "src" / f"{i:02d}.png").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="images cannot be decoded, more than the 1 %"):
        whole(many)
    assert [p.name for p in many.iterdir()] == ["src"]


def test_no_more_may_be_corrupt_over_all_parts_than_in_one(many):
    (many / "src" / "30.png").write_bytes(b"broken")  # far from the other one
    with pytest.raises(ConfigError, match="2 of 40 images cannot be decoded"):
        whole(many)
    assert [p.name for p in many.iterdir()] == ["src"]


def test_several_processes_make_the_same_file(many):
    """With parts of 512 the second process finds none, but as many ask for them."""
    for i in range(40, 1200):
        os.link(many / "src" / "00.png", many / "src" / f"{i:04d}.png")
    code, out, err = prepare(many, "src=src", "out=a.packed")
    assert code == 0, err
    code, out, err = prepare(many, "src=src", "out=b.packed", "workers=3", fresh=True)
    assert code == 0 and "1199 images" in out, err
    assert (many / "a.packed").read_bytes() == (many / "b.packed").read_bytes()
    assert sorted(p.name for p in many.iterdir()) == ["a.packed", "b.packed", "src"]


def test_two_commands_share_the_work(many, monkeypatch):
    """Each writes what the other has not: here the second is called within the first."""
    expected, written = whole(many), []
    original = parts._Parts._write

    def write_and_call(self, part, report):
        written.append(part)
        if part == 2 and len(written) == 3:
            with monkeypatch.context() as patch:
                # it cannot finish, for part 2 is held; it does all others
                patch.setattr(parts.time, "sleep", lambda _: (_ for _ in ()).throw(Killed))
                with pytest.raises(Killed):
                    write(src=str(many / "src"), out=str(many / "a.packed"))
            with pytest.raises(ConfigError, match="by another process, with other settings"):
                write(src=str(many / "src"), out=str(many / "a.packed"), size=3)
        original(self, part, report)

    monkeypatch.setattr(parts._Parts, "_write", write_and_call)
    write(src=str(many / "src"), out=str(many / "a.packed"))
    assert (many / "a.packed").read_bytes() == expected
    assert written == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


KILLED = """
import os, signal, sys
from diffusion.data import parts
from diffusion.runs.prepare import prepare
parts.PART = 4
original, left = parts._Parts._write, [int(sys.argv[3])]
def write(self, part, report):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    original(self, part, report)
parts._Parts._write = write
prepare(src=sys.argv[1], out=sys.argv[2])
"""


def test_killed_by_the_system(many):
    expected, out = whole(many), str(many / "a.packed")
    for parts_more in ("3", "2"):
        assert run("-c", KILLED, str(many / "src"), out, parts_more)[0] == -9
    assert parts.unfinished(many / "a.packed") == (5, 10)
    write(src=str(many / "src"), out=out)
    assert (many / "a.packed").read_bytes() == expected
    assert sorted(p.name for p in many.iterdir()) == ["a.packed", "src", "whole.packed"]


@pytest.mark.parametrize("workers", [0, -1, 10_000])
def test_wrong_number_of_workers(many, workers):
    with pytest.raises(ConfigError, match=f"workers={workers}; expected 1 to 256"):
        write(src=str(many / "src"), out=str(many / "a.packed"), workers=workers)
