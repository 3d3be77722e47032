"""Tars, parquet files and sets of Hugging Face: the same images as in a folder."""

import contextlib
import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.data import load_dataset
from diffusion.errors import ConfigError
from diffusion.runs.prepare import prepare

from ..end_to_end.run import TINY, run

NAMES = ("cat", "dog")


def picture(i):
    return np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def png(i):
    file = io.BytesIO()
    Image.fromarray(picture(i)).save(file, "PNG")
    return file.getvalue()


IMAGES = torch.from_numpy(np.stack([picture(i) for i in range(10)]))
LABELS = torch.arange(10) % 2


def tar(path, samples, mode="w"):
    """`samples`: (name, content) of each file."""
    with tarfile.open(path, mode) as archive:
        for name, content in samples:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def shards(folder, label=lambda i: ("cls", str(i % 2))):
    """Ten samples in three tars, among other files."""
    folder.mkdir()
    for shard, numbers in enumerate((range(4), range(4, 5), range(5, 10))):
        files = []
        for i in numbers:
            extension, text = label(i)
            files += [(f"a/{i:04d}.txt", b"caption"), (f"a/{i:04d}.PNG", png(i))]
            files += [(f"a/{i:04d}.{extension}", text.encode())]
        tar(folder / f"shard-{shard:03d}.tar", files)
    return folder


@pytest.mark.parametrize("path", ["", "shard-*.tar", "shard-{000..002}.tar"], ids=str)
def test_tars(tmp_path, path):
    folder = shards(tmp_path / "set")
    data = load_dataset("webdataset", path=str(folder / path))
    assert torch.equal(data.images, IMAGES) and torch.equal(data.labels, LABELS)
    assert data.class_names is None and data.size == (8, 8)
    one = load_dataset("webdataset", path=str(folder / "shard-001.tar"), size=4)
    assert one.images.shape == (1, 4, 4, 3) and one.labels.tolist() == [0]
    data = load_dataset("webdataset", path=str(folder), label="none")
    said = f"{folder}: no sample has a .none; beside the images lies .cls, .txt"
    assert data.labels is None and data.notes == (said,)
    assert load_dataset("webdataset", path=str(folder), label=None).notes == ()


def test_labels_of_tars_that_are_names_or_in_json(tmp_path):
    by_name = shards(tmp_path / "a", lambda i: ("class.txt", NAMES[i % 2]))
    data = load_dataset("webdataset", path=str(by_name), label="class.txt")
    assert torch.equal(data.labels, LABELS) and data.class_names == NAMES
    assert load_dataset("webdataset", path=str(by_name), label="class").labels is None
    by_json = shards(tmp_path / "b", lambda i: ("json", json.dumps({"kind": NAMES[i % 2]})))
    data = load_dataset("webdataset", path=str(by_json), label="json.kind")
    assert torch.equal(data.labels, LABELS) and data.class_names == NAMES
    with pytest.raises(ConfigError, match=r"a file has no label json.size \(KeyError\('size'\)\)"):
        load_dataset("webdataset", path=str(by_json), label="json.size")


