"""One-file data sets: written whole or not at all, read back bit for bit, refused when damaged."""

import random
import struct

import numpy as np
import pytest
import torch

from diffusion.data import image_digests, load_dataset
from diffusion.data.batches import Batches
from diffusion.data.image_set import ImageSet
from diffusion.data.packed import load_packed, packed_writer, write_packed
from diffusion.errors import ConfigError

from ..end_to_end.run import run


def random_set(n=5, h=4, w=6, c=3, labelled=True):
    generator = torch.Generator().manual_seed(n)
    images = torch.randint(0, 256, (n, h, w, c), dtype=torch.uint8, generator=generator)
    labels = torch.arange(n) % 2 if labelled else None
    return ImageSet(images, labels, ("cat", "Schildkröte") if labelled else None, "random")


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("shape", [(5, 4, 6, 3), (1, 1, 1, 1), (3, 5, 7, 4)], ids=str)
def test_packed_round_trip(tmp_path, shape, labelled):
    data = random_set(*shape, labelled=labelled)
    write_packed(tmp_path / "a.packed", data)
    back = load_packed(tmp_path / "a.packed")
    assert torch.equal(back.images, data.images) and back.class_names == data.class_names
    assert torch.equal(back.labels, data.labels) if labelled else back.labels is None
    assert back.images.is_contiguous()


def test_packed_is_mapped_and_private(tmp_path):
    """Writing to the tensor never reaches the file."""
    write_packed(tmp_path / "a.packed", random_set())
    before = (tmp_path / "a.packed").read_bytes()
    load_packed(tmp_path / "a.packed").images.zero_()
    assert (tmp_path / "a.packed").read_bytes() == before


def test_bin_round_trip_is_exact_for_every_level(tmp_path):
    levels = torch.arange(256, dtype=torch.uint8).view(1, 8, 32, 1).expand(2, 8, 32, 3)
    write_packed(tmp_path / "a.bin", ImageSet(levels.contiguous()))
    back = load_packed(tmp_path / "a.bin")
    assert torch.equal(back.images, levels)
    write_packed(tmp_path / "b.bin", back)
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()


def test_bin_is_the_format_of_unet_cu(tmp_path):
    data = random_set(n=3, labelled=False)
    header = np.zeros(256, dtype=np.int32)
    header[:5] = (20240620, 3, 3, 4, 6)
    x = data.images.numpy().astype(np.float32) / 127.5 - 1
    expected = header.tobytes() + x.transpose(0, 3, 1, 2).astype("float32").tobytes()
    write_packed(tmp_path / "ours.bin", data)
    assert (tmp_path / "ours.bin").read_bytes() == expected
    (tmp_path / "theirs.bin").write_bytes(expected)
    assert torch.equal(load_dataset("packed", path=tmp_path / "theirs.bin").images, data.images)


def test_bin_between_the_levels_is_rounded_and_said(tmp_path, caplog):
    header = np.zeros(256, dtype=np.int32)
    header[:5] = (20240620, 1, 1, 1, 2)
    values = np.array([0.0, 0.5], dtype=np.float32)  # 127.5 and 191.25
    (tmp_path / "a.bin").write_bytes(header.tobytes() + values.tobytes())
    assert load_packed(tmp_path / "a.bin").images.flatten().tolist() == [128, 191]
    assert "rounded" in caplog.text


@pytest.mark.parametrize("value", [2.0, -1.5, float("nan"), float("inf")])
def test_bin_of_something_else(tmp_path, value):
    header = np.zeros(256, dtype=np.int32)
    header[:5] = (20240620, 1, 1, 1, 1)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + np.float32(value).tobytes())
    with pytest.raises(ConfigError, match=r"outside \[-1, 1\]"):
        load_packed(tmp_path / "a.bin")


