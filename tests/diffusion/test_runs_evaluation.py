"""tools/evaluate.py: what is compared and what is written down, with a stand-in for torch-fidelity;
where that is installed, with an extractor small enough for a test."""

import csv
import importlib.machinery
import re
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
from diffusion.runtime.distributed import Processes
from diffusion.sampling import features as features_module
from diffusion.sampling.quality import Quality

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
def fidelity(monkeypatch, tmp_path):
    """Modules of that name, whose features are the mean of each channel and whose FID is the
    difference of their means; the first keeps how often features were computed, and of what."""
    names = ("", ".registry", ".utils", ".metric_fid", ".metric_kid", ".metric_isc", ".metric_prc")
    modules = {name: types.ModuleType(f"torch_fidelity{name}") for name in names}
    root, utils = modules[""], modules[".utils"]
    root.__spec__ = importlib.machinery.ModuleSpec("torch_fidelity", None)
    modules[".registry"].FEATURE_EXTRACTORS_REGISTRY = {"inception-v3-compat": None, "small": None}
    root.seen, root.built = [], []

    def create(name, layers, *, feature_extractor_weights_path, cuda, verbose):
        if feature_extractor_weights_path is not None:
            with open(feature_extractor_weights_path) as file:
                if file.read() != "good":
                    raise RuntimeError("Missing key(s)\n in state_dict")
        if root.offline:
            raise OSError("no network")
        root.built.append(name)
        return layers

    def features(images, layers, batch_size, cuda, *, save_cpu_ram, verbose):
        x = torch.stack([images[i] for i in range(len(images))])
        assert x.dtype == torch.uint8 and x.shape[1] == 3
        root.seen.append(x)
        return {layer: x.float().mean(dim=(2, 3)) for layer in layers}

    root.offline = False
    utils.create_feature_extractor = create
    utils.resolve_feature_layer_for_metric = lambda metric, feature_extractor: f"of {metric}"
    utils.get_featuresdict_from_dataset = features
    modules[".metric_fid"].fid_features_to_statistics = lambda x: {"mu": x.mean(0).numpy()}
    modules[".metric_fid"].fid_statistics_to_metric = lambda a, b, verbose: {
        "frechet_inception_distance": float(abs(a["mu"] - b["mu"]).sum())
    }
    modules[".metric_kid"].kid_features_to_metric = lambda a, b, kid_subset_size, **_: {
        "kernel_inception_distance_mean": kid_subset_size / 8,
        "kernel_inception_distance_std": float((a.mean() - b.mean()).abs()),
    }
    modules[".metric_prc"].prc_features_to_metric = lambda a, b, **_: {
        "precision": len(a) / 100,
        "recall": len(b) / 100,
        "f_score": 0,
    }
    modules[".metric_isc"].isc_features_to_metric = None
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"torch_fidelity{name}", module)
    monkeypatch.setattr(features_module, "version", lambda package: "0.0")
    monkeypatch.setenv("TRITON_DIFFUSION_CACHE", str(tmp_path / "cache"))
    return root


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
    dropped = dict.fromkeys(("fid", "kid_std", "torch", "reference_data"), "")
    assert given | dropped == {
        **{"checkpoint": "step_00000007", "kid": "0.5", **dropped},
        **{"n": "4", "reference": "elephants", "n_reference": "6", "height": "8", "width": "8"},
        **{"features": "inception-v3-compat", "torch_fidelity": "0.0"},
        **{"sampler": "ddim", "steps": "2", "spacing": "guided", "eta": "0.0", "clip": "1.0"},
        **{"guidance": "1.0", "seed": "0", "ema": "0.99"},
        **{"backend": "torch", "compute": "fp32"},
    }
    assert (second["sampler"], second["ema"], second["kid"]) == ("ddpm", "false", "")
    assert first["reference_data"] == second["reference_data"] and len(first["reference_data"]) > 9
    said = capsys.readouterr().out
    assert "4 images against 6 of elephants" in said and "kid 0.5" in said


def counted(fidelity):
    """How many images' features were computed, but for those that show that it can be."""
    return [len(x) for x in fidelity.seen if len(x) != 2]


def test_features_of_the_reference_are_kept(run, fidelity, tmp_path):
    """Under the digest of data and preprocessing: what another network, or other images, have is
    computed anew; and so is what is damaged."""
    first = evaluate(settings(run, metrics=["fid", "kid"]))
    assert counted(fidelity) == [6, 4] and len(fidelity.built) == 1
    again = evaluate(settings(run, metrics=["fid", "kid"]))
    assert counted(fidelity) == [6, 4, 4]
    assert (again["fid"], again["kid_std"]) == (first["fid"], first["kid_std"])
    fidelity.seen.clear()
    evaluate(settings(run, metrics=["fid"]))  # its means are there
    assert counted(fidelity) == [4]
    for changed in ({"features": "small"}, {"reference": str(other_images(tmp_path))}):
        fidelity.seen.clear()
        evaluate(settings(run, **changed))
        assert len(counted(fidelity)) == 2
    kept = list((tmp_path / "cache" / "features").iterdir())
    assert len(kept) == 6
    for path in kept:
        path.write_bytes(path.read_bytes()[:-3])
    fidelity.seen.clear()
    assert evaluate(settings(run))["fid"] == first["fid"] and counted(fidelity) == [6, 4]


