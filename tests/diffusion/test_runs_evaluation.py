"""tools/evaluate.py: what is compared and what is written down, with a stand-in for torch-fidelity;
where that is installed, with an extractor small enough for a test."""

import csv
import importlib.machinery
import sys
import types
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from diffusion.data.image_set import ImageSet
from diffusion.data.packed import write_packed
from diffusion.errors import ConfigError
from diffusion.factory import build_model
from diffusion.formats.checkpoint import save_checkpoint
from diffusion.models.flat_parameters import FlatParameters
from diffusion.runs.evaluation import FIELDS, evaluate
from diffusion.runs.training import train
from diffusion.runtime.backend import TORCH_FP32
from diffusion.sampling import quality
from diffusion.sampling.quality import measure

from ..end_to_end.run import TINY
from ..test_configs import composed
from .test_export import MODEL, ONE_LEVEL

CPU = torch.device("cpu")
DATASET = {"name": "elephants", "count": 6, "size": 8, "flip": True}


@pytest.fixture
def run(tmp_path):
    """Of a network for images of 8x8, trained on six elephants."""
    settings = MODEL | ONE_LEVEL
    config = {"model": settings, "diffusion": {}, "train": {"precision": "fp32"}}
    config |= {"dataset": DATASET, "optim": {"ema_decay": 0.99}}
    model = build_model(settings, TORCH_FP32, (8, 8), 3, False, CPU)
    state = {"step": 7, "image_shape": [8, 8, 3]}
    save_checkpoint(tmp_path / "run" / "checkpoints", FlatParameters(model), state, config, keep=1)
    return tmp_path / "run"


@pytest.fixture
def fidelity(monkeypatch):
    """A module of that name whose FID is the difference of means; it keeps what it was given."""
    module = types.ModuleType("torch_fidelity")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_fidelity", None)
    registry = types.ModuleType("torch_fidelity.registry")
    registry.FEATURE_EXTRACTORS_REGISTRY = {"inception-v3-compat": None, "small": None}
    module.calls = []

    def calculate_metrics(**options):
        module.calls.append(options)
        if options["feature_extractor_weights_path"] == "offline":
            raise OSError("no network")
        one, two = (
            torch.stack([images[i] for i in range(len(images))])
            for images in (options["input1"], options["input2"])
        )
        assert one.dtype == two.dtype == torch.uint8 and one.shape[1] == two.shape[1] == 3
        distance = (one.float().mean() - two.float().mean()).abs()
        found = {"frechet_inception_distance": distance.item()}
        if options.get("kid"):
            found |= {"kernel_inception_distance_mean": 0.5, "kernel_inception_distance_std": 0.1}
        return found

    module.calculate_metrics = calculate_metrics
    monkeypatch.setitem(sys.modules, "torch_fidelity", module)
    monkeypatch.setitem(sys.modules, "torch_fidelity.registry", registry)
    monkeypatch.setattr(quality, "version", lambda package: "0.0")
    return module


def settings(run, **options):
    return {"ckpt": str(run), "n": 4, "steps": 2, "device": "cpu"} | options


