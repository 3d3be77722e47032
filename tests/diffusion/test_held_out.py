"""The loss on what is held out: of which samples, in which unit, with which noise."""

import numpy as np
import pytest
import torch

from diffusion.data.elephants import elephants
from diffusion.data.held_out import Rows, split, spread
from diffusion.data.image_set import ImageSet
from diffusion.errors import ConfigError
from diffusion.factory import Process
from diffusion.runs.training import train
from diffusion.runtime.backend import TORCH_FP32
from diffusion.runtime.distributed import Processes
from diffusion.training.held_out_loss import BANDS, EDGES, HeldOutLoss, levels

from ..end_to_end.run import TINY, rows
from ..test_configs import composed
from .test_trainer import numbers, train_killed_before

CPU = torch.device("cpu")
QUIET = (*TINY, "train.sample_count=0", "optim.warmup=0")
HELD = (*QUIET, "dataset.held_out=4", "train.eval_every=4")


def images(n: int) -> ImageSet:
    pixels = np.random.default_rng(0).integers(0, 256, (n, 8, 8, 3), np.uint8)
    return ImageSet(torch.from_numpy(pixels))


def loss_of(process: Process, data: Rows, processes: Processes | None = None, **options):
    processes = processes or Processes(None)
    options = {"most": 100, "batch_size": 4} | options
    return HeldOutLoss(data, process, TORCH_FP32, CPU, processes, **options)


# --- which samples --------------------------------------------------------------------------------


def test_the_parts_are_a_partition_and_a_smaller_hold_out_begins_a_larger_one():
    data = images(50)
    trained, held_out = split(data, 0.2)
    assert len(trained) == 40 and len(held_out) == 10
    assert sorted([*trained.rows, *held_out.rows]) == list(range(50))
    _, fewer = split(data, 3)
    assert fewer.rows.tolist() == held_out.rows[:3].tolist()
    assert split(data, 0) == (data, None)
    # the rule is stated, so the numbers are, too
    assert held_out.rows.tolist() == split(images(50), 10)[1].rows.tolist()
    assert sorted(spread(data).rows) == list(range(50))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("50", "dataset.held_out=50.* is 50 of the 12 samples"),
        ("0.01", "is 0 of the 12 samples; expected at least 1"),
        ("-1", "dataset.held_out=-1 is wrong; expected a share below 1, or a number of images"),
        ("1.5", "dataset.held_out=1.5 is wrong"),
        ("true", "dataset.held_out=True is wrong"),
    ],
)
def test_wrong_hold_outs(tmp_path, value, words):
    with pytest.raises(ConfigError, match=words):
        train(composed(*QUIET, f"dataset.held_out={value}", "train.steps=1"), tmp_path)


def test_what_is_held_out_is_not_trained_on(monkeypatch, tmp_path):
    """Resident on the device, and gathered by a thread."""
    from diffusion.data.batches import Batches

    data = elephants(count=12, size=8)
    trained, held_out = split(data, 4)
    for most in (2**30, 0):
        batches = Batches(trained, 8, 0, CPU, resident_bytes=most)
        seen = []
        for step in range(2):
            batches.load(step)
            pixels, index, _ = batches.part(0, 8)
            seen.append(pixels if index is None else pixels[index])
        seen = torch.cat(seen).flatten(1).numpy()
        kept = data.images[torch.from_numpy(held_out.rows)].flatten(1).numpy()
        assert not (seen[:, None] == kept[None]).all(-1).any()
        assert len(np.unique(seen[:8], axis=0)) == 8  # an epoch is the 8 others


# --- in which unit --------------------------------------------------------------------------------

PROCESSES = {
    "epsilon": Process(),
    "v": Process("cosine", prediction="v_prediction"),
    "x_0": Process("cosine", prediction="sample", num_timesteps=400),
    "learned variance": Process("cosine", variance="learned_range"),
    "flow": Process("flow", prediction="velocity"),
    "edm": Process("edm", prediction="v_prediction", sigma_data=0.5, p_mean=-1.2, p_std=1.2),
}


