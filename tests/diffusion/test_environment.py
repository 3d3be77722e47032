"""What a run writes down of versions, commit and hardware, and its film strip."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import diffusion
from diffusion.runs.training import train
from diffusion.tracking import environment as module
from diffusion.tracking.environment import environment, note_environment, read_environments
from diffusion.tracking.pictures import draw_film, grid, grid_rows, save_grid

from ..end_to_end.run import TINY, rows
from ..test_configs import composed

CPU = torch.device("cpu")


def test_a_run_says_what_it_was_trained_with(tmp_path, monkeypatch):
    """And that it went on with something else: one entry more, behind what was before."""
    settings = (*TINY, "train.sample_every=2", "train.save_every=1")
    train(composed(*settings, "train.steps=2"), tmp_path)
    (first,) = read_environments(tmp_path)
    assert first["packages"]["torch"] == torch.__version__ and first["device"] == "cpu"
    assert first["packages"]["triton-diffusion"] == diffusion.__version__
    assert first["from_step"] == 0 and first["processes"] == 1 and first["memory_gib"] > 0
    if (module._SOURCE / ".git").exists():
        assert len(first["commit"]) == 40 and first["changed"] in (True, False)
    train(composed(*settings, "train.steps=3"), tmp_path)  # in the same
    assert read_environments(tmp_path) == [first]
    monkeypatch.setattr(module.platform, "python_version", lambda: "9.9")
    train(composed(*settings, "train.steps=4"), tmp_path)
    _, second = read_environments(tmp_path)
    assert (second["from_step"], second["python"]) == (3, "9.9")
    assert f"python: {first['python']} -> 9.9" in (tmp_path / "train.log").read_text()
    # the film: a row of each look, of the same seeds
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        f"step_{step:08d}.png" for step in (2, 3, 4)
    ]
    film, frame = (
        Image.open(tmp_path / name) for name in ("film.png", "samples/step_00000004.png")
    )
    row = (frame.height - 2) // 2  # of two
    assert film.height == 3 * row + 2 and film.width > frame.width
    last = np.asarray(film)[2 * row :, -frame.width :]
    assert (last[:row] == np.asarray(frame)[:row]).all()
    assert {float(row["gpu_gib"]) for row in rows(tmp_path)} == {0.0}


@pytest.mark.gpu
def test_a_run_on_a_gpu_names_it_and_the_memory_that_it_took(tmp_path):
    train(composed(*TINY, "device=cuda", "backend=torch", "train.steps=3"), tmp_path)
    (found,) = read_environments(tmp_path)
    assert found["device"] == "cuda" and found["gpu"] == torch.cuda.get_device_name()
    assert found["gpu_memory_gib"] > 1
    taken = [float(row["gpu_gib"]) for row in rows(tmp_path)]
    assert len(taken) == 3 and 0 < taken[0] <= taken[-1] < found["gpu_memory_gib"]


def test_a_run_from_an_earlier_step_has_its_own_past(tmp_path):
    found = environment(CPU, 1)
    for step, python in ((0, "3.10"), (50, "3.11"), (90, "3.12")):
        note_environment(tmp_path, step, found | {"python": python})
    changed = note_environment(tmp_path, 60, found | {"python": "3.13"})
    assert changed == {"python": ("3.11", "3.13")}
    steps = [(e["from_step"], e["python"]) for e in read_environments(tmp_path)]
    assert steps == [(0, "3.10"), (50, "3.11"), (60, "3.13")]
    note_environment(tmp_path, 0, found)
    assert [e["from_step"] for e in read_environments(tmp_path)] == [0]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"from_step": "x"}]', "[" * 99_999])
def test_a_file_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / module.FILE).write_text(text)
    assert read_environments(tmp_path) == []
    note_environment(tmp_path, 5, {"python": "3"})
    assert json.loads((tmp_path / module.FILE).read_text())[0]["from_step"] == 5


def test_a_film_of_many_looks_has_the_first_and_the_last(tmp_path):
    for step in range(1, 31):
        images = np.full((5, 8, 8, 3), step * 8, np.uint8)
        save_grid(grid(images), grid_rows(5), tmp_path / f"step_{step:08d}.png")
    plot = Image.new("RGB", (30, 30))
    save_grid(plot, 0, tmp_path / "step_00000031.png")  # no grid: of actions
    draw_film(tmp_path, tmp_path / "film.png", frames=4)
    film = np.asarray(Image.open(tmp_path / "film.png"))
    shown = [film[66 * i + 30, -30, 0] for i in range(film.shape[0] // 66)]
    assert shown[0] == 8 and len(shown) in (3, 4) and sorted(shown) == shown
