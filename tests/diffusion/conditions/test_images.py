"""Networks that are given an image: what they learn, how they draw, and how they go on."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import triton_kernels
from diffusion.data.batches import Batches
from diffusion.data.context import Context
from diffusion.data.given import GivenChannels
from diffusion.data.image_set import ImageSet
from diffusion.errors import ConfigError
from diffusion.export.run import export
from diffusion.formats.trained import load_trained
from diffusion.models.conditions import Conditions, drop_labels
from diffusion.models.flat_parameters import FlatParameters
from diffusion.process.objective import Objective
from diffusion.process.schedule import make_schedule
from diffusion.runs.evaluation import evaluate
from diffusion.runs.sampling import sample
from diffusion.runs.training import train
from diffusion.runtime.backend import TORCH_FP32, Backend
from diffusion.runtime.distributed import Processes
from diffusion.sampling.beside import Beside
from diffusion.sampling.guidance import guide
from diffusion.training.gradient_sum import GradientSum
from diffusion.training.optimizer import Optimizer, OptimizerSettings
from diffusion.training.train_step import TrainStep

from ...end_to_end.run import rows, run_together
from ...test_configs import composed
from .runs import CPU, SIZE, check_goes_on, drawn, high_noise_loss, of_pairs, pixels, words


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


def test_a_grid_shows_condition_and_result_side_by_side(image_run):
    with Image.open(image_run / "samples" / "step_00000003.png") as picture:
        assert picture.size == (2 * 2 * 64 + 6, 2 * 64 + 6)  # two columns of pairs, enlarged
        left = np.asarray(picture)[2 : 2 + 64 : 8, 2 : 2 + 64 : 8]
    trained = load_trained(image_run, CPU)
    assert trained.condition.channels == 3 and trained.model.in_channels == 6
    negatives = 255 - pixels(24)
    assert any(np.array_equal(left, negative) for negative in negatives)


def test_the_condition_changes_what_is_drawn_and_folders_are_arrays(image_run, pairs):
    _, negatives = pairs
    images = drawn(image_run, condition=negatives)
    assert images.shape == (3, SIZE, SIZE, 3) and images.dtype == np.uint8
    cats = [np.asarray(Image.open(p)) for p in sorted(negatives.rglob("*.png"))]
    assert np.array_equal(images, drawn(image_run, condition=np.stack(cats)))
    assert np.array_equal(images[:1], drawn(image_run, condition=np.stack(cats[:1]))[:1])
    assert not np.array_equal(images, drawn(image_run, condition=np.stack(cats[::-1])))
    one_by_one = drawn(image_run, condition=negatives, batch_size=1)
    assert np.abs(one_by_one.astype(int) - images).max() <= 1


def test_guidance_goes_away_from_no_condition_and_no_class(image_run):
    trained = load_trained(image_run, CPU)
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
    check_goes_on(settings, tmp_path)
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


def test_pictures_are_beside_their_conditions_and_files_are_not(image_run, pairs, tmp_path):
    settings = {"ckpt": str(image_run), "n": 2, "steps": 2, "device": "cpu"}
    settings["condition"] = str(pairs[1])
    sample(settings | {"out": str(tmp_path / "grid.png"), "guidance": 2.0})
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (2 * 2 * 64 + 6, 64 + 4)
    sample(settings | {"out": str(tmp_path / "folder")})
    with Image.open(tmp_path / "folder" / "000001.png") as picture:
        assert picture.size == (SIZE, SIZE)
    sample(settings | {"out": str(tmp_path / "drawn.npz")})
    assert np.load(tmp_path / "drawn.npz")["arr_0"].shape == (2, SIZE, SIZE, 3)


def test_the_held_out_loss_is_that_of_training(image_run):
    row = evaluate({"ckpt": str(image_run), "metrics": ["loss"], "device": "cpu"})
    assert row["held_out"] == pytest.approx(
        float(rows(image_run / "held_out.csv")[-1]["held_out"]), rel=1e-5
    )


@pytest.mark.long
def test_graphs_take_the_condition_as_an_input(image_run, tmp_path):
    out = tmp_path / "model.pt2"
    export({"ckpt": str(image_run), "format": "torch_export", "out": str(out)})
    extra = {"denoiser.json": ""}
    program = torch.export.load(out, extra_files=extra)
    assert json.loads(extra["denoiser.json"])["condition"]["channels"] == 3
    model = load_trained(image_run, CPU).model
    x, image, t = torch.randn(3, 3, SIZE, SIZE), torch.randn(3, 3, SIZE, SIZE), torch.arange(3)
    expected = model(torch.cat((x, image), 1), t, torch.tensor([0, 1, 0]))
    found = program.module()(x, t, torch.tensor([0, 1, 0]), image)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
