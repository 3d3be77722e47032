"""Networks that are given more than a class: what they learn, how they draw, what is refused."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import diffusion
import triton_kernels
from diffusion.data import load_dataset
from diffusion.data.batches import Batches
from diffusion.data.context import Context
from diffusion.data.given import GivenChannels
from diffusion.data.image_set import ImageSet
from diffusion.errors import ConfigError
from diffusion.export import run as export_run
from diffusion.export.graph import OnnxGraph
from diffusion.export.run import export
from diffusion.formats.trained import load_trained
from diffusion.models.conditions import Conditions, with_null_token, with_presence
from diffusion.models.flat_parameters import FlatParameters
from diffusion.models.layers import set_backend
from diffusion.process.objective import Objective
from diffusion.process.schedule import make_schedule
from diffusion.runs.benchmark import benchmark
from diffusion.runs.evaluation import evaluate
from diffusion.runs.sampling import sample
from diffusion.runs.training import train
from diffusion.runtime.backend import TORCH_FP32, Backend
from diffusion.runtime.distributed import Processes
from diffusion.sampling.beside import Beside
from diffusion.sampling.guidance import drop_labels, guide
from diffusion.training.gradient_sum import GradientSum
from diffusion.training.optimizer import Optimizer, OptimizerSettings
from diffusion.training.train_step import TrainStep

from ..end_to_end.run import rows, run_together
from ..test_configs import composed

CPU = torch.device("cpu")
SIZE = 8
SMALL = (
    *("device=cpu", "model=unet_tiny", "model.model_channels=8", "model.channel_mult=[1]"),
    *("model.num_res_blocks=1", "model.attention_resolutions=[]", "model.num_groups=4"),
    "model.num_head_channels=8",
    *("train.precision=fp32", "train.batch_size=4", "train.log_every=1", "train.tensorboard=false"),
    *("train.sample_count=4", "train.sample_steps=2", "diffusion.prediction=sample"),
)


def pixels(n: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Of which no pixel tells anything of another."""
    shape = (n, SIZE, SIZE, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> tuple[Path, Path]:
    """Two folders of 24 pictures, of which the second has the negatives of the first."""
    at = tmp_path_factory.mktemp("pairs")
    for i, image in enumerate(pixels(24)):
        for name, picture in (("positives", image), ("negatives", 255 - image)):
            path = at / name / ("cats" if i % 2 else "dogs") / f"{i:02d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(path)
    return at / "positives", at / "negatives"


def of_pairs(pairs: tuple[Path, Path], *more: str) -> tuple[str, ...]:
    path, condition = pairs
    data = ("dataset=pairs", f"dataset.path={path}", f"dataset.condition={condition}")
    return (*data, f"dataset.size={SIZE}", *SMALL, *more)


@pytest.fixture(scope="module")
def run_dir(pairs, tmp_path_factory) -> Path:
    """Of three steps, with classes, everything dropped now and then, and a grid."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    more = ("model.num_classes=2", "model.label_dropout=0.3", "model.condition_dropout=0.3")
    more += ("dataset.held_out=4", "train.eval_every=3", "train.sample_every=3", "train.steps=3")
    train(composed(*of_pairs(pairs, *more)), run_dir)
    return run_dir


def drawn(run_dir: Path, **options) -> np.ndarray:
    return diffusion.sample(run_dir, **{"n": 3, "steps": 2, "device": "cpu", "seed": 1} | options)


# --- learning -------------------------------------------------------------------------------------


def high_noise_loss(run_dir: Path) -> float:
    return float(rows(run_dir / "held_out.csv")[-1]["sigma_3.5_10"])


def test_a_network_uses_the_channels_that_it_is_given(pairs, tmp_path):
    """Where there is much noise, what is given says everything, and x_t nothing: the best guess
    without it is the mean, whose error is the data's variance."""
    learning = ("train.steps=90", "train.batch_size=8", "optim.lr=5e-3", "optim.warmup=5")
    learning += ("optim.ema_decay=0.9", "dataset.held_out=8", "train.sample_every=0")
    learning += ("dataset.flip=true", "train.eval_every=90", "train.log_every=90")
    train(composed(*of_pairs(pairs, *learning)), tmp_path / "run")
    variance = ((pixels(24) / 127.5 - 1) ** 2).mean()
    unconditional = 4 * variance  # in the unit of the held-out loss, deviation 0.5, sigma >> 1
    assert high_noise_loss(tmp_path / "run") < 0.15 * unconditional


def test_a_network_uses_the_vector_that_it_is_given(tmp_path):
    """Which says the colour of each picture."""
    colours = np.random.default_rng(1).uniform(-1, 1, (40, 3)).astype(np.float32)
    noise = np.random.default_rng(2).uniform(-0.1, 0.1, (40, SIZE, SIZE, 3)).astype(np.float32)
    np.save(tmp_path / "pictures.npy", colours[:, None, None] + noise)
    np.save(tmp_path / "colours.npy", colours)
    data = ("dataset=array", f"dataset.path={tmp_path}/pictures.npy", "dataset.layout=nhwc")
    data += (f"dataset.vectors={tmp_path}/colours.npy", "dataset.standardise=false")
    learning = ("train.steps=120", "train.batch_size=8", "optim.lr=1e-2", "optim.warmup=5")
    learning += ("optim.ema_decay=0.9", "dataset.held_out=8", "train.sample_every=0")
    learning += ("train.eval_every=120", "train.log_every=120")
    train(composed(*data, *SMALL, *learning), tmp_path / "run")
    # x_t tells the mean of 64 pixels; the best guess that is linear in it
    variance, sigma = (colours**2).mean(), 3.5 * (10 / 3.5) ** np.array([0.25, 0.75])
    told = sigma**2 / SIZE**2
    unconditional = (4 * variance * told / (variance + told)).mean()
    assert high_noise_loss(tmp_path / "run") < 0.35 * unconditional


# --- runs -----------------------------------------------------------------------------------------


def test_a_grid_shows_condition_and_result_side_by_side(run_dir):
    with Image.open(run_dir / "samples" / "step_00000003.png") as picture:
        assert picture.size == (2 * 2 * 64 + 6, 2 * 64 + 6)  # two columns of pairs, enlarged
        left = np.asarray(picture)[2 : 2 + 64 : 8, 2 : 2 + 64 : 8]
    trained = load_trained(run_dir, CPU)
    assert trained.condition.channels == 3 and trained.model.in_channels == 6
    negatives = 255 - pixels(24)
    assert any(np.array_equal(left, negative) for negative in negatives)


def test_the_condition_changes_what_is_drawn_and_folders_are_arrays(run_dir, pairs):
    _, negatives = pairs
    images = drawn(run_dir, condition=negatives)
    assert images.shape == (3, SIZE, SIZE, 3) and images.dtype == np.uint8
    cats = [np.asarray(Image.open(p)) for p in sorted(negatives.rglob("*.png"))]
    assert np.array_equal(images, drawn(run_dir, condition=np.stack(cats)))
    assert np.array_equal(images[:1], drawn(run_dir, condition=np.stack(cats[:1]))[:1])
    assert not np.array_equal(images, drawn(run_dir, condition=np.stack(cats[::-1])))
    one_by_one = drawn(run_dir, condition=negatives, batch_size=1)
    assert np.abs(one_by_one.astype(int) - images).max() <= 1


def test_guidance_goes_away_from_no_condition_and_no_class(run_dir):
    trained = load_trained(run_dir, CPU)
    model = trained.model
    x, t = torch.randn(2, SIZE, SIZE, 3), torch.tensor([10, 900])
    image, labels = torch.randn(2, SIZE, SIZE, 3), torch.tensor([1, 0])
    for p in model.parameters():  # a fresh network says zero
        p.data += 0.05 * torch.randn_like(p)
    guided = guide(Beside(model.forward_nhwc), 3.0, model.null_label, drops=True)
    with torch.no_grad():
        found = guided(x, t, Conditions(labels, image))
        given = model.forward_nhwc(torch.cat((x, image), 3), t, labels)
        none = torch.cat((x, torch.zeros_like(image)), 3)
        nothing = model.forward_nhwc(none, t, torch.full((2,), 2))
        torch.testing.assert_close(found, nothing + 3 * (given - nothing))
        away = guide(Beside(model.forward_nhwc), 3.0, 1)(x, t, Conditions(labels, image))
        other = model.forward_nhwc(torch.cat((x, image), 3), t, torch.full((2,), 1))
        torch.testing.assert_close(away, other + 3 * (given - other))


def test_conditions_are_dropped_with_their_labels():
    rng, labels = torch.tensor([3, 4]), torch.arange(40)
    image = torch.randn(40, 2, 2, 1)
    kept = Conditions(labels, image).dropped(rng, 0.4, first=9)
    gone = drop_labels(labels, rng, 0.4, 99, first=9) == 99
    assert 0 < gone.sum() < 40 and torch.equal(kept.labels, labels)
    assert torch.equal(kept.image, image * ~gone[:, None, None, None])
    part = Conditions(labels[5:], image[5:]).dropped(rng, 0.4, first=14)
    assert torch.equal(part.image, kept.image[5:])


def test_a_run_goes_on_as_if_it_had_not_stopped(pairs, tmp_path):
    more = ("model.condition_dropout=0.3", "train.sample_every=0", "train.eval_every=0")
    settings = of_pairs(pairs, *more, "dataset.flip=true")
    train(composed(*settings, "train.steps=4"), tmp_path / "whole")
    train(composed(*settings, "train.steps=2"), tmp_path / "parts")
    train(composed(*settings, "train.steps=4"), tmp_path / "parts")
    for name in ("model", "ema"):
        whole, parts = (
            (tmp_path / run / "checkpoints/step_00000004" / f"{name}.safetensors").read_bytes()
            for run in ("whole", "parts")
        )
        assert whole == parts
    with pytest.raises(ConfigError, match="trained with a condition of 3 channels, and data set"):
        other = ("dataset.condition_channels=1", "train.steps=5")
        train(composed(*settings, *other), tmp_path / "parts")


def step_of(backend: Backend, share: tuple[int, int]) -> TrainStep:
    """Of pairs that are mirrored and dropped, and a network that sees all of its input."""
    torch.manual_seed(0)
    network = torch.nn.Conv2d(5, 3, 1)

    def denoiser(x, t, given, *, rng, first):
        y = network(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        told = given.vector.sum(dim=1) + (given.context.sum(dim=2) * given.present).sum(dim=1)
        return (y * told[:, None, None, None]).contiguous()

    images = torch.from_numpy(pixels(12, 5))
    tokens, lengths = words(12)
    told = {"vectors": torch.randn(12, 3), "context": Context(tokens, torch.from_numpy(lengths))}
    data = ImageSet(images, condition=GivenChannels(2), **told)
    flat = FlatParameters(network)
    processes = Processes(None)
    optimizer = Optimizer(flat, OptimizerSettings(), backend)
    return TrainStep(
        denoiser,
        Objective(make_schedule("cosine", 100), backend),
        Batches(data, 8, 3, CPU, *share),
        flat,
        optimizer,
        GradientSum(flat, processes, norm=optimizer.norm),
        **{"seed": 3, "steps": 2, "flip": True, "condition_dropout": 0.4},
    )


def test_backends_and_shares_of_processes_see_the_same():
    whole = step_of(TORCH_FP32, (0, 8))
    whole._load(1)
    losses = whole._losses(0, 8)
    for backend in (TORCH_FP32, Backend("triton", triton_kernels)):
        for share in ((0, 4), (4, 4)):
            step = step_of(backend, share)
            step._load(1)
            first, count = share
            expected = losses[first : first + count]
            torch.testing.assert_close(step._losses(0, count), expected, rtol=2e-5, atol=1e-6)


def test_two_processes_train_as_one_does(pairs, tmp_path):
    more = ("train.steps=2", "train.batch_size=8", "train.sample_every=0")
    settings = of_pairs(pairs, *more, "model.condition_dropout=0.3", "dataset.flip=true")
    train(composed(*settings), tmp_path / "one")
    for code, _, err in run_together("train.py", *settings, f"run_dir={tmp_path}/two"):
        assert code == 0, err
    one, two = (
        load_file(tmp_path / name / "checkpoints/step_00000002/model.safetensors")
        for name in ("one", "two")
    )
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-5, atol=1e-5, msg=key)


def test_pictures_are_beside_their_conditions_and_files_are_not(run_dir, pairs, tmp_path):
    settings = {"ckpt": str(run_dir), "n": 2, "steps": 2, "device": "cpu"}
    settings["condition"] = str(pairs[1])
    sample(settings | {"out": str(tmp_path / "grid.png"), "guidance": 2.0})
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (2 * 2 * 64 + 6, 64 + 4)
    sample(settings | {"out": str(tmp_path / "folder")})
    with Image.open(tmp_path / "folder" / "000001.png") as picture:
        assert picture.size == (SIZE, SIZE)
    sample(settings | {"out": str(tmp_path / "drawn.npz")})
    assert np.load(tmp_path / "drawn.npz")["arr_0"].shape == (2, SIZE, SIZE, 3)


def test_the_held_out_loss_is_that_of_training(run_dir):
    row = evaluate({"ckpt": str(run_dir), "metrics": ["loss"], "device": "cpu"})
    assert row["held_out"] == pytest.approx(
        float(rows(run_dir / "held_out.csv")[-1]["held_out"]), rel=1e-5
    )


def test_graphs_take_the_condition_as_an_input(run_dir, tmp_path):
    out = tmp_path / "model.pt2"
    export({"ckpt": str(run_dir), "format": "torch_export", "out": str(out)})
    extra = {"denoiser.json": ""}
    program = torch.export.load(out, extra_files=extra)
    assert json.loads(extra["denoiser.json"])["condition"]["channels"] == 3
    model = load_trained(run_dir, CPU).model
    x, image, t = torch.randn(3, 3, SIZE, SIZE), torch.randn(3, 3, SIZE, SIZE), torch.arange(3)
    expected = model(torch.cat((x, image), 1), t, torch.tensor([0, 1, 0]))
    found = program.module()(x, t, torch.tensor([0, 1, 0]), image)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


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


# --- vectors --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vector_run(pairs, tmp_path_factory) -> Path:
    """Of two steps, whose vectors are of two numbers and dropped now and then."""
    at = tmp_path_factory.mktemp("vectors")
    np.save(at / "vectors.npy", np.linspace(-1, 1, 48).reshape(24, 2))
    data = ("dataset=folder", f"dataset.path={pairs[0]}", f"dataset.size={SIZE}")
    data += (f"dataset.vectors={at}/vectors.npy", "dataset.held_out=4", "train.eval_every=2")
    more = ("model.condition_dropout=0.3", "train.steps=2", "train.sample_every=2")
    train(composed(*data, *SMALL, *more), at / "run")
    return at / "run"


def test_vectors_are_numbers_files_and_arrays(vector_run, tmp_path):
    np.save(tmp_path / "two.npy", np.array([[0.5, -1], [1, 2]]))
    images = drawn(vector_run, vector=tmp_path / "two.npy")
    assert np.array_equal(images, drawn(vector_run, vector=np.array([[0.5, -1], [1, 2]])))
    first = drawn(vector_run, vector=[0.5, -1])
    assert np.array_equal(images[::2], first[::2])
    out = tmp_path / "drawn.npz"
    config = {"ckpt": str(vector_run), "n": 3, "steps": 2, "device": "cpu", "seed": 1}
    sample(config | {"out": str(out), "vector": [0.5, -1]})
    assert np.array_equal(np.load(out)["arr_0"], first)
    drawn(vector_run, vector=[0.5, -1], guidance=2.0)


def test_a_vector_of_zeros_is_another_than_none(vector_run):
    model = load_trained(vector_run, CPU).model
    torch.manual_seed(0)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    x, t = torch.randn(2, SIZE, SIZE, 3), torch.tensor([10, 900])
    given = Conditions(vector=with_presence(torch.zeros(2, 2)))
    with torch.no_grad():
        zeros, nothing = (model.forward_nhwc(x, t, g) for g in (given, given.none()))
        assert (zeros - nothing).abs().max() > 1e-4
        found = guide(model.forward_nhwc, 3.0, None, drops=True)(x, t, given)
    torch.testing.assert_close(found, nothing + 3 * (zeros - nothing))
    with pytest.raises(ValueError, match="a vector is missing; the model has vector_dim=2"):
        model.forward_nhwc(x, t)
    with pytest.raises(ValueError, match=r"shape \(2, 2\); expected \(2, 2 \+ 1\)"):
        model.forward_nhwc(x, t, Conditions(vector=torch.zeros(2, 2)))


def test_vectors_by_the_kernels_and_by_pytorch(vector_run):
    """Forward and every gradient, in the interpreter."""
    models = [load_trained(vector_run, CPU).model.train() for _ in range(2)]
    set_backend(models[1], Backend("triton", triton_kernels))
    x, t = torch.randn(2, SIZE, SIZE, 3), torch.tensor([10, 900])
    given, outputs = Conditions(vector=torch.randn(2, 3)), []
    for model in models:
        torch.manual_seed(0)
        for p in model.parameters():
            p.data += 0.05 * torch.randn_like(p)
        outputs.append(model.forward_nhwc(x, t, given))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-3, msg=name)


