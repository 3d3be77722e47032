"""Rows of results: in files, as ratios, in pictures."""

import pytest
import torch

from benchmarks import harness, run, summary
from benchmarks.plots import draw_plots, merged
from benchmarks.providers import experiments
from diffusion.errors import ConfigError
from triton_kernels.runtime.device import Device, standing_for

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


def test_what_was_timed_anew_is_beside_nothing_older():
    others = [row(provider=p, run="old") for p in ("cudnn", "cublas")]
    step = {"op": "train_step", "shape": "8x64x64x3 unet64", "run": "old"}
    old = [row(run="old"), *others, row(pass_="wgrad", run="old"), row(**step, provider="eager")]
    assert merged(old, [row(run="new")]) == [row(run="new"), *old[1:]]
    both = [row(run="new"), row(run="new", provider="cublas")]
    assert merged(old, both) == [*old[3:], *both]
    again = [row(**step | {"run": "new"}, provider=p) for p in ("triton-bf16", "compile-bf16")]
    assert merged(old, again) == [*old, *again]


def test_plots_are_drawn(tmp_path):
    rows = [row(), row(provider="cudnn", median_us=57.0)]
    rows += [
        row(op="group_norm", shape="4x2x2x8 silu", provider=p, flops=0, median_us=t)
        for p, t in (("triton", 50.0), ("torch", 40.0))
    ]
    rows += [row(op="copy", provider="torch", flops=0), row(op="matmul", provider="cublas")]
    rows += [row(dtype="fp32"), row(dtype="fp32", provider="cudnn", median_us=30.0)]
    step = {"op": "train_step", "shape": "8x64x64x3 unet64", "pass_": "step"}
    rows += [row(**step, provider=f"{p} graph") for p in ("compile-bf16", "triton-bf16")]
    names = {path.name for path in draw_plots(rows, tmp_path)}
    kinds = ["conv2d-batch32-ratio", "conv2d-batch32-fp32-ratio", "conv2d-roofline"]
    kinds += ["group_norm-ratio", "group_norm-roofline"]
    assert names == {f"nvidia-h200-{kind}.png" for kind in (*kinds, "train_step-unet64")}
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)


def test_the_summary_counts_calls():
    [experiment, *_] = experiments(TINY[0], 7, "bf16")
    shape = experiment.shape
    rows = [row(shape=shape), row(shape=shape, provider="cudnn", median_us=57.0)]
    assert " 0.200 |" in run.summary([experiment], rows)  # 7 x 28.5 us
    line = run.describe(experiment, rows, ["cublas failed: out of memory"])
    assert "ratio 2.00 over cudnn" in line and "! cublas failed" in line


def test_the_table_of_the_ops_says_what_is_lost(tmp_path):
    step = {"op": "denoise_step", "shape": "32x64x64x3"}
    rows = [row(), row(provider="cudnn", median_us=57.0)]
    rows += [row(pass_="dgrad"), row(pass_="dgrad", provider="cudnn", median_us=14.25)]
    rows += [row(**step), row(**step, provider="compile", median_us=57.0, run="another")]
    path = tmp_path / "README.md"
    path.write_text(f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n")
    summary.write_into(path, rows)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["conv2d, 3x3", "bf16", "32", "forward / input gradient", "2.00 / 0.50",
            "1 of 1 / 0 of 1"] in table  # fmt: skip
    assert "Of the 6 rows behind this table 5 are of one run (20261101T120000Z" in text
    lost = ["conv2d", "32x64x64 64->64 3x3", "bf16", "input gradient"]
    assert "1 of 3" in text and [line[:4] for line in table if line[-1:] == ["0.50"]] == [lost]
    assert "All 2 rows" in summary.format_ops(rows[:2])
    path.write_text("no marks")
    with pytest.raises(ConfigError, match="has no line <!-- ops -->"):
        summary.write_into(path, rows)


def test_the_page_of_the_ops_has_the_table_of_the_csv():
    """`python -m benchmarks.plots` writes it anew."""
    [path] = summary.files_of_ops()
    text = (harness.ROOT / "docs" / "ops.md").read_text()
    assert f"{summary.BEGIN}\n{summary.format_ops(harness.read_rows(path))}" in text


def test_rows_of_another_chips_code_say_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for arch, name in ((90, "NVIDIA H200"), (80, "sm_80-on-NVIDIA H200")):
        with standing_for(Device(arch == 90, 132, 166_912, arch=arch)):
            assert harness.gpu_name() == name
