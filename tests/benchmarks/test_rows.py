"""Rows of results: in files, as ratios, in pictures."""

import pytest

from benchmarks import harness, run
from benchmarks.plots import draw_plots
from benchmarks.providers import experiments
from diffusion.errors import ConfigError

from .small import TINY, row


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "results" / "gpu.csv"
    assert harness.read_rows(path) == []
    rows = [row(), row(provider="cudnn", median_us=27.8), row(shape='odd "name", comma')]
    harness.add_rows(path, rows)
    assert harness.read_rows(path) == rows
    assert path.read_text().splitlines()[0] == (
        "op,shape,dtype,pass,provider,median_us,p20_us,p80_us,bytes,flops,gpu,torch,triton,commit,run"
    )
    again = row(median_us=20.0, commit="def5678")
    harness.add_rows(path, [again])
    assert harness.read_rows(path) == [again, *rows[1:]]


def test_rows_of_before_runs_had_names(tmp_path):
    path = tmp_path / "gpu.csv"
    harness.write_rows(path, [row(), row(provider="cudnn")])
    lines = path.read_text().splitlines()
    path.write_text("".join(line.rpartition(",")[0] + "\n" for line in lines))
    assert harness.read_rows(path)[1] == row(provider="cudnn", run="")


def test_foreign_columns_are_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="has columns a,b; expected op,shape"):
        harness.read_rows(path)


def test_ratios_are_to_the_fastest_other():
    rows = [row(), row(provider="cudnn", median_us=57.0), row(provider="cublas", median_us=60.0)]
    [(ours, best)] = harness.ratios([*rows, row(pass_="wgrad")])
    assert (ours.provider, best.provider) == ("triton", "cudnn")
    assert row().tflops == pytest.approx(339.07, rel=1e-4)


def test_plots_are_drawn(tmp_path):
    rows = [row(), row(provider="cudnn", median_us=57.0)]
    rows += [
        row(op="group_norm", shape="x", provider=p, flops=0, median_us=t)
        for p, t in (("triton", 50.0), ("torch", 40.0))
    ]
    rows += [row(op="copy", provider="torch", flops=0), row(op="matmul", provider="cublas")]
    step = {"op": "train_step", "shape": "8x64x64x3 unet64", "pass_": "step"}
    rows += [row(**step, provider=f"{p} graph") for p in ("compile-bf16", "triton-bf16")]
    names = {path.name for path in draw_plots(rows, tmp_path)}
    kinds = ("conv2d-batch32-ratio", "conv2d-roofline", "group_norm-ratio", "group_norm-roofline")
    assert names == {f"nvidia-h200-{kind}.png" for kind in (*kinds, "train_step-unet64")}
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)


def test_the_summary_counts_calls():
    [experiment, *_] = experiments(TINY[0], 7, "bf16")
    shape = experiment.shape
    rows = [row(shape=shape), row(shape=shape, provider="cudnn", median_us=57.0)]
    assert " 0.200 |" in run.summary([experiment], rows)  # 7 x 28.5 us
    line = run.describe(experiment, rows, ["cublas failed: out of memory"])
    assert "ratio 2.00 over cudnn" in line and "! cublas failed" in line