def test_a_run_with_vectors_goes_on_and_knows_them(vector_run, pairs, tmp_path):
    row = evaluate({"ckpt": str(vector_run), "metrics": ["loss"], "device": "cpu"})
    trained = rows(vector_run / "held_out.csv")[-1]
    assert row["held_out"] == pytest.approx(float(trained["held_out"]), rel=1e-5)
    assert row["data"] == trained["data"]
    out = tmp_path / "model.pt2"
    export({"ckpt": str(vector_run), "format": "torch_export", "out": str(out)})
    model = load_trained(vector_run, CPU).model
    x, t, vector = torch.randn(3, 3, SIZE, SIZE), torch.arange(3), torch.randn(3, 2)
    expected = model(x, t, Conditions(vector=with_presence(vector)))
    found = torch.export.load(out).module()(x, t, vector)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="vector_dim=0"):
        export({"ckpt": str(vector_run), "format": "unet_cu", "out": str(tmp_path / "a.bin")})
    data = ("dataset=folder", f"dataset.path={pairs[0]}", f"dataset.size={SIZE}", *SMALL)
    data += ("model.condition_dropout=0.3", "dataset.held_out=4", "train.steps=3")
    np.save(tmp_path / "other.npy", np.zeros((24, 3), np.float32))
    with pytest.raises(ConfigError, match="trained with vectors of 2 numbers, .* has 3"):
        train(composed(*data, f"dataset.vectors={tmp_path}/other.npy"), vector_run)
    vectors = vector_run.parent / "vectors.npy"
    train(composed(*data, f"dataset.vectors={vectors}", "train.sample_every=0"), vector_run)
    assert rows(vector_run)[-1]["step"] == "3"