def test_wrong_tars(tmp_path):
    tar(tmp_path / "a.tar", [("0.png", png(0)), ("0.cls", b"1"), ("1.png", png(1))])
    tar(tmp_path / "b.tar", [("0.txt", b"nothing")])
    tar(tmp_path / "c.tar", [("0.png", png(0)), ("0.cls", b"-1")])
    tar(tmp_path / "d.tar.gz", [("0.png", png(0))], "w:gz")
    (tmp_path / "e.tar").write_bytes(b"no tar at all" * 100)
    tar(tmp_path / "f.tar", [("0.png", png(0)), ("0.json", b"[" * 100_000)])
    with pytest.raises(ConfigError, match="has no label json.class .RecursionError"):
        load_dataset("webdataset", path=str(tmp_path / "f.tar"), label="json.class")
    for path, message in (
        ("a.tar", "1 of 2 samples has no .cls; give dataset.label=null"),
        ("b.tar", "holds no image"),
        ("c.tar", "has the label -1; expected class numbers"),
        ("d.tar.gz", "it must not be compressed"),
        ("e.tar", "cannot be read as a tar"),
        ("x-{00..03}.tar", "no pattern that one of them matches"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            load_dataset("webdataset", path=str(tmp_path / path))
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="dataset.path is not set"):
        load_dataset("webdataset")


def test_files_of_one_name_in_several_folders(tmp_path):
    """All are read, and labels stay those of their images."""
    kinds = {"webdataset": "tar"}
    with contextlib.suppress(ImportError):
        import pyarrow as pa
        import pyarrow.parquet as pq

        kinds["parquet"] = "parquet"
    for part, numbers in (("a", (0, 1)), ("b", (3, 4))):
        (tmp_path / part).mkdir()
        files = [(f"{i}.png", png(n)) for i, n in enumerate(numbers)]
        labels = [(f"{i}.cls", str(n).encode()) for i, n in enumerate(numbers)]
        both = [file for pair in zip(files, labels, strict=True) for file in pair]
        tar(tmp_path / part / "0.tar", both)
        if "parquet" in kinds:
            rows = pa.table({"image": [png(n) for n in numbers], "label": numbers})
            pq.write_table(rows, tmp_path / part / "0.parquet")
    for kind, ending in kinds.items():
        data = load_dataset(kind, path=f"{tmp_path}/*/0.{ending}")
        assert torch.equal(data.images, IMAGES[[0, 1, 3, 4]])
        assert data.labels.tolist() == [0, 1, 3, 4]


def test_a_sample_that_is_there_twice(tmp_path):
    for names in (("1.png", "1.png"), ("1.png", "2.png", "1.png")):
        tar(tmp_path / "a.tar", [(name, png(1)) for name in names])
        with pytest.raises(ConfigError, match="a.tar has two samples of the name 1"):
            load_dataset("webdataset", path=str(tmp_path / "a.tar"))


@pytest.mark.parametrize("bytes_of_a_header", [0, 100, 512])
def test_a_tar_that_is_cut_off(tmp_path, bytes_of_a_header):
    """As by a download that was interrupted: also between two files, and within a header."""
    tar(tmp_path / "a.tar", [(f"{i}.png", png(i)) for i in range(4)])
    with tarfile.open(tmp_path / "a.tar") as archive:
        start = archive.getmembers()[2].offset
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[: start + bytes_of_a_header])
    with pytest.raises(ConfigError, match="a.tar .*cut off"):
        load_dataset("webdataset", path=str(tmp_path / "a.tar"))
    damaged = content[:start] + b"x" * 512 + content[start + 512 :]
    (tmp_path / "a.tar").write_bytes(damaged)
    with pytest.raises(ConfigError, match=f"is cut off or damaged: at byte {start} is neither"):
        load_dataset("webdataset", path=str(tmp_path / "a.tar"))


