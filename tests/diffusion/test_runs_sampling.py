"""Sampling from weights files and damaged checkpoints; what is refused."""

import errno
import re

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from diffusion.data import ImageSet
from diffusion.data.packed import write_packed
from diffusion.data.values import Pixels
from diffusion.errors import ConfigError
from diffusion.factory import build_model
from diffusion.formats.checkpoint import read_state, save_checkpoint
from diffusion.formats.trained import load_trained
from diffusion.formats.weights import save_unet_cu
from diffusion.models.flat_parameters import FlatParameters
from diffusion.runs import outputs
from diffusion.runs.picture_folder import PictureFolder
from diffusion.runs.sampling import sample
from diffusion.runtime import progress
from diffusion.runtime.backend import TORCH_FP32
from triton_diffusion.entry import CONFIGS

from .golden_unet import OPTIONS

MODEL = yaml.safe_load((CONFIGS / "model" / "unet_cu.yaml").read_text())
MODEL |= {"model_channels": 32, "channel_mult": [1, 2], "num_res_blocks": 1}
MODEL |= {"attention_resolutions": [2]}


def network(**options) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(MODEL | options, TORCH_FP32, (8, 12), 3, False, torch.device("cpu"))


@pytest.fixture
def checkpoint(tmp_path):
    """Of a model with three classes."""
    state = {"step": 1, "image_shape": [8, 12, 3], "class_names": ["down", "curled", "raised"]}
    model = MODEL | {"num_classes": 3}
    config = {"model": model, "diffusion": {}, "train": {"precision": "fp32"}}
    flat = FlatParameters(network(num_classes=3))
    return save_checkpoint(tmp_path / "run" / "checkpoints", flat, state, config, keep=1)


def draw(ckpt, **options) -> np.ndarray:
    out = ckpt.with_suffix(".npz")
    settings = {"ckpt": str(ckpt), "n": 2, "steps": 2, "out": str(out), "device": "cpu"}
    sample(settings | options)
    return np.load(out)["arr_0"]


def test_from_a_bin_of_unet_cu(tmp_path):
    """It says the size of its images, the configuration the rest."""
    path = tmp_path / "weights.bin"
    save_unet_cu(path, network())
    assert draw(path, model=MODEL).shape == (2, 8, 12, 3)
    with pytest.raises(ConfigError, match=r"size=\[16, 16\], but .* was trained at \[8, 12\]"):
        draw(path, model=MODEL, size=16)
    with pytest.raises(ConfigError, match="does not say its network"):
        draw(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="weights.bin"):
        draw(path, model=MODEL)


def test_from_the_recorded_bin(golden, tmp_path):
    options = {key: value for key, value in OPTIONS["unet_cu_small"].items() if key in MODEL}
    out = tmp_path / "a.npz"
    settings = {"ckpt": str(golden / "unet_cu_small.bin"), "n": 1, "steps": 1, "out": str(out)}
    sample(settings | {"model": MODEL | options, "device": "cpu"})
    assert np.load(out)["arr_0"].shape == (1, 16, 16, 3)


def test_a_data_set_is_no_weights_file(tmp_path):
    path = tmp_path / "data.bin"
    write_packed(path, ImageSet(torch.zeros(2, 8, 12, 3, dtype=torch.uint8)))
    with pytest.raises(ConfigError, match="is a unet.cu data set .* not weights"):
        draw(path, model=MODEL)


def test_a_class_by_name_or_number(checkpoint):
    assert np.array_equal(draw(checkpoint, label="curled"), draw(checkpoint, label=1))
    for label in ("curld", 3, -1):
        words = f"label={label} is unknown; the model has 3 classes: down, curled, raised"
        with pytest.raises(ConfigError, match=words):
            draw(checkpoint, label=label)


