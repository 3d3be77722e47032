"""Held-out loss over wall-clock: what is measured, written and said."""

import csv

import pytest
import torch

from benchmarks import learning, learning_curves
from benchmarks.learning_curves import Point
from diffusion.data.elephants import elephants
from diffusion.data.packed import write_packed
from diffusion.errors import ConfigError
from diffusion.runs.precompile_worker import training_step
from diffusion.training.optimizer import OptimizerSettings

from .small import CPU

SMALL = {
    "model_channels": 8,
    "channel_mult": [1, 2],
    "num_res_blocks": 1,
    "attention_resolutions": [],
    "num_groups": 4,
    "num_head_channels": 8,
}


def run(tmp_path, monkeypatch, **changes):
    """The benchmark, of few steps of a small network on drawn elephants."""
    settings = learning.model_settings("unet_tiny") | SMALL
    monkeypatch.setattr(learning, "model_settings", lambda name: settings)
    file = tmp_path / "elephants.packed"
    if not file.exists():
        write_packed(file, elephants(count=24, size=16))
    options = {
        "dataset": file,
        "size": 16,
        "batch": 4,
        "seconds": 60,
        "steps": 12,
        "every": 0,
        "held_out": 6,
        "ema": 0.5,
        "providers": "torch-fp32,eager-fp32",
        "samples": 2,
        "device": "cpu",
        "out": tmp_path / "out",
    }
    return learning.main([f"{key}={value}" for key, value in (options | changes).items()])