def test_vectors_that_do_not_fit_are_one_line(vector_run, pairs, tmp_path):
    for options, words in (
        ({}, "trained with vectors of 2 numbers: give vector="),
        ({"vector": [1.0, 2.0, 3.0]}, r"shape \[1, 3\]; expected 2 numbers, or a .npy of float32"),
        ({"vector": np.zeros((2, 2, 2))}, r"shape \[2, 2, 2\]; expected 2 numbers"),
        ({"vector": "nothing.npy"}, "does not exist; give 2 numbers"),
        ({"vector": ["a", "b"]}, "is no array"),
        ({"vector": [1.0, float("nan")]}, "not finite"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            drawn(vector_run, **options)
        assert "\n" not in str(caught.value)
    for vectors, words in (
        (np.zeros((3, 2)), r"is float64 of shape \[3, 2\]; expected numbers \[24, D\]"),
        (np.zeros(24), r"of shape \[24\]; expected numbers \[24, D\]"),
        (np.full((24, 2), np.nan), "not finite, first in 0"),
    ):
        np.save(tmp_path / "wrong.npy", vectors)
        with pytest.raises(ConfigError, match=words):
            load_dataset(
                "folder", path=str(pairs[0]), size=SIZE, vectors=str(tmp_path / "wrong.npy")
            )


# --- what is refused ------------------------------------------------------------------------------


def test_what_does_not_fit_is_one_line(run_dir, pairs, tmp_path):
    def refused(words: str, **options) -> None:
        with pytest.raises(ConfigError, match=words) as caught:
            drawn(run_dir, **options)
        assert "\n" not in str(caught.value)

    refused("trained with a condition of 3 channels: give condition=FILE or FOLDER of images")
    refused("does not exist; give an image", condition=tmp_path / "nothing")
    wrong = np.zeros((2, SIZE, SIZE, 1), np.uint8)
    refused(r"uint8 of shape \[2, 8, 8, 1\]; expected uint8 \[M, 8, 8, 3\]", condition=wrong)
    refused("expected uint8", condition=np.zeros((2, SIZE, SIZE, 3), np.float32))
    refused("expected uint8", condition=np.zeros((SIZE, SIZE + 1, 3), np.uint8))
    refused("no image that can be decoded", condition=Path(__file__))
    for name, words in (("diffusers", "hands nothing on"), ("unet_cu", "unet.cu.s format needs")):
        with pytest.raises(ConfigError, match=words):
            export(
                {"ckpt": str(run_dir), "format": name, "out": str(tmp_path / "out.bin")}
                | ({"out": str(tmp_path / "out")} if name == "diffusers" else {})
            )
    with pytest.raises(ConfigError, match="was trained with a condition"):
        benchmark({"ckpt": str(run_dir), "device": "cpu", "out": str(tmp_path / "timed")})
    with pytest.raises(ConfigError, match="says nothing of the condition"):
        settings = {"ckpt": str(run_dir), "metrics": ["loss"], "device": "cpu"}
        evaluate(settings | {"reference": str(pairs[0])})


def test_a_condition_for_a_network_without_one(tmp_path, pairs):
    data = ("dataset=folder", f"dataset.path={pairs[0]}", f"dataset.size={SIZE}")
    train(composed(*data, *SMALL, "train.steps=1", "train.sample_every=0"), tmp_path / "run")
    with pytest.raises(ConfigError, match="was trained without one; leave it out"):
        drawn(tmp_path / "run", condition=pairs[1])
    with pytest.raises(ConfigError, match="needs a network with classes"):
        drawn(tmp_path / "run", guidance=2.0)
    with pytest.raises(ConfigError, match="condition_dropout=0.1, but data set .* no condition"):
        train(composed(*data, *SMALL, "model.condition_dropout=0.1"), tmp_path / "other")


# --- sequences ------------------------------------------------------------------------------------


def words(n: int, most: int = 5, dim: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n, most, dim] in 16 bits, with rubbish behind their ends, and lengths."""
    random = np.random.default_rng(seed)
    tokens = random.normal(size=(n, most, dim)).astype(np.float16)
    lengths = random.integers(0, most + 1, n)
    tokens[np.arange(most) >= lengths[:, None]] = np.nan
    return tokens, lengths


@pytest.fixture(scope="module")
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


def telling(model: torch.nn.Module) -> torch.nn.Module:
    """With other parameters than those of a fresh network, which says zero."""
    torch.manual_seed(0)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def test_a_network_uses_the_sequence_that_it_is_given(tmp_path):
    """Whose tokens say which of four places of a picture have which colour, in any order, so that
    a place has to find its token."""
    random, half = np.random.default_rng(1), SIZE // 2
    pictures = np.zeros((48, SIZE, SIZE, 1), np.float32)
    tokens, lengths = np.zeros((48, 4, 5), np.float32), np.zeros(48, np.int64)
    for i in range(48):
        places = random.permutation(4)[: random.integers(1, 5)]
        lengths[i] = len(places)
        for j, place in enumerate(places):
            colour = random.choice([-1.0, 1.0])
            y, x = divmod(place, 2)
            pictures[i, y * half :, x * half :][:half, :half] = colour
            tokens[i, j, place], tokens[i, j, 4] = 1, colour
    np.save(tmp_path / "pictures.npy", pictures)
    np.savez(tmp_path / "words.npz", tokens=tokens, lengths=lengths)
    data = ("dataset=array", f"dataset.path={tmp_path}/pictures.npy", "dataset.layout=nhwc")
    data += ("dataset.standardise=false", "dataset.held_out=8")
    data += (f"dataset.context={tmp_path}/words.npz", "model.context_resolutions=[1]")
    learning = ("train.steps=90", "train.batch_size=16", "optim.lr=1e-2", "optim.warmup=5")
    learning += ("optim.ema_decay=0.9", "train.sample_every=0", "train.eval_every=90")
    train(composed(*data, *SMALL, *learning, "train.log_every=90"), tmp_path / "run")
    # x_t tells the mean of the pixels of a place; the best guess that is linear in it
    variance, sigma = (pictures**2).mean(), 3.5 * (10 / 3.5) ** np.array([0.25, 0.75])
    told = sigma**2 / half**2
    unconditional = (4 * variance * told / (variance + told)).mean()
    assert high_noise_loss(tmp_path / "run") < 0.35 * unconditional


def test_sequences_are_files_and_arrays(context_run, tmp_path):
    tokens, lengths = words(2, most=7, seed=3)
    np.savez(tmp_path / "two.npz", tokens=tokens, lengths=lengths)
    images = drawn(context_run, context=tmp_path / "two.npz")
    apart = [x[:length] for x, length in zip(tokens, lengths, strict=True)]
    assert np.array_equal(images, drawn(context_run, context=apart))
    one = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    np.save(tmp_path / "one.npy", one)
    found = [drawn(context_run, context=x) for x in (tmp_path / "one.npy", one, one[None])]
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    out = tmp_path / "drawn.npz"
    config = {"ckpt": str(context_run), "n": 3, "steps": 2, "device": "cpu", "seed": 1}
    sample(config | {"out": str(out), "context": str(tmp_path / "one.npy")})
    assert np.array_equal(np.load(out)["arr_0"], found[0])
    drawn(context_run, context=one, guidance=2.0)
    one_by_one = drawn(context_run, context=apart, batch_size=1)
    assert np.abs(one_by_one.astype(int) - images).max() <= 1


def test_guidance_goes_away_from_no_sequence(context_run):
    model = telling(load_trained(context_run, CPU).model)
    x, t = torch.randn(2, SIZE, SIZE, 3), torch.tensor([10, 900])
    tokens = with_null_token(torch.randn(2, 3, 4), torch.tensor([3, 1]))
    given = Conditions(None, None, None, *tokens)
    with torch.no_grad():
        told, nothing = (model.forward_nhwc(x, t, g) for g in (given, given.none()))
        assert (told - nothing).abs().amax((1, 2, 3)).min() > 1e-3
        found = guide(model.forward_nhwc, 3.0, None, drops=True)(x, t, given)
    torch.testing.assert_close(found, nothing + 3 * (told - nothing))


def test_sequences_by_the_kernels_and_by_pytorch(context_run):
    """Forward and every gradient, in the interpreter."""
    models = [telling(load_trained(context_run, CPU).model.train()) for _ in range(2)]
    set_backend(models[1], Backend("triton", triton_kernels))
    x, t, outputs = torch.randn(2, SIZE, SIZE, 3), torch.tensor([10, 900]), []
    tokens = with_null_token(torch.randn(2, 3, 4), torch.tensor([3, 0]))
    for model in models:
        outputs.append(model.forward_nhwc(x, t, Conditions(None, None, None, *tokens)))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-3, msg=name)


def test_a_run_with_sequences_is_evaluated_and_exported(context_run, tmp_path, monkeypatch):
    row = evaluate({"ckpt": str(context_run), "metrics": ["loss"], "device": "cpu"})
    trained = rows(context_run / "held_out.csv")[-1]
    assert row["held_out"] == pytest.approx(float(trained["held_out"]), rel=1e-5)
    assert row["data"] == trained["data"]
    out = tmp_path / "model.pt2"
    export({"ckpt": str(context_run), "format": "torch_export", "out": str(out)})
    model = load_trained(context_run, CPU).model
    x, t = torch.randn(3, 3, SIZE, SIZE), torch.arange(3)
    tokens, lengths = torch.randn(3, 9, 4), torch.tensor([9, 0, 2])
    given = Conditions(None, None, None, *with_null_token(tokens, lengths))
    found = torch.export.load(out).module()(x, t, tokens, lengths)
    torch.testing.assert_close(found, model(x, t, given), atol=1e-5, rtol=1e-5)
    if find_spec("onnxruntime") is not None:
        out = tmp_path / "model.onnx"
        export({"ckpt": str(context_run), "format": "onnx", "out": str(out)})
        found = OnnxGraph(out)(x, t, tokens, lengths)
        torch.testing.assert_close(found, model(x, t, given), atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(export_run, "require_tensorrt", lambda: None)
    with pytest.raises(ConfigError, match="would have a number of tokens of its own; leave it out"):
        config = {"format": "onnx", "out": str(tmp_path / "a.onnx"), "engine": "a.engine"}
        export({"ckpt": str(context_run)} | config)
    for format, name in (("unet_cu", "a.bin"), ("diffusers", "b")):
        with pytest.raises(ConfigError, match="context_dim=4|context_dim=0"):
            export({"ckpt": str(context_run), "format": format, "out": str(tmp_path / name)})


def test_a_run_with_sequences_goes_on_as_if_it_had_not_stopped(pairs, tmp_path):
    tokens, lengths = words(24)
    np.savez(tmp_path / "words.npz", tokens=tokens, lengths=lengths)
    more = ("model.condition_dropout=0.3", "train.sample_every=0", "train.eval_every=0")
    settings = ("dataset=folder", f"dataset.path={pairs[0]}", f"dataset.size={SIZE}", *SMALL)
    settings += (*more, f"dataset.context={tmp_path}/words.npz", "dataset.flip=true")
    train(composed(*settings, "train.steps=4"), tmp_path / "whole")
    train(composed(*settings, "train.steps=2"), tmp_path / "parts")
    train(composed(*settings, "train.steps=4"), tmp_path / "parts")
    for name in ("model", "ema"):
        whole, parts = (
            (tmp_path / run / "checkpoints/step_00000004" / f"{name}.safetensors").read_bytes()
            for run in ("whole", "parts")
        )
        assert whole == parts
    np.save(tmp_path / "wide.npy", np.zeros((24, 2, 6), np.float32))
    with pytest.raises(ConfigError, match="trained with tokens of 4 numbers, .* has 6"):
        other = (f"dataset.context={tmp_path}/wide.npy", "train.steps=5")
        train(composed(*settings, *other), tmp_path / "parts")


@pytest.mark.parametrize("zipped", [False, True], ids=["mapped", "compressed"])
def test_a_large_set_of_sequences_stays_on_disk(zipped, tmp_path):
    """And is gathered with its images, to the same batches."""
    tokens, lengths = words(20)
    np.save(tmp_path / "pictures.npy", pixels(20))
    save = np.savez_compressed if zipped else np.savez
    save(tmp_path / "words.npz", tokens=tokens, lengths=lengths)
    options = {"path": str(tmp_path / "pictures.npy"), "context": str(tmp_path / "words.npz")}
    data = load_dataset("array", layout="nhwc", **options)
    assert isinstance(data.context.rows, np.memmap) != zipped
    found = []
    for most in (2**30, data.images.nbytes):
        batches = Batches(data, 8, 3, CPU, 2, 6, resident_bytes=most)
        assert batches.resident == (most == 2**30)
        for step in range(2):
            batches.load(step)
            found.append([part.clone() for part in batches.sequences(1, 4)])
    for resident, gathered in zip(found[:2], found[2:], strict=True):
        assert resident[0].dtype == torch.float16
        for a, b in zip(*(with_null_token(*x) for x in (resident, gathered)), strict=True):
            assert torch.equal(a, b)


def test_sequences_that_do_not_fit_are_one_line(context_run, run_dir, pairs, tmp_path):
    for options, said in (
        ({}, "trained with sequences of tokens of 4 numbers: give context=a .npy"),
        ({"context": np.zeros((2, 3), np.float32)}, "tokens of 3 numbers; expected a .npy"),
        ({"context": np.zeros((2, 2, 2, 4))}, r"\[2, 2, 2, 4\]; expected a .npy"),
        ({"context": "nothing.npy"}, "does not exist"),
        ({"context": [np.zeros((2, 4)), np.zeros((2, 5))]}, r"of shapes \[2, 4\], \[2, 5\]"),
        ({"context": [["a"]]}, "is no sequence of vectors"),
        ({"context": np.full((1, 2, 4), np.nan, np.float32)}, "not finite, first of sample 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            drawn(context_run, **options)
    with pytest.raises(ConfigError, match="trained without one; leave it out"):
        drawn(run_dir, condition=pairs[1], context=np.zeros((2, 4), np.float32))
    good = np.zeros((24, 2, 4), np.float32)
    for arrays, said in (
        ({"a": good[:5]}, r"shape \[5, 2, 4\]; expected \[24, L, D\], a sequence for each image"),
        ({"a": good[:, 0]}, r"float32 \[24, 4\]; expected \[24, L, D\]"),
        ({"a": good, "b": good}, "holds a, b; expected a .npy"),
        ({"lengths": np.zeros(24, int)}, "holds lengths; expected a .npy"),
        ({"a": good, "lengths": np.zeros(3, int)}, r"lengths are int64 \[3\]; expected whole"),
        ({"a": good, "lengths": np.full(24, 3)}, "lengths are 3 to 3; expected 0 to 2"),
        ({"a": good, "lengths": np.zeros(24)}, r"lengths are float64 \[24\]; expected whole"),
    ):
        np.savez(tmp_path / "wrong.npz", **arrays)
        with pytest.raises(ConfigError, match=said):
            load_dataset(
                "folder", path=str(pairs[0]), size=SIZE, context=str(tmp_path / "wrong.npz")
            )
