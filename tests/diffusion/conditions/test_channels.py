"""Networks that are given some channels of an array."""

import numpy as np
import pytest

from diffusion.errors import ConfigError
from diffusion.formats.trained import load_trained
from diffusion.runs.training import train

from ...test_configs import composed
from .runs import CPU, SIZE, SMALL, drawn

# --- arrays ---------------------------------------------------------------------------------------


def test_channels_of_an_array_are_given_in_units_of_their_own(tmp_path):
    fields = np.random.default_rng(0).normal(5, 2, (12, 3, SIZE, SIZE)).astype(np.float32)
    fields[:, 1] = 100 * fields[:, 1] + 7
    np.save(tmp_path / "fields.npy", fields)
    data = ("dataset=array", f"dataset.path={tmp_path}/fields.npy", "dataset.condition=[1]")
    more = ("train.steps=1", "train.sample_every=1", "dataset.layout=nchw", "dataset.held_out=2")
    train(composed(*data, *SMALL, *more), tmp_path / "run")
    trained = load_trained(tmp_path / "run", CPU)
    assert trained.image_shape == (SIZE, SIZE, 2) and trained.model.in_channels == 3
    (mean,) = trained.condition.values.mean
    assert mean == pytest.approx(fields[:, 1].mean(), rel=1e-4) and len(trained.values.mean) == 2
    np.save(tmp_path / "given.npy", fields[:4, 1:2])
    images = drawn(tmp_path / "run", condition=tmp_path / "given.npy")
    assert images.shape == (3, 2, SIZE, SIZE) and images.dtype == np.float32
    given = fields[:4, 1:2].transpose(0, 2, 3, 1)
    assert np.array_equal(images, drawn(tmp_path / "run", condition=np.ascontiguousarray(given)))
    whole = drawn(tmp_path / "run", condition=tmp_path / "fields.npy")  # the data themselves
    assert np.array_equal(images, whole)
    alone = drawn(tmp_path / "run", condition=fields[0, 1:2])
    assert np.array_equal(images[0], alone[0]) and not np.array_equal(images[1], alone[1])
    others = ("dataset.condition=[2]", "train.steps=2")
    with pytest.raises(ConfigError, match=r"given the channels \[1\], and of .* \[2\] are given"):
        train(composed(*data, *SMALL, *more, *others), tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"of shape \[4, 8, 8, 2\]; expected float32 \[M, 8, 8, 1\]"
    ):
        drawn(tmp_path / "run", condition=given.repeat(2, axis=3))
    with pytest.raises(ConfigError, match="no array, and the network was trained with"):
        (tmp_path / "pictures").mkdir()
        drawn(tmp_path / "run", condition=tmp_path / "pictures")


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("[3]", "of the channels of .* 3 is none; they are 0 to 2"),
        ("[0,1,2]", "nothing is left to learn"),
        ("[1,1]", "expected numbers of channels, each once, or null"),
        ("[]", "expected numbers of channels, each once, or null"),
    ],
)
def test_channels_that_an_array_does_not_have(tmp_path, condition, words):
    np.save(tmp_path / "fields.npy", np.zeros((4, SIZE, SIZE, 3), np.float32))
    data = ("dataset=array", f"dataset.path={tmp_path}/fields.npy", "dataset.layout=nhwc")
    with pytest.raises(ConfigError, match=words):
        train(composed(*data, f"dataset.condition={condition}", *SMALL), tmp_path / "run")