@pytest.fixture
def table(tmp_path):
    """Ten rows in two files of row groups of 3, with images as bytes and as the hub has them."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    about = {
        "info": {
            "features": {
                "image": {"_type": "Image"},
                "label": {"names": list(NAMES), "_type": "ClassLabel"},
            }
        }
    }
    (tmp_path / "set").mkdir()
    for file, numbers in enumerate((range(7), range(7, 10))):
        columns = {
            "image": pa.array([{"bytes": png(i), "path": None} for i in numbers], kind),
            "raw": pa.array([png(i) for i in numbers], pa.binary()),
            "label": pa.array([i % 2 for i in numbers]),
            "kind": pa.array([NAMES[i % 2] for i in numbers]),
        }
        rows = pa.table(columns)
        rows = rows.replace_schema_metadata({"huggingface": json.dumps(about)})
        pq.write_table(rows, tmp_path / "set" / f"train-{file}.parquet", row_group_size=3)
    return tmp_path / "set"


@pytest.mark.parametrize("column", ["image", "raw"])
def test_parquet(table, column):
    data = load_dataset("parquet", path=str(table), column=column)
    assert torch.equal(data.images, IMAGES) and torch.equal(data.labels, LABELS)
    assert data.class_names == NAMES
    data = load_dataset("parquet", path=str(table / "train-*.parquet"), label="kind")
    assert torch.equal(data.labels, LABELS) and data.class_names == NAMES
    one = load_dataset("parquet", path=str(table / "train-1.parquet"), classes=False)
    assert torch.equal(one.images, IMAGES[7:]) and one.labels is None


def test_wrong_parquet(table, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    for options, message in (
        ({"path": str(table), "column": "imag"}, "column=imag is no column of .*; did you mean"),
        ({"path": str(table), "label": "labels"}, "label=labels is no column of .*; did you mean"),
        (
            {"path": str(table), "column": "kind"},
            "images cannot be decoded, .*is str, and no image",
        ),
        ({"path": str(tmp_path / "a.parquet")}, "cannot be read as parquet"),
        ({"path": str(tmp_path / "b.parquet")}, "no pattern that one of them matches"),
        ({}, "dataset.path is not set"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            load_dataset("parquet", **options)
        assert "\n" not in str(error.value)


def test_hugging_face(table, tmp_path, monkeypatch):
    """A folder of parquet is a set for the library, as one on the hub is."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = load_dataset("huggingface", repository=str(table))
    assert torch.equal(data.images, IMAGES) and torch.equal(data.labels, LABELS)
    assert data.class_names == NAMES and data.name == "set"
    for options, message in (
        ({"column": "kind"}, "column=kind of .*; expected images, which are in image"),
        ({"column": "imag"}, "column=imag is no column of .*; did you mean image"),
        ({"split": "nowhere"}, "is not available from Hugging Face"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            load_dataset("huggingface", repository=str(table), **options)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="dataset.repository is not set"):
        load_dataset("huggingface")
    out = tmp_path / "a.packed"
    prepare(src=f"hf:{table}", out=str(out))
    packed = load_dataset("packed", path=out)
    assert torch.equal(packed.images, IMAGES) and packed.class_names == NAMES


@pytest.mark.parametrize(("kind", "workers"), [("tars", 1), ("parquet", 2)])
def test_they_are_prepared(tmp_path, request, kind, workers):
    src = request.getfixturevalue("table") if kind == "parquet" else shards(tmp_path / "tars")
    code, out, err = run(
        *("tools/prepare.py", f"src={src}", "out=a.packed", f"workers={workers}"),
        cwd=tmp_path,
        fresh=workers > 1,
    )
    assert code == 0, err
    packed = load_dataset("packed", path=tmp_path / "a.packed")
    assert torch.equal(packed.images, IMAGES) and torch.equal(packed.labels, LABELS)
    prepare(src=str(src), out=str(tmp_path / "b.packed"), classes=False)
    assert load_dataset("packed", path=tmp_path / "b.packed").labels is None


def test_trained_on(tmp_path):
    """From the command line, with the classes that the tars name."""
    shards(tmp_path / "set", lambda i: ("cls", NAMES[i % 2]))
    tiny = [setting for setting in TINY if not setting.startswith(("dataset", "experiment"))]
    command = ["train.py", *tiny, "dataset=webdataset", "dataset.path=set", "dataset.size=null"]
    command += ["model=unet_tiny", "model.num_classes=auto", "train.steps=1", "run_dir=run"]
    code, out, err = run(*command, cwd=tmp_path)
    assert code == 0, err
    assert "10 images 8x8x3" in out
    code, _, err = run(*command, "run_dir=other", "dataset.path=nothing", cwd=tmp_path)
    assert code == 2 and "no pattern that one of them matches" in err and "Traceback" not in err
