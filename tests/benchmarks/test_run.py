"""The order of a run: compiled elsewhere, checked, timed, written, and timed again."""

from contextlib import nullcontext

import pytest
import torch

from benchmarks import harness, measure, run, stopwatch
from benchmarks.account import Account
from benchmarks.experiment import Experiment, Provider
from benchmarks.harness import Provenance
from benchmarks.providers import experiments
from benchmarks.stopwatch import Timing

from .small import CPU, TINY


@pytest.fixture
def fake_clock(monkeypatch):
    """Times that stand in for a GPU's: one measurement in four is disturbed, its repetition not."""
    seen = []

    def time_graph(runs, budget_ms=40.0, stage=lambda name: nullcontext()):
        with stage("replays"):
            results = [run() for run in runs]
        seen.append(len(runs))
        return Timing(10.0, 10.0, 20.0 if len(seen) % 4 == 1 else 10.5), results

    monkeypatch.setattr(stopwatch, "time_graph", time_graph)
    monkeypatch.setattr(stopwatch, "copies_beyond_l2", lambda size, device: 2)
    monkeypatch.setattr(harness, "require_cuda", lambda: CPU)
    monkeypatch.setattr(stopwatch, "freeze_objects", lambda: None)
    monkeypatch.setattr(run, "time_roofs", lambda conditions: [])
    return seen


def doubling(shape: str) -> Experiment:
    providers = {
        "triton": Provider(lambda i: lambda: (i["x"] + i["x"],)),
        "cudnn": Provider(lambda i: lambda: (2 * i["x"],)),
    }
    return Experiment(
        "conv2d", shape, "fp32", "fwd", 1, lambda device: {"x": torch.randn(8, device=device)},
        lambda i: (2 * i["x"],), providers, bytes=64, flops=8,
    )  # fmt: skip


def test_a_run_writes_rows_and_repeats_the_disturbed(fake_clock, monkeypatch, tmp_path, capsys):
    chosen = [doubling(f"{n}x1x1 8->8 1x1") for n in (2, 3, 4, 5)]
    monkeypatch.setattr(run, "select", lambda settings, ops: chosen)
    monkeypatch.setenv("BENCHMARK_RUN", "tonight")
    arguments = ["op=conv2d", f"out={tmp_path}", "plots=0", "processes=0", "dtype=fp32"]
    assert run.main(arguments) == 0
    [path] = tmp_path.glob("*.csv")
    rows = harness.read_rows(path)
    assert len(rows) == sum(len(e.providers) for e in chosen)
    assert {r.run for r in rows} == {"tonight"}
    text = capsys.readouterr().out
    assert f"[{len(chosen)}/{len(chosen)}, " in text and "again: " in text
    assert sum(not r.is_steady for r in rows) < len(rows) // 4
    stages = next(line for line in text.splitlines() if line.startswith("| seconds"))
    assert all(f" {s} " in stages for s in ("inputs", "reference", "check triton", "replays"))
    assert run.main([*arguments, "warm=1"]) == 0


def test_an_experiment_without_a_right_result_has_no_row(fake_clock, monkeypatch):
    [experiment, *_] = experiments(TINY[0], 1, "fp32")
    wrong = measure.Conditions(CPU, Provenance("gpu", "2.11", "3.6", "abc"), 1.0, Account())
    monkeypatch.setattr(measure, "_FLOORS", {"fp32": -1.0})
    rows, failed = measure.run_experiment(experiment, (), wrong)
    assert rows == [] and fake_clock == []
    assert [f.split()[0] for f in failed] == list(experiment.providers)


def test_the_account_adds_up():
    account = Account()
    for op in ("conv2d", "norm"):
        account.op = op
        with account.stage("check"):
            torch.ones(2)
    account.seconds["norm", "replays"] = 2.5
    lines = str(account).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["conv2d", "norm", "all"]
    assert lines[-1].split("|")[3].strip() == "2.5"


@pytest.mark.gpu
def test_graphs_follow_each_other_in_the_same_memory(device):
    inputs = [torch.full((2**16,), float(k), device=device) for k in range(3)]
    for factor in (1.0, 2.0, 3.0):
        runs = [lambda x=x, f=factor: x * f + 1 for x in inputs]
        timing, results = stopwatch.time_graph(runs, 1.0)
        assert 0 < timing.p20 <= timing.median <= timing.p80
        assert [x[0].item() for x in results] == [factor * k + 1 for k in range(3)]
        del results
    reserved = torch.cuda.memory_reserved()
    stopwatch.release_memory(least=0.99)
    assert torch.cuda.memory_reserved() == reserved
    stopwatch.release_memory()
    assert torch.cuda.memory_reserved() < reserved
    with pytest.raises(RuntimeError, match="not today"):
        stopwatch.time_graph([_fails])
    assert stopwatch.time_graph([lambda: inputs[0] + 1])[1][0][0].item() == 1.0


def _fails():
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("not today")