def other_images(folder):
    path = folder / "gray.packed"
    write_packed(path, ImageSet(torch.randint(256, (5, 8, 8, 1), dtype=torch.uint8)))
    return path


def test_a_disk_that_is_full_keeps_nothing(run, fidelity, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features_module, "save_file", fail)
    with pytest.warns(UserWarning, match="is not kept: .* No space left"):
        assert evaluate(settings(run))["fid"] > 0


def test_beside_the_grids_of_a_run(fidelity, tmp_path):
    settings = (*TINY, "train.steps=2", "train.sample_every=1", "train.fid_images=4")
    value = train(
        composed(*settings, "train.metric=kid", "train.fid_metrics=[fid,kid,prc]"), tmp_path
    )
    table = rows(tmp_path / "scores.csv")
    assert list(table[0]) == ["step", "fid", "kid", "kid_std", "precision", "recall"]
    assert [float(row["fid"]) > 0 for row in table] == [True, True]
    assert (value, table[1]["recall"]) == (0.5, "0.12")
    assert counted(fidelity) == [12, 4, 4]  # the reference once


def test_processes_draw_and_compare_shares(fidelity):
    """What two compute, and the first puts together, is what one has."""
    real = torch.randint(256, (7, 8, 8, 3), dtype=torch.uint8)
    drawn = torch.randint(256, (6, 8, 8, 3), dtype=torch.uint8)

    class Two(Processes):
        def __init__(self, rank, box):
            super().__init__(None)
            self.rank, self.count, self.box = rank, 2, box

        def gather(self, x):
            self.box.setdefault(self.rank, []).append(x)
            if self.rank:
                return None
            return torch.cat((x, self.box[1][len(self.box[0]) - 1]))

        def of_first(self, value):
            return value

    def values(processes, part):
        metrics = ["fid", "kid", "prc"]
        quality = Quality(real, metrics, 5, CPU, processes)
        return quality(part.numpy())

    alone = values(Processes(None), drawn[:5])
    box = {}
    for path in features_module.cache_folder().iterdir():
        path.unlink()
    assert values(Two(1, box), drawn[3:]) is None
    assert values(Two(0, box), drawn[:3]) == pytest.approx(alone)


def test_another_reference(run, fidelity, tmp_path):
    row = evaluate(settings(run, reference=str(other_images(tmp_path))))
    assert row["n_reference"] == 5
    real = fidelity.seen[1]
    assert torch.equal(real[:, :1].expand(-1, 3, -1, -1), real)


def test_images_that_have_no_distance(fidelity):
    real, alone = torch.zeros(3, 8, 8, 1, dtype=torch.uint8), Processes(None)
    drawn = np.zeros((3, 8, 8, 1), np.uint8)
    assert Quality(real, ["fid"], 3, CPU, alone)(drawn) == {"fid": 0}
    for images, metric, words in (
        (torch.zeros(3, 8, 8, 4, dtype=torch.uint8), "fid", "images of 4 channels in uint8 have"),
        (real.float(), "fid", "images of 1 channel in float32 have no FID"),
        (real[:1], "fid", "1 image has no spread"),
        (real, "prc", "3 images have no 3 neighbours each"),
    ):
        with pytest.raises(ConfigError, match=words):
            Quality(images, [metric], 9, CPU, alone)


# --- the loss, for which nothing is drawn or fetched ----------------------------------------------


@pytest.fixture
def trained(tmp_path):
    """A run that has held four images out."""
    settings = (*TINY, "dataset.held_out=4", "train.steps=2", "train.sample_count=0")
    train(composed(*settings), tmp_path / "trained")
    return tmp_path / "trained"


def test_the_loss_is_that_of_training(trained, monkeypatch, capsys):
    monkeypatch.setattr(features_module, "find_spec", None)  # nobody asks for the package
    row = evaluate({"ckpt": str(trained), "metrics": ["loss"], "device": "cpu"})
    (of_training,) = rows(trained / "held_out.csv")
    (written,) = rows(trained / "evaluations.csv")
    for key, value in of_training.items():
        if key != "step":
            assert str(row[key]) == value or row[key] == pytest.approx(float(value), rel=2e-5), key
    assert float(written["held_out"]) == row["held_out"] and written["fid"] == ""
    assert re.search(r"of 4 images in \d+\.\d s", capsys.readouterr().out)
    fewer = evaluate({"ckpt": str(trained), "metrics": ["loss"], "device": "cpu", "images": 3})
    assert fewer["images"] == 3 and fewer["data"] != row["data"]