class Known(torch.nn.Module):
    """Says D(y + sigma n) = 0.25 (y + sigma n), whatever it is to predict."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process

    def forward_nhwc(self, x, t, labels=None):
        assert not self.training
        schedule = self.process.schedule
        known = np.log(np.minimum(schedule.sigmas, 1e9))  # of a flow the last is infinite
        sigma = np.exp(np.interp(t.numpy(), schedule.timestep_map, known))
        straight = 1 + sigma if self.process.prediction == "velocity" else np.sqrt(1 + sigma**2)
        signal = torch.from_numpy(1 / straight).float().view(-1, 1, 1, 1)
        noise = torch.from_numpy(sigma).float().view(-1, 1, 1, 1) * signal
        x_0 = 0.25 * x / signal  # of x_0 / scale
        epsilon = (x - signal * x_0) / noise
        kind = self.process.prediction
        output = {"epsilon": epsilon, "sample": x_0, "velocity": epsilon - x_0}
        output["v_prediction"] = signal * epsilon - noise * x_0
        output = output[kind]
        return torch.cat((output, x), -1) if self.process.learns_variance else output


@pytest.mark.parametrize("name", PROCESSES)
def test_the_same_denoiser_has_the_same_loss_whatever_it_predicts(name):
    """And the loss is the one that can be computed: |0.25 (y + sigma n) - y|^2 in EDM's unit."""
    data = spread(images(10))
    process = PROCESSES[name]
    found = loss_of(process, data)(Known(process).train())
    y = data.images[torch.from_numpy(data.rows)].double() / 127.5 - 1
    sigmas, bands = levels(process)
    assert len(sigmas) == 10 and found.images == 10 and found.levels == 10
    square = y.square().mean().item()
    for band, (name, low, high) in enumerate(zip(BANDS, EDGES, EDGES[1:], strict=False)):
        inside = sigmas[bands == band]
        assert ((low < inside) & (inside < high)).all()
        weight = (inside**2 + 0.25) / (0.25 * inside**2)
        expected = (weight * (0.5625 * square + 0.0625 * inside**2)).mean()
        assert found.bands[name] == pytest.approx(expected, rel=0.06)  # the noise is of 1,920
    reference = loss_of(PROCESSES["epsilon"], data)(Known(PROCESSES["epsilon"]))
    assert found.total == pytest.approx(reference.total, rel=1e-4)
    assert found.bands == pytest.approx(reference.bands, rel=1e-4)


def test_levels_outside_a_chain_are_left_out():
    """Stable Diffusion's goes to 14.6, from 0.03; another to 4."""
    process = Process("linear", beta_start=0.01, beta_end=0.011, num_timesteps=250)
    sigmas, bands = levels(process)
    assert sigmas.max() < process.schedule.sigmas[-1] and sigmas.min() > process.schedule.sigmas[0]
    found = loss_of(process, spread(images(4)))(Known(process))
    assert found.levels == len(sigmas) < 10
    row = found.row()
    assert row[BANDS[-1]] == "" and row["levels"] == len(sigmas) and np.isfinite(row["held_out"])


# --- with which noise -----------------------------------------------------------------------------