def test_ways_begin_alike_and_learn(tmp_path, monkeypatch, capsys):
    assert run(tmp_path, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "eager-fp32: 0.0 of 60 s, step 0, 0 images, held-out loss" in said
    assert "| torch-fp32 |" in said
    curves = {}
    for name in ("torch-fp32", "eager-fp32"):
        curve = curves[name] = learning_curves.read_curve(tmp_path / "out" / f"{name}.csv")
        assert [point.step for point in curve] == list(range(13))
        assert [point.images for point in curve] == list(range(0, 52, 4))
        seconds = [point.seconds for point in curve]
        assert seconds[0] == 0 and seconds == sorted(seconds) and seconds[-1] > 0
        assert curve[-1].held_out < 0.99 * curve[0].held_out
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 500
    ours, theirs = curves.values()
    assert ours[0].held_out == theirs[0].held_out
    # other noise, the same model and optimizer
    assert ours[-1].held_out == pytest.approx(theirs[-1].held_out, rel=0.02)
    assert (tmp_path / "out" / "learning.png").stat().st_size > 10_000


@pytest.mark.long
def test_what_is_judged_is_the_average(tmp_path, monkeypatch):
    """Of the parameters after each step, by the rule of `optim`, whichever way trains."""
    ways = ("torch-fp32", "eager-fp32")
    average_at = OptimizerSettings(ema_decay=0.5).ema_decay_at
    for way in ways:
        judged = {}
        for ema in (0, 0.5):
            losses, found = learning.Judge.loss, []

            def loss(judge, parameters, losses=losses, found=found):
                found.append({name: value.detach().clone() for name, value in parameters.items()})
                return losses(judge, parameters)

            with monkeypatch.context() as patch:
                patch.setattr(learning.Judge, "loss", loss)
                assert run(tmp_path, patch, providers=way, ema=ema, steps=6, samples=0) == 0
            judged[ema] = found
        average = judged[0][0]
        for k, parameters in enumerate(judged[0][1:]):
            decay = average_at(k)
            average = {n: decay * x + (1 - decay) * parameters[n] for n, x in average.items()}
            for name, value in average.items():
                torch.testing.assert_close(judged[0.5][k + 1][name], value, rtol=1e-5, atol=1e-6)


def test_a_way_ends_in_time_and_joins_what_is_there(tmp_path, monkeypatch, capsys):
    for provider in ("torch-fp32", "eager-fp32"):
        limits = {"seconds": 0.3, "steps": 0, "every": 0.1, "samples": 0}
        assert run(tmp_path, monkeypatch, providers=provider, **limits) == 0
        with (tmp_path / "out" / f"{provider}.csv").open() as file:
            last = [float(row["seconds"]) for row in csv.DictReader(file)][-1]
        assert 0.3 <= last < 20
    assert "| torch-fp32 |" in capsys.readouterr().out.rsplit("| way", 1)[1]  # with the other's


def test_wrong_settings_are_named(tmp_path, monkeypatch):
    for wrong, message in (
        ({"providers": "jax-fp32"}, "providers=jax-fp32 is unknown; choose from triton-bf16"),
        ({"dataset": ""}, "dataset= is missing"),
        ({"dataset": tmp_path / "none.packed"}, "none.packed is no file"),
        ({"held_out": 24}, "held_out=24 is 24 of the 24 samples"),
        ({"held_out": 0}, "held_out=0; expected at least 1"),
        ({"batch": 0}, "batch=0; expected at least 1"),
        ({"ema": 1}, r"ema=1.0 is outside \[0, 1\)"),
        ({"size": 32}, "size=32 differs"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(tmp_path, monkeypatch, **wrong)


def test_batches_are_of_the_data_and_half_are_mirrored():
    torch.manual_seed(0)
    images = torch.arange(6 * 4, dtype=torch.uint8).view(6, 1, 4, 1).expand(6, 2, 4, 3).contiguous()
    chosen, labels = learning.random_batches(images, 400)()
    assert labels is None and chosen.shape == (400, 3, 2, 4)
    assert chosen.is_contiguous(memory_format=torch.channels_last)
    rows = chosen[:, 0, 0]  # [N, 4]
    mirrored = rows[:, 0] > rows[:, 3]
    rows = torch.where(mirrored[:, None], rows.flip(1), rows)
    number = rows[:, 0] // 4
    assert (rows == 4 * number[:, None] + torch.arange(4)).all()
    assert set(number.tolist()) == set(range(6)) and 150 < mirrored.sum() < 250


def test_kernels_are_compiled_for_the_step_that_is_run(tmp_path, monkeypatch):
    """The job that compiles ahead can be built, and is of ours alone."""
    jobs = []
    monkeypatch.setattr(learning, "compile_ahead", lambda job, settings, *_: jobs.append(settings))
    monkeypatch.setattr(learning.harness, "OURS", "torch")
    assert run(tmp_path, monkeypatch, steps=1, samples=0) == 0
    (job,) = jobs
    step = training_step(job, CPU, "torch")
    assert step.batches.batch_size == 4 and step.flip and len(step.batches.data) == 18
    assert step.optimizer.settings.clip_norm == 0 and step.optimizer.settings.warmup == 0


def test_when_ours_was_there():
    def curve(*points):
        return [Point(seconds, 10 * i, 80 * i, y, 1.5) for i, (seconds, y) in enumerate(points)]

    ours = curve((0, 1.0), (10, 0.6), (20, 0.2), (30, 0.3))
    assert learning_curves.reached(ours, 0.5) == pytest.approx(12.5)
    assert learning_curves.reached(ours, 0.2) == 20
    assert learning_curves.reached(ours, 0.1) is None
    curves = {"triton-bf16": ours, "eager-bf16": curve((0, 1.0), (50, 0.5))}
    lines = learning_curves.format_curves(curves).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert cells[0] == ["triton-bf16", "8", "30.0", "30", "0.30000", "1.5", "-", "-"]
    assert cells[1] == ["eager-bf16", "2", "50.0", "10", "0.50000", "1.5", "12.5", "4.00"]


def test_other_files_are_no_curves(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(ConfigError, match="a.csv has no rows of seconds,step,images,held_out"):
        learning_curves.read_curve(tmp_path / "a.csv")


@pytest.mark.gpu
def test_steps_in_a_graph_learn_as_those_without(tmp_path, monkeypatch):
    """What the graph reads is kept: judging takes memory between two measurements."""
    ways = ("triton-bf16", "compile-bf16", "eager-bf16")
    options = {"device": "cuda", "steps": 300, "every": 0.05, "samples": 0}
    assert run(tmp_path, monkeypatch, providers=",".join(ways), **options) == 0
    curves = [learning_curves.read_curve(tmp_path / "out" / f"{name}.csv") for name in ways]
    assert len({curve[0].held_out for curve in curves}) == 1
    ends = [curve[-1].held_out for curve in curves]
    assert max(ends) < 0.6 * curves[0][0].held_out
    assert ends == pytest.approx([ends[0]] * 3, rel=0.1)
