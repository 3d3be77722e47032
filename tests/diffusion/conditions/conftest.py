"""Runs that several files read; nobody writes to them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffusion.runs.training import train

from ...test_configs import composed
from .runs import SIZE, SMALL, of_pairs, pixels, words


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> tuple[Path, Path]:
    """Two folders of 24 pictures, of which the second has the negatives of the first."""
    at = tmp_path_factory.mktemp("pairs")
    for i, image in enumerate(pixels(24)):
        for name, picture in (("positives", image), ("negatives", 255 - image)):
            path = at / name / ("cats" if i % 2 else "dogs") / f"{i:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(path)
    return at / "positives", at / "negatives"


@pytest.fixture(scope="session")
def image_run(pairs, tmp_path_factory) -> Path:
    """Of three steps, with classes, everything dropped now and then, and a grid."""
    image_run = tmp_path_factory.mktemp("images") / "run"
    more = ("model.num_classes=2", "model.label_dropout=0.3", "model.condition_dropout=0.3")
    more += ("dataset.held_out=4", "train.eval_every=3", "train.sample_every=3", "train.steps=3")
    train(composed(*of_pairs(pairs, *more)), image_run)
    return image_run


@pytest.fixture(scope="session")
def vector_run(pairs, tmp_path_factory) -> Path:
    """Of two steps, whose vectors are of two numbers and dropped now and then."""
    at = tmp_path_factory.mktemp("vectors")
    np.save(at / "vectors.npy", np.linspace(-1, 1, 48).reshape(24, 2))
    data = ("dataset=folder", f"dataset.path={pairs[0]}", f"dataset.size={SIZE}")
    data += (f"dataset.vectors={at}/vectors.npy", "dataset.held_out=4", "train.eval_every=2")
    more = ("model.condition_dropout=0.3", "train.steps=2", "train.sample_every=2")
    train(composed(*data, *SMALL, *more), at / "run")
    return at / "run"


@pytest.fixture(scope="session")
def context_run(pairs, tmp_path_factory) -> Path:
    """Of two steps, whose sequences are dropped now and then."""
    at = tmp_path_factory.mktemp("sequences")
    tokens, lengths = words(24)
    np.savez(at / "words.npz", tokens=tokens, lengths=lengths)
    data = ("dataset=folder", f"dataset.path={pairs[0]}", f"dataset.size={SIZE}")
    data += (f"dataset.context={at}/words.npz", "dataset.held_out=4", "train.eval_every=2")
    more = ("model.condition_dropout=0.3", "train.steps=2", "train.sample_every=2")
    train(composed(*data, *SMALL, *more, "model.context_resolutions=[1]"), at / "run")
    return at / "run"