@pytest.mark.parametrize("suffix", ["packed", "bin"])
@pytest.mark.parametrize("cut", [-1, 1, 600, 3000], ids=["longer", "one byte", "600", "3000"])
def test_damaged_length_names_both_sizes(tmp_path, suffix, cut):
    path = tmp_path / f"a.{suffix}"
    write_packed(path, random_set(n=20))
    content = path.read_bytes()
    path.write_bytes(content + b"x" if cut < 0 else content[:-cut])
    found = path.stat().st_size
    with pytest.raises(ConfigError, match=f"should have {len(content)} bytes.*has {found}") as e:
        load_packed(path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with"),
        (b"\x89PNG" + bytes(2000), "no image data"),
        (struct.pack("<i", 12345678) + bytes(2000), "unet.cu weights"),
        (b"TDPACKED", "truncated"),
        (b"TDPACKED" + struct.pack("<II6Q", 9, 0, 1, 1, 1, 1, 0, 0) + bytes(5000), "version 9; th"),
        (b"TDPACKED" + struct.pack("<II6Q", 1, 0, 0, 8, 8, 3, 0, 0) + bytes(4032), "no image"),
        (struct.pack("<5i", 20240620, 1, 3, 4, 4), "truncated"),
        (struct.pack("<5i", 20240620, -1, -3, 4, 4) + bytes(1196), "no image"),
    ],
    ids=["empty", "png", "weights", "magic only", "version", "N = 0", "short bin", "negative"],
)
def test_wrong_header(tmp_path, content, message):
    (tmp_path / "a.packed").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_packed(tmp_path / "a.packed")


def test_labels_outside_the_classes(tmp_path):
    data = random_set()
    data.labels[0] = 2
    write_packed(tmp_path / "a.packed", data)
    with pytest.raises(ConfigError, match="labels do not fit"):
        load_packed(tmp_path / "a.packed")


def test_size_and_channels_are_checked(tmp_path):
    write_packed(tmp_path / "a.packed", random_set())
    assert load_packed(tmp_path / "a.packed", size=[4, 6], channels=3).size == (4, 6)
    with pytest.raises(ConfigError, match="size=64 differs from the 4x6"):
        load_packed(tmp_path / "a.packed", size=64)
    with pytest.raises(ConfigError, match="channels=1 differs from the 3"):
        load_packed(tmp_path / "a.packed", channels=1)


def test_no_path_and_no_file(tmp_path):
    for path in (None, tmp_path / "nothing.bin", tmp_path):
        with pytest.raises(ConfigError, match="prepare.py"):
            load_packed(path)