@pytest.mark.parametrize(("label", "expected"), [(None, [0, 1, 2, 0]), ("curled", [1] * 4)])
def test_the_classes_of_the_images_are_beside_them(checkpoint, label, expected):
    """As guided-diffusion writes them."""
    draw(checkpoint, n=4, label=label, steps=1)
    with np.load(checkpoint.with_suffix(".npz")) as file:
        assert sorted(file.files) == ["arr_0", "arr_1"]
        assert file["arr_0"].shape == (4, 8, 12, 3) and file["arr_0"].dtype == np.uint8
        assert file["arr_1"].tolist() == expected and file["arr_1"].dtype == np.int64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 0}, "n=0"),
        ({"n": "x"}, "n=x is wrong; expected a whole number"),
        ({"ema": "maybe"}, "ema=maybe is wrong; expected true, false, a decay"),
        ({"seed": -1}, "seed=-1"),
        ({"sampler": "dpm"}, "sampler=dpm is unknown; choose one of ddpm, ddim"),
        ({"steps": 2000}, "steps=2000"),
        ({"steps": "ddim999"}, "steps=ddim999: no integer stride"),
        ({"steps": [1, 1, 334]}, "asks for 334 of 333 timesteps"),
        ({"eta": 5}, "eta=5"),
        ({"out": "a.jpg"}, "a.jpg"),
        ({"guidance": 3}, "guidance=3"),
        ({"model": MODEL}, "says its own"),
        ({"lable": 1}, "lable is unknown; did you mean label?"),
    ],
)
def test_wrong_settings(checkpoint, options, words):
    with pytest.raises(ConfigError) as caught:
        draw(checkpoint, **options)
    assert words in str(caught.value)


@pytest.mark.parametrize("option", [{"size": 8}, {"size": [12, 8]}, {"channels": 1}], ids=str)
def test_a_run_is_drawn_as_it_was_trained(checkpoint, option):
    with pytest.raises(ConfigError, match=f"{next(iter(option))}=.*was trained"):
        draw(checkpoint, **option)


@pytest.mark.parametrize("steps", ["ddim2", "2", [1, 1]], ids=str)
def test_respacing_of_guided_diffusion(checkpoint, steps):
    """As many steps, and ddim2's are others."""
    same = np.array_equal(draw(checkpoint, steps=steps), draw(checkpoint, steps=2))
    assert same == (steps == "2")


def test_pictures_drawn_otherwise_do_not_replace_each_other(checkpoint):
    settings = {"ckpt": str(checkpoint), "n": 1, "steps": 2, "device": "cpu"}
    others = ({"label": "curled"}, {"label": 2}, {"eta": 0.5}, {"clip": None}, {"ema": False})
    others += ({"spacing": "trailing"}, {"steps": [1, 1]}, {"steps": "ddim2"}, {"seed": 1})
    names = [sample(settings | other).name for other in ({}, *others)]
    assert len(set(names)) == len(names)
    assert names[:2] == [
        "sample_step_00000001_ddim2_0.png",
        "sample_step_00000001_ddim2_label-curled_0.png",
    ]
    assert names[5] == "sample_step_00000001_ema-false_ddim2_0.png"


@pytest.mark.parametrize("out", ["file", "file/a.png", "file/b/a.npz", "file/folder"])
def test_a_place_for_the_result_is_looked_for_before_drawing(checkpoint, tmp_path, capsys, out):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file"):
        draw(checkpoint, out=str(tmp_path / out))
    assert "drawing" not in capsys.readouterr().out


