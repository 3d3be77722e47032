"""MNIST, Fashion-MNIST and CIFAR-10 from files, folders and a stand-in for Hugging Face."""

import builtins
import gzip
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.data import hub, load_dataset
from diffusion.errors import ConfigError


def write_idx(path, array, compress=False):
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">i4").tobytes()
    content = header + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if compress else content)


def digits(n=6):
    return np.random.default_rng(n).integers(0, 256, (n, 28, 28)), np.arange(n) % 10


def test_real_mnist(real_data):
    train = load_dataset("mnist", path=real_data / "mnist", size=32)
    test = load_dataset("mnist", path=real_data / "mnist", split="test", size=28)
    assert train.images.shape == (60000, 32, 32, 1) and test.images.shape == (10000, 28, 28, 1)
    assert train.labels.bincount().tolist()[:3] == [5923, 6742, 5958]
    assert len(train.class_names) == 10
    assert train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert train.images[:, :2].max() == 0 and train.images[:, :, -2:].max() == 0  # the padding


def test_real_fashion_mnist(real_data):
    """Only the test split is there: it is taken unless train is asked for."""
    data = load_dataset("fashion_mnist", path=real_data / "fashion_mnist", size=32)
    assert data.images.shape == (10000, 32, 32, 1)
    assert data.class_names[data.labels[0]] == "ankle_boot"
    with pytest.raises(ConfigError, match="use split=test"):
        load_dataset("fashion_mnist", path=real_data / "fashion_mnist", split="train")


def test_real_cifar10_class_folders(real_data):
    data = load_dataset("cifar10", path=real_data / "cifar10")
    assert data.images.shape == (1000, 32, 32, 3)
    assert data.labels.bincount().tolist() == [100] * 10 and data.class_names[1] == "automobile"


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("folder", [".", "MNIST/raw"])
def test_idx_files(tmp_path, compress, folder):
    images, labels = digits()
    end = ".gz" if compress else ""
    write_idx(tmp_path / folder / f"train-images-idx3-ubyte{end}", images, compress)
    write_idx(tmp_path / folder / f"train-labels-idx1-ubyte{end}", labels, compress)
    data = load_dataset("mnist", path=tmp_path)
    assert np.array_equal(data.images[..., 0], images) and np.array_equal(data.labels, labels)
    padded = load_dataset("mnist", path=tmp_path, size=32)
    assert np.array_equal(padded.images[:, 2:-2, 2:-2, 0], images)
    assert load_dataset("mnist", path=tmp_path, size=[14, 20], channels=3).images.shape == (
        *(6, 14, 20),
        3,
    )


@pytest.mark.parametrize("damage", ["cut", "magic", "gzip", "labels", "classes"])
def test_damaged_idx(tmp_path, damage):
    images, labels = digits()
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels)
    path = tmp_path / "train-images-idx3-ubyte"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "magic":
        path.write_bytes(b"abcd" + path.read_bytes()[4:])
    elif damage == "gzip":
        path.rename(f"{path}.gz")
    elif damage == "labels":
        write_idx(tmp_path / "train-labels-idx1-ubyte", labels[1:])
    else:
        write_idx(tmp_path / "train-labels-idx1-ubyte", labels + 5)
    with pytest.raises(ConfigError):
        load_dataset("mnist", path=tmp_path)


def test_cifar10_binary_version(tmp_path):
    record = np.random.default_rng(0).integers(0, 256, (4, 3073), dtype=np.uint8)
    record[:, 0] = (3, 1, 4, 1)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    record[:2].tofile(folder / "data_batch_1.bin")
    record[2:].tofile(folder / "data_batch_2.bin")
    data = load_dataset("cifar10", path=tmp_path)
    assert data.labels.tolist() == [3, 1, 4, 1]
    assert np.array_equal(data.images[3, :, :, 2], record[3, 2049:].reshape(32, 32))
    (folder / "data_batch_2.bin").write_bytes(bytes(3074))
    with pytest.raises(ConfigError, match="3074"):
        load_dataset("cifar10", path=tmp_path)


def test_class_folders_of_a_split(tmp_path):
    for split, level in (("train", 10), ("test", 20)):
        for name in ("3", "7"):
            (tmp_path / split / name).mkdir(parents=True)
            image = Image.fromarray(np.full((28, 28), level, np.uint8))
            image.save(tmp_path / split / name / "0.png")
    for split, level in ((None, 10), ("test", 20)):
        data = load_dataset("mnist", path=tmp_path, split=split, size=28)
        assert data.images.shape == (2, 28, 28, 1) and (data.images == level).all()
        assert data.class_names == ("3", "7")


class _Table(dict):
    column_names = ("image", "label")


def test_hugging_face(monkeypatch):
    images, labels = digits()
    pictures = [Image.fromarray(image.astype(np.uint8)) for image in images]
    asked = []

    def fake(repository, split):
        asked.append((repository, split))
        return _Table(image=pictures, label=list(labels))

    monkeypatch.setattr(hub, "_hub_answers", lambda: True)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fake))
    data = load_dataset("mnist", split="test", size=28)
    assert np.array_equal(data.images[..., 0], images) and asked == [("ylecun/mnist", "test")]
    assert torch.equal(data.labels, torch.from_numpy(labels))


@pytest.mark.parametrize("failure", ["not installed", "no network"])
def test_no_way_to_the_data_names_both(monkeypatch, failure):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the hub\nand a long story")

    def no_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError("No module named 'datasets'")
        return importer(name, *args, **kwargs)

    monkeypatch.setattr(hub, "_hub_answers", lambda: True)
    importer = builtins.__import__
    if failure == "not installed":
        monkeypatch.setattr(builtins, "__import__", no_datasets)
    else:
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(ConfigError, match="set dataset.path .* or install") as caught:
        load_dataset("cifar10")
    assert "\n" not in str(caught.value)


def test_wrong_path_and_split(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        load_dataset("mnist", path=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="split=valid"):
        load_dataset("mnist", path=tmp_path, split="valid")
    with pytest.raises(ConfigError, match="set dataset.path"):
        load_dataset("cifar10", path=tmp_path)
    images, labels = digits()
    write_idx(tmp_path / "t10k-images-idx3-ubyte", images)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", labels)
    with pytest.raises(ConfigError, match="has no split=train but test; use split=test"):
        load_dataset("mnist", path=tmp_path, split="train")
