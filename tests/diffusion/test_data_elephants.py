"""The drawn elephants: reproducible, of any size, and no two alike."""

import gc
import importlib
import os
import sys
import time

import numpy as np
import pytest
import torch

from diffusion.data import load_dataset
from diffusion.data.elephants import TRUNKS, draw_elephant, elephants
from diffusion.errors import ConfigError

from ..end_to_end.processes import descendants, ends, started
from ..end_to_end.run import ROOT, environment


def test_a_picture_depends_on_seed_and_index_alone():
    few, many = elephants(count=3, size=32, seed=7), elephants(count=5, size=32, seed=7)
    assert torch.equal(few.images, many.images[:3]) and torch.equal(few.labels, many.labels[:3])
    assert np.array_equal(draw_elephant(7, 2, 32), few.images[2].numpy())
    assert not np.array_equal(draw_elephant(8, 2, 32), few.images[2].numpy())


def test_processes_draw_the_same(monkeypatch):
    module = importlib.import_module("diffusion.data.elephants")  # a function has its name
    monkeypatch.setattr(module, "_PART", 5)
    used = []
    monkeypatch.setattr(module, "processors", lambda: used.append(1) or 2)
    by_two = elephants(count=23, size=8)
    monkeypatch.setattr(module, "processors", lambda: 1)
    alone = elephants(count=23, size=8)
    assert used and torch.equal(by_two.images, alone.images)
    assert torch.equal(by_two.labels, alone.labels)


class Destroyed:
    """In a cycle, so that it is the collector that finds it."""

    def __init__(self, note):
        self.note, self.cycle = note, self

    def __del__(self):
        with self.note.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_processes_destroy_nothing_that_is_not_theirs(monkeypatch, tmp_path):
    """As an object that waits for its threads, which are not in a copy, would wait for ever."""
    module = importlib.import_module("diffusion.data.elephants")
    monkeypatch.setattr(module, "processors", lambda: 2)
    for _ in range(3):
        Destroyed(tmp_path / "note")
    elephants(count=4 * module._PART, size=4)  # so many that a copy does collect
    assert gc.isenabled()
    gc.collect()
    assert (tmp_path / "note").read_text().split() == [str(os.getpid())] * 3


DRAWS = """
import importlib
module = importlib.import_module("diffusion.data.elephants")
module.processors = lambda: 2
module.elephants(count=100_000, size=64)
"""


def test_processes_end_with_the_one_that_they_draw_for():
    process = started([sys.executable, "-c", DRAWS], cwd=ROOT, env=environment())
    until = time.monotonic() + 60
    while len(helpers := descendants(process.pid)) < 2:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.kill()
    process.wait(60)
    assert all(map(ends, helpers))


def test_no_two_alike():
    images = elephants(count=64, size=32).images
    assert len({image.numpy().tobytes() for image in images}) == 64


@pytest.mark.parametrize("size", [1, 7, 32, 64, 200, (16, 64), (64, 16), (1, 50)], ids=str)
def test_any_size(size):
    image = draw_elephant(0, 3, size)
    assert image.dtype == np.uint8
    assert image.shape == (*(size if isinstance(size, tuple) else (size, size)), 3)


@pytest.mark.parametrize("index", range(4))
def test_the_same_elephant_at_every_resolution(index):
    fine = draw_elephant(0, index, 128).reshape(32, 4, 32, 4, 3).mean(axis=(1, 3))
    assert (
        np.abs(fine - draw_elephant(0, index, 32)).mean() < 4
    )  # of 255: outlines round differently


def test_extreme_keys():
    for seed, index in ((-1, 0), (2**63, 2**40), (0, 0)):
        assert draw_elephant(seed, index, 8).shape == (8, 8, 3)


def test_labels_say_what_the_trunk_does():
    data = elephants(count=60, size=8)
    assert data.class_names == TRUNKS
    assert sorted(data.labels.unique().tolist()) == [0, 1, 2]


def test_an_elephant_stands_out_from_its_background():
    """A tenth to two thirds of the picture is gray, brown or bluish and of middle lightness."""
    images = elephants(count=32, size=32).images.float()
    spread = images.amax(-1) - images.amin(-1)
    share = ((spread < 50) & (images.mean(-1) < 175)).float().mean(dim=(1, 2))
    assert 0.1 < share.min() and share.max() < 0.66


def test_options_by_name():
    data = load_dataset("elephants", count=2, size=[16, 24], channels=1, seed=None)
    assert data.images.shape == (2, 16, 24, 1)


@pytest.mark.parametrize("count", [0, -3])
def test_nothing_to_draw(count):
    with pytest.raises(ConfigError, match="count"):
        elephants(count=count)