def test_a_place_that_may_not_be_written_to(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("diffusion.errors.os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="a.png cannot be written: permission denied for"):
        draw(checkpoint, out=str(tmp_path / "new" / "a.png"))
    assert not (tmp_path / "new").exists()


def test_the_system_is_no_place_for_the_result(checkpoint, capsys):
    with pytest.raises(ConfigError, match="/proc is of the system"):  # which root may write to
        draw(checkpoint, out="/proc/a.png")
    assert "sampling in" not in capsys.readouterr().out


def test_images_of_an_earlier_drawing_in_the_folder_are_said(checkpoint, tmp_path, recwarn):
    settings = {"ckpt": str(checkpoint), "steps": 1, "device": "cpu", "out": str(tmp_path / "all")}
    sample(settings | {"n": 3})
    sample(settings | {"n": 3, "seed": 1})
    assert not recwarn.list
    with pytest.warns(UserWarning, match="all has 2 images more, of an earlier drawing"):
        sample(settings | {"n": 1})


@pytest.mark.parametrize("name", ["000000.png", "img.jpg", "grid.PNG"])
def test_a_data_set_is_no_place_for_images(checkpoint, tmp_path, name):
    """Even where its files are called as those of a drawing are; nothing is written over. What is
    no image may lie beside them."""
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (8, 8), "red").save(folder / name)
    early, settings = files(folder), {"n": 2, "steps": 1, "device": "cpu", "out": str(folder)}
    with pytest.raises(ConfigError, match=f"photos holds other images, such as {name}; give"):
        sample(settings | {"ckpt": str(checkpoint)})
    assert files(folder) == early
    (folder / name).unlink()
    (folder / "notes.txt").write_text("")
    sample(settings | {"ckpt": str(checkpoint)})
    sample(settings | {"ckpt": str(checkpoint), "seed": 1})


@pytest.fixture
def stopped(checkpoint, tmp_path, monkeypatch, capsys):
    """Settings of a drawing of 5 images in 3 batches into a folder, stopped in the third."""
    settings = {"ckpt": str(checkpoint), "n": 5, "batch_size": 2, "steps": 1, "device": "cpu"}
    settings |= {"out": str(tmp_path / "all")}
    sample(settings | {"out": str(tmp_path / "whole")})
    batches = []

    def finish(self, x, finish=Pixels.finish):
        batches.append(len(x))
        if len(batches) == 3:
            raise KeyboardInterrupt
        return finish(self, x)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Pixels, "finish", finish)
        sample(settings)
    assert "2 of 3 batches are in" in capsys.readouterr().out
    return settings


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_keeps_what_a_stopped_drawing_has_and_goes_on(stopped, tmp_path, capsys):
    early, first = files(tmp_path / "all"), tmp_path / "all" / "000000.png"
    assert sorted(early) == [".drawing.json", *(f"{i:06d}.png" for i in range(4))]
    Image.new("RGB", (12, 8), "red").save(first)  # which is not drawn again
    sample(stopped)
    assert "all has 2 of 3 batches of this drawing" in capsys.readouterr().out
    assert Image.open(first).getpixel((0, 0)) == (255, 0, 0)
    first.write_bytes(early["000000.png"])
    whole = files(tmp_path / "whole")
    assert files(tmp_path / "all") | {"grid.png": whole["grid.png"]} == whole


def test_a_folder_that_another_process_draws_into_is_refused(stopped, tmp_path):
    early = files(tmp_path / "all")
    other = PictureFolder(tmp_path / "all", "another drawing", 1)
    with pytest.raises(ConfigError, match="out=.*all: another process draws into it"):
        sample(stopped)
    assert files(tmp_path / "all") == early
    other.close()
    sample(stopped)


@pytest.mark.parametrize("other", [{"seed": 1}, {"n": 6}, {"ema": False}], ids=str)
def test_another_drawing_begins_anew(stopped, tmp_path, capsys, other):
    sample(stopped | other)
    assert "goes on" not in capsys.readouterr().out
    sample(stopped | other | {"out": str(tmp_path / "other")})
    assert files(tmp_path / "all") == files(tmp_path / "other")


@pytest.mark.parametrize("damaged", [None, b"", b"\x89PNG\r\n"])
def test_a_batch_that_is_not_whole_is_drawn_again(stopped, tmp_path, capsys, damaged):
    path = tmp_path / "all" / "000003.png"  # of the second
    path.unlink() if damaged is None else path.write_bytes(damaged)
    sample(stopped)
    assert "1 of 3 batches" in capsys.readouterr().out
    assert files(tmp_path / "all") == files(tmp_path / "whole")


def test_a_drawing_of_other_weights_begins_anew(stopped, checkpoint, tmp_path, capsys):
    """As of a run that has been trained on, under the same name."""
    trained = network(num_classes=3)
    trained.get_parameter("out.0.bias").data[1] = 1.0
    state, config = read_state(checkpoint)
    save_checkpoint(checkpoint.parent, FlatParameters(trained), state, config, keep=1)
    sample(stopped)
    assert "goes on" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000])