def rows(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_the_numbers_and_what_they_depend_on(run, fidelity, capsys):
    row = evaluate(settings(run))
    evaluate(settings(run, sampler="ddpm", steps=3, ema=False, seed=5, metrics=["fid"]))
    first, second = rows(run / "evaluations.csv")
    assert tuple(first) == FIELDS and row["fid"] == float(first["fid"]) > 0
    given = {key: value for key, value in first.items() if value}
    assert given | {"fid": "", "torch": ""} == {
        **{"checkpoint": "step_00000007", "fid": "", "kid": "0.5", "kid_std": "0.1"},
        **{"n": "4", "reference": "elephants", "n_reference": "6", "height": "8", "width": "8"},
        **{"features": "inception-v3-compat", "torch_fidelity": "0.0"},
        **{"sampler": "ddim", "steps": "2", "spacing": "guided", "eta": "0.0", "clip": "1.0"},
        **{"guidance": "1.0", "seed": "0", "ema": "0.99"},
        **{"backend": "torch", "compute": "fp32", "torch": ""},
    }
    assert (second["sampler"], second["ema"], second["kid"]) == ("ddpm", "false", "")
    said = capsys.readouterr().out
    assert "4 images against 6 of elephants" in said and "kid 0.5" in said
    compared = fidelity.calls[1]  # the first call makes sure that the extractor is there
    assert len(compared["input1"]) == 4 and compared["kid_subset_size"] == 4


def test_beside_the_grids_of_a_run(fidelity, tmp_path):
    settings = (*TINY, "train.steps=2", "train.sample_every=1", "train.fid_images=3")
    train(composed(*settings), tmp_path)
    assert [float(row["fid"]) > 0 for row in rows(tmp_path / "scores.csv")] == [True, True]
    first, *runs = fidelity.calls  # that the extractor is there
    assert [len(call["input1"]) for call in runs] == [3, 3]
    assert [len(call["input2"]) for call in runs] == [12, 12]


def test_another_reference(run, fidelity, tmp_path):
    images = torch.randint(256, (5, 8, 8, 1), dtype=torch.uint8)
    write_packed(tmp_path / "gray.packed", ImageSet(images))
    row = evaluate(settings(run, reference=str(tmp_path / "gray.packed")))
    assert row["n_reference"] == 5
    real = fidelity.calls[-1]["input2"]
    assert torch.equal(real[3], images[3].permute(2, 0, 1).expand(3, 8, 8))


def test_images_that_have_no_distance(fidelity):
    gray, real = np.zeros((3, 8, 8, 1), np.uint8), torch.zeros(3, 8, 8, 1, dtype=torch.uint8)
    assert measure(gray, real, ["fid"], CPU) == {"fid": 0}
    with pytest.raises(ConfigError, match="images of 4 channels"):
        measure(np.zeros((3, 8, 8, 4), np.uint8), real, ["fid"], CPU)
    with pytest.raises(ConfigError, match="1 image has no spread"):
        measure(gray[:1], real, ["fid"], CPU)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": ["fd"]}, "metrics has fd; choose from fid, kid, isc, prc"),
        ({"metrics": []}, "metrics is empty"),
        (
            {"features": "smal"},
            "features=smal is unknown; choose one of inception",
        ),
        ({"weights": "absent.pth"}, "weights=absent.pth does not exist"),
        ({"out": "numbers.txt"}, "expected a .csv"),
        ({"out": f"{__file__}/numbers.csv"}, "is a file, expected a folder"),
        ({"n": 0}, "n=0; expected at least 1"),
    ],
    ids=str,
)
def test_wrong_settings(run, fidelity, options, words):
    with pytest.raises(ConfigError, match=words):
        evaluate(settings(run, **options))


def test_a_file_of_another_table_is_left_alone(run, fidelity, tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(ConfigError, match="has other columns"):
        evaluate(settings(run, out=str(tmp_path / "metrics.csv")))


def test_weights_that_cannot_be_fetched_are_missed_before_anything_is_drawn(
    run, fidelity, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "offline").touch()
    monkeypatch.setattr("diffusion.runs.evaluation.draw_all", None)
    with pytest.raises(ConfigError, match="cannot be had .no network.; fetch them"):
        evaluate(settings(run, weights="offline"))


def test_without_the_package(run, monkeypatch):
    monkeypatch.setattr(quality, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[quality\]'"):
        evaluate(settings(run))


@pytest.mark.skipif(not find_spec("torch_fidelity"), reason="needs torch-fidelity")
def test_the_real_package():
    """With means of channels for features, Frechet's distance of normals has a closed form."""
    from torch_fidelity import FeatureExtractorBase, register_feature_extractor

    class Means(FeatureExtractorBase):
        def __init__(self, name, features_list, **options):
            super().__init__(name, features_list)

        @staticmethod
        def get_provided_features_list():
            return ("means",)

        @staticmethod
        def get_default_feature_layer_for_metric(metric):
            return "means"

        def forward(self, x):
            return (x.double().mean(dim=(2, 3)),)

    register_feature_extractor("means", Means)
    rng = np.random.default_rng(0)
    one, two = (rng.integers(0, high, (40, 3, 3, 3), np.uint8) for high in (256, 200))
    found = measure(one, torch.from_numpy(two), ["fid", "kid"], CPU, features="means")
    (m1, s1), (m2, s2) = (
        (f.mean(0), np.cov(f, rowvar=False)) for f in (x.mean((1, 2)) for x in (one, two))
    )
    root = np.sqrt(np.linalg.eigvals(s1 @ s2).real).sum()
    expected = ((m1 - m2) ** 2).sum() + np.trace(s1) + np.trace(s2) - 2 * root
    assert found["fid"] == pytest.approx(expected, rel=1e-6) and set(found) == {
        *("fid", "kid", "kid_std")
    }