@pytest.mark.parametrize("suffix", ["packed", "bin"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), packed_writer(path, (2, 2), 1) as writer:
        writer.append(np.zeros((2, 2, 1), np.uint8))
        raise RuntimeError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_packed(tmp_path / "file/a.packed", random_set())


def version_1(data: ImageSet, names=b'["cat", "Schildkr\\u00f6te"]') -> bytes:
    """As versions before this one wrote it: without digests."""
    n, h, w, c = data.images.shape
    header = b"TDPACKED" + struct.pack("<II6Q", 1, 0, n, h, w, c, n, len(names))
    labels = data.labels.numpy().astype("<i8").tobytes()
    return header.ljust(4096, b"\0") + data.images.numpy().tobytes() + labels + names


def test_a_file_without_digests_is_read_with_a_note(tmp_path):
    data = random_set()
    (tmp_path / "a.packed").write_bytes(version_1(data))
    with pytest.warns(UserWarning, match="a.packed was written without digests"):
        back = load_packed(tmp_path / "a.packed")
    back.check()
    assert torch.equal(back.images, data.images) and back.class_names == data.class_names
    write_packed(tmp_path / "b.packed", back)
    write_packed(tmp_path / "c.packed", data)
    assert (tmp_path / "b.packed").read_bytes() == (tmp_path / "c.packed").read_bytes()


@pytest.mark.filterwarnings("ignore:.* was written without digests")
@pytest.mark.parametrize("names", [b"{", b"7", b"[" * 100_000], ids=["cut", "number", "deep"])
def test_class_names_that_are_none(tmp_path, names):
    (tmp_path / "a.packed").write_bytes(version_1(random_set(), names))
    with pytest.raises(ConfigError, match="a.packed is damaged: its class names are no JSON"):
        load_packed(tmp_path / "a.packed")


def flipped(content: bytes, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_every_flipped_bit_is_seen(tmp_path):
    """Of images when they are read, of all else when the file is opened."""
    path = tmp_path / "a.packed"
    write_packed(path, random_set(n=40))
    content, images = path.read_bytes(), range(4096, 4096 + 40 * 72)
    whole = load_packed(path)
    bits = random.Random(0).sample(range(8 * len(content)), 150)
    bits += [8 * byte for byte in (9, 16, 63, 64, 95, 96, 4095, len(content) - 1)]
    for bit in bits:
        path.write_bytes(flipped(content, bit))
        if bit // 8 in images:
            data, damaged = load_packed(path), (bit // 8 - 4096) // 72
            data.check(np.array([i for i in range(40) if i != damaged]))
            with pytest.raises(ConfigError, match=f"a.packed is damaged: image {damaged} is not"):
                data.check(np.array([0, damaged, damaged, 39]))
        else:
            with pytest.raises(ConfigError, match="a.packed"):
                load_packed(path)
    path.write_bytes(content)
    assert torch.equal(load_packed(path).images, whole.images)


@pytest.mark.parametrize("resident_bytes", [0, 2**30], ids=["gathered", "resident"])
def test_who_trains_on_an_image_checks_it(tmp_path, resident_bytes):
    path = tmp_path / "a.packed"
    write_packed(path, random_set(n=40))
    path.write_bytes(flipped(path.read_bytes(), 8 * (4096 + 25 * 72)))
    device = torch.device("cpu")
    with pytest.raises(ConfigError, match="image 25 is not as it was written"):
        batches = Batches(load_packed(path), 4, 0, device, resident_bytes=resident_bytes)
        for step in range(10):
            batches.load(step)
    with pytest.raises(ConfigError, match="image 25"):
        write_packed(tmp_path / "b.packed", load_packed(path))
    assert [p.name for p in tmp_path.iterdir()] == ["a.packed"]


def test_images_are_compared_once(tmp_path, monkeypatch):
    write_packed(tmp_path / "a.packed", random_set(n=10))
    data, compared = load_packed(tmp_path / "a.packed"), []

    def digest(content, wrapped=image_digests.image_digest):
        compared.append(len(content))
        return wrapped(content)

    monkeypatch.setattr(image_digests, "image_digest", digest)
    for index in ([3, 3, 4], [4, 5], None, None, []):
        data.check(None if index is None else np.array(index, dtype=np.int64))
    assert compared == [72] * 10


KILLED = """
import os, signal, sys
import numpy as np
from pathlib import Path
from diffusion.data.packed import packed_writer
with packed_writer(Path(sys.argv[1]), (2, 2), 1) as writer:
    writer.append(np.zeros((2, 2, 1), np.uint8))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_has_begun_is_deleted_by_the_next(tmp_path):
    for name in ("a.packed", "b.bin"):
        assert run("-c", KILLED, str(tmp_path / name))[0] == -9
        assert [path.name for path in tmp_path.iterdir()] == [f".writing_{name}"]
    write_packed(tmp_path / "c.packed", random_set())
    assert [path.name for path in tmp_path.iterdir()] == ["c.packed"]


def test_two_that_write_the_same_file(tmp_path):
    """The second is refused and takes nothing from the first."""
    path, image = tmp_path / "a.packed", np.ones((2, 2, 1), np.uint8)
    with packed_writer(path, (2, 2), 1) as writer:
        writer.append(image)
        with pytest.raises(ConfigError, match="a.packed is being written by another process"):
            write_packed(path, random_set())
        write_packed(tmp_path / "b.packed", random_set())
        writer.append(image)
    assert len(load_packed(path)) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.packed", "b.packed"]


def test_an_image_of_floats_is_refused(tmp_path):
    with packed_writer(tmp_path / "a.packed", (2, 2), 3) as writer:
        with pytest.raises(ValueError, match=r"float64 \[2, 2, 3\]; expected uint8 \[2, 2, 3\]"):
            writer.append(np.zeros((2, 2, 3)))
        writer.append(np.zeros((2, 2, 3), dtype=np.uint8))