def test_a_damaged_record_of_a_drawing_is_none(stopped, tmp_path, text, capsys):
    (tmp_path / "all" / ".drawing.json").write_text(text)
    sample(stopped)
    assert "goes on" not in capsys.readouterr().out
    assert files(tmp_path / "all") == files(tmp_path / "whole")


def test_a_folder_whose_name_has_a_dot(checkpoint, tmp_path):
    settings = {"ckpt": str(checkpoint), "n": 2, "steps": 1, "device": "cpu"}
    settings |= {"out": str(tmp_path / "eta0.5")}
    with pytest.raises(ConfigError, match="eta0.5; expected a .png .* has to be there"):
        sample(settings)
    (tmp_path / "eta0.5").mkdir()
    sample(settings)
    names = sorted(path.name for path in (tmp_path / "eta0.5").iterdir())
    assert names == ["000000.png", "000001.png", "grid.png"]


def test_progress_without_a_terminal(checkpoint, monkeypatch, capsys):
    draw(checkpoint, steps=3, n=4, batch_size=2)
    assert "\nstep" not in capsys.readouterr().out  # of seconds nobody has to be told
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    draw(checkpoint, steps=3, n=4, batch_size=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.split(",")[0] for line in lines] == [f"step: {k} of 6" for k in range(1, 7)]
    assert re.fullmatch(r"step: 6 of 6, \S+ step/s, about 0 s left", lines[-1])


def test_a_folder_of_images_of_many_channels(tmp_path):
    path, model = tmp_path / "weights.bin", MODEL | {"name": "unet"}
    save_unet_cu(path, build_model(model, TORCH_FP32, (8, 12), 5, False, torch.device("cpu")))
    assert draw(path, model=model).shape == (2, 8, 12, 5)
    with pytest.raises(ConfigError, match="a PNG has no 5 channels; expected a .npz"):
        sample({"ckpt": str(path), "model": model, "out": str(tmp_path / "folder")})
    assert not (tmp_path / "folder").exists()


def test_size_and_channels_of_the_run_may_be_given(checkpoint):
    assert draw(checkpoint, size=[8, 12], channels=3).shape == (2, 8, 12, 3)


def test_a_truncated_checkpoint(checkpoint):
    file = checkpoint / "ema.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(ConfigError, match="ema.safetensors cannot be read, it may be truncated"):
        draw(checkpoint)
    file.write_bytes(whole)
    (checkpoint / "SHA256SUMS").unlink()  # as in a checkpoint of format 1, which had no digests
    for shape in ("", ', "image_shape": null', ', "image_shape": [8, 8]'):
        (checkpoint / "state.json").write_text(f'{{"format": 1, "step": 1{shape}}}')
        with pytest.raises(ConfigError, match="state.json does not say image_shape as"):
            draw(checkpoint)


def test_a_file_has_no_averages_by_their_decay(tmp_path):
    (tmp_path / "w.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="ema=0.99, but .* has one average at most"):
        load_trained(tmp_path / "w.pt", torch.device("cpu"), ema=0.99, model={"name": "unet"})


@pytest.mark.parametrize("name", [["unet"], None, "unet1d"])
def test_a_network_of_no_such_name(tmp_path, name):
    (tmp_path / "w.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="model.name=.* choose one of unet"):
        load_trained(tmp_path / "w.pt", torch.device("cpu"), model={"name": name}, size=8)


def test_weights_of_a_run_that_diverged_are_said_to_be(tmp_path):
    model = network()
    model.get_parameter("out.0.bias").data[1] = float("inf")
    save_unet_cu(tmp_path / "weights.bin", model)
    with pytest.warns(UserWarning, match="not finite in 1 of .* such as out.0.bias"):
        draw(tmp_path / "weights.bin", model=MODEL)


def test_a_full_disk_keeps_the_older_picture(checkpoint, monkeypatch):
    draw(checkpoint)
    before = checkpoint.with_suffix(".npz").read_bytes()

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(outputs.np, "savez", full)
    with pytest.raises(ConfigError, match="npz cannot be written: No space left on device"):
        draw(checkpoint, seed=1)
    assert checkpoint.with_suffix(".npz").read_bytes() == before