class Noted(torch.nn.Module):
    """Keeps the noise of each level: what is given to it, for images of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.given = []

    def forward_nhwc(self, x, t, labels=None):
        self.given.append(x)
        return torch.zeros_like(x)


def test_the_noise_depends_on_the_sample_and_the_level_alone():
    data, process = spread(ImageSet(torch.full((6, 4, 4, 1), 127, dtype=torch.uint8))), Process()
    whole, parts = Noted(), Noted()
    one = loss_of(process, data, batch_size=6)(whole)
    other = loss_of(process, data, batch_size=2)(parts)
    assert one.total == pytest.approx(other.total, rel=1e-6)
    assert len(whole.given) == 10 and len(parts.given) == 30
    for k in range(10):
        assert torch.equal(torch.cat(parts.given[k::10]), whole.given[k])
    assert len({float(x[0, 0, 0, 0]) for x in whole.given}) == 10


def test_both_backends_make_the_same_noise(device):
    from diffusion.runtime.backend import choose_backend

    data, process = spread(ImageSet(torch.full((3, 4, 4, 4), 100, dtype=torch.uint8))), Process()
    noted = []
    for name in ("torch", "triton"):
        noted.append(Noted())
        backend = choose_backend(name, "fp32", device)
        HeldOutLoss(data, process, backend, device, Processes(None), most=9)(noted[-1])
    for a, b in zip(noted[0].given, noted[1].given, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)


def test_processes_share_the_batches_and_have_the_bits_of_one():
    """Each computes every other batch; what they sum is what one has."""
    data, process = spread(images(10)), Process()
    summed = torch.zeros(10, 10, dtype=torch.float64)

    class Two(Processes):
        def __init__(self, rank):
            super().__init__(None)
            self.rank, self.count = rank, 2

        def start_sum(self, x):
            def finish():
                summed.add_(x)
                x.copy_(summed)

            return finish

    first = loss_of(process, data, Two(0))(Known(process))
    both = loss_of(process, data, Two(1))(Known(process))
    alone = loss_of(process, data)(Known(process))
    assert both == alone and first.total < alone.total


# --- in a run -------------------------------------------------------------------------------------


def test_a_run_evaluates_returns_it_and_is_resumed_to_the_bit(tmp_path, monkeypatch):
    options = (*HELD, "train.save_every=3", "train.log_every=2", "optim.decay=none")
    config = composed(*options, "train.steps=10")
    returned = train(config, tmp_path / "a")
    table = rows(tmp_path / "a" / "held_out.csv")
    assert [row["step"] for row in table] == ["4", "8", "10"]
    assert {row["images"] for row in table} == {"4"} and len({row["data"] for row in table}) == 1
    assert returned == pytest.approx(float(table[-1]["held_out"]), rel=1e-5)
    # done already: the same number, from the file
    assert train(config, tmp_path / "a") == float(table[-1]["held_out"])
    train_killed_before(monkeypatch, 5, config, tmp_path / "b")  # after the row of step 4
    train(composed(*options, "train.steps=6"), tmp_path / "b")  # whose last row is that of step 6
    train(config, tmp_path / "b")
    texts = [(tmp_path / name / "held_out.csv").read_bytes() for name in ("a", "b")]
    assert texts[0] == texts[1] and numbers(tmp_path / "a") == numbers(tmp_path / "b")


def test_evaluating_does_not_change_what_is_learned(tmp_path):
    for name, every in (("with", 1), ("without", 0)):
        settings = ("train.steps=4", f"train.eval_every={every}", "model.dropout=0.1")
        train(composed(*QUIET, "dataset.held_out=4", *settings), tmp_path / name)
    assert numbers(tmp_path / "with") == numbers(tmp_path / "without")
    assert not (tmp_path / "without" / "held_out.csv").exists()


def test_what_a_sweeper_minimises(tmp_path):
    steps = ("train.steps=2", "train.eval_every=1")
    loss = train(composed(*HELD, *steps, "train.metric=loss"), tmp_path / "loss")
    assert loss == pytest.approx(float(rows(tmp_path / "loss")[-1]["loss"]), rel=1e-5)
    none = train(composed(*QUIET, *steps), tmp_path / "none")  # nothing is held out
    assert none == pytest.approx(float(rows(tmp_path / "none")[-1]["loss"]), rel=1e-5)
    with pytest.raises(ConfigError, match="train.metric=fid is no result .* one of loss, held_out"):
        train(composed(*HELD, *steps, "train.metric=fid"), tmp_path / "x")
    with pytest.raises(ConfigError, match="held_out needs dataset.held_out and train.eval_every"):
        train(composed(*QUIET, *steps, "train.metric=held_out"), tmp_path / "y")
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()