def test_the_loss_of_other_images(run, tmp_path):
    with pytest.raises(ConfigError, match=r"has trained on all of its images .dataset.held_out=0"):
        evaluate(settings(run, metrics=["loss"]))
    row = evaluate(settings(run, metrics=["loss"], reference=str(other_images(tmp_path))))
    assert row["images"] == 5 and np.isfinite(row["held_out"])


def test_a_table_of_an_earlier_version_gets_more_columns(run, fidelity):
    (run / "evaluations.csv").write_text("checkpoint,fid,n\nbefore,1.5,9\n")
    evaluate(settings(run))
    before, now = rows(run / "evaluations.csv")
    assert (before["checkpoint"], before["fid"], before["data"]) == ("before", "1.5", "")
    assert tuple(now) == FIELDS and now["n"] == "4"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics": ["fd"]}, "metrics has fd; choose from loss, fid, kid, isc, prc"),
        ({"metrics": []}, r"metrics=\[\] is empty"),
        (
            {"features": "smal"},
            "features=smal is unknown; choose one of inception",
        ),
        ({"weights": "absent.pth"}, "weights=absent.pth does not exist"),
        ({"out": "numbers.txt"}, "expected a .csv"),
        ({"out": f"{__file__}/numbers.csv"}, "is a file, expected a folder"),
        ({"images": 0}, "images=0; expected at least 1"),
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


def test_what_cannot_be_had_is_missed_before_anything_is_drawn(
    run, fidelity, monkeypatch, tmp_path
):
    monkeypatch.setattr("diffusion.runs.evaluation.draw_share", None)
    weights = tmp_path / "weights.pth"
    weights.write_text("of another network")
    with pytest.raises(ConfigError, match="cannot be used with weights=.*pth: Missing key.s. in s"):
        evaluate(settings(run, weights=str(weights)))
    fidelity.offline = True
    with pytest.raises(ConfigError, match=r"not available .no network.; fetch .*metrics=\[loss\]"):
        evaluate(settings(run))
    with pytest.raises(ConfigError, match="are not available"):
        few = ("train.steps=1", "train.sample_every=1", "train.fid_images=4")
        train(composed(*TINY, *few), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_torchvision_that_does_not_load_is_one_line(run, monkeypatch, tmp_path):
    """As of another release of PyTorch: RuntimeError, from within an import."""
    (tmp_path / "torch_fidelity").mkdir()
    (tmp_path / "torch_fidelity" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist\\n')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("diffusion.runs.evaluation.draw_share", None)
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_fidelity"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match="operator torchvision::nms does not exist.; torchv") as e:
        evaluate(settings(run))
    assert "\n" not in str(e.value)


def test_without_the_package(run, monkeypatch):
    monkeypatch.setattr(features_module, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"constraints.txt -e '.\[quality\]'; .* dataset.held_out\)"
    ):
        evaluate(settings(run))


@pytest.mark.skipif(not find_spec("torch_fidelity"), reason="needs torch-fidelity")
def test_the_real_package(monkeypatch, tmp_path):
    """With means of channels for features, Frechet's distance of normals has a closed form; and
    all is as the package itself puts it together."""
    import torch_fidelity
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
    monkeypatch.setenv("TRITON_DIFFUSION_CACHE", str(tmp_path))
    rng = np.random.default_rng(0)
    one, two = (rng.integers(0, high, (40, 3, 3, 3), np.uint8) for high in (256, 200))
    metrics = ["fid", "kid", "prc"]
    for _ in range(2):  # the second finds the reference's features
        quality = Quality(
            torch.from_numpy(two), metrics, 40, CPU, Processes(None), features="means"
        )
        found = quality(one)
        (m1, s1), (m2, s2) = (
            (f.mean(0), np.cov(f, rowvar=False)) for f in (x.mean((1, 2)) for x in (one, two))
        )
        root = np.sqrt(np.linalg.eigvals(s1 @ s2).real).sum()
        expected = ((m1 - m2) ** 2).sum() + np.trace(s1) + np.trace(s2) - 2 * root
        assert found["fid"] == pytest.approx(expected, rel=1e-6)
        together = torch_fidelity.calculate_metrics(
            input1=features_module._Images(torch.from_numpy(one)),
            input2=features_module._Images(torch.from_numpy(two)),
            **dict.fromkeys(metrics, True),
            **{"feature_extractor": "means", "kid_subset_size": 40, "cuda": False},
            **{"cache": False, "verbose": False, "save_cpu_ram": True},
        )
        assert found["kid"] == pytest.approx(together["kernel_inception_distance_mean"])
        assert found["precision"] == together["precision"]
        assert found["recall"] == together["recall"]
