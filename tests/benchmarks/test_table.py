"""The table of models, GPUs and precisions."""

import csv
from dataclasses import replace

import pytest

from benchmarks import harness, table
from diffusion.errors import ConfigError

from .small import row

STEP = {"op": "train_step", "shape": "128x64x64x3 unet64", "dtype": "any", "pass_": "step"}


def pair(theirs=30e3, ours=10e3, **changes):
    given = STEP | changes
    return [
        row(provider="compile-bf16 graph", median_us=theirs, **given),
        row(provider="triton-bf16 graph", median_us=ours, **given),
    ]


ROWS = [
    *pair(),
    *pair(12e3, 14e3, shape="32x32x32x4 ldm_320"),  # lost
    *pair(40e3, 25e3, gpu="sm_80-on-nvidia-h100-80gb-hbm3"),
    row(provider="triton-bf16 plain", median_us=1.0, **STEP),  # launched from Python
    row(provider="eager-bf16 graph", median_us=1.0, **STEP),
    row(provider="triton-tf32 graph", median_us=1.0, **STEP),  # nothing beside it
    row(provider="triton-bf16 graph deterministic", median_us=1.0, **STEP),
    row(op="unet_forward", shape="1x64x64x3 unet64", provider="compile-bf16", median_us=1000.0),
    row(op="unet_forward", shape="1x64x64x3 unet64", provider="triton-bf16", run="another"),
    row(op="sampling", shape="16x64x64x3 unet64 ddim50", provider="triton-bf16"),
]


def test_a_line_for_whatever_both_sides_have():
    lines = table.find_lines(ROWS)
    found = [(line.op, line.model, line.images, line.size, round(line.ratio, 2)) for line in lines]
    assert found == [
        ("train_step", "ldm_320", 32, 32, 0.86),
        ("train_step", "unet64", 128, 64, 3.0),
        ("train_step", "unet64", 128, 64, 1.6),
        ("unet_forward", "unet64", 1, 64, 35.09),
    ]
    assert [line.one_run for line in lines] == [True, True, True, False]
    text = table.format_lines(lines)
    assert "`ldm_320`" in text and " 0.86 | abc1234 " in text and " H200 " in text
    assert " sm_80 code on H100 " in text and " 35.09* " in text
    assert " 30.0 | " in text and " 1.00 | " in text  # three digits
    assert text.endswith("Torch 2.11.0 with triton 3.6.0; `*`: the two sides may be of two runs.")


def test_the_commits_of_both_sides_are_named_once():
    theirs, ours = pair()
    (line,) = table.find_lines([replace(theirs, commit="1234567"), ours])
    assert line.commit == "1234567, abc1234"
    changed = [replace(side, commit="abc1234+changes") for side in (theirs, ours)]
    (line,) = table.find_lines(changed)
    assert line.commit == "abc1234+"
    assert table.format_lines([line]).endswith("`+` after a commit: the commit with changes.")


def test_the_short_table_has_a_line_a_model_gpu_and_precision():
    text = table.format_summary(table.find_lines(ROWS))
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
    names = ("training step, H200", "training step, sm_80 code on H100", "evaluation, H200")
    assert cells[0] == ["model", "image", "precision", *(f"{n}: ratio (batch)" for n in names)]
    assert cells[2:4] == [
        ["`ldm_320`", "32x32", "bf16", "0.86 (32)", "", ""],
        ["`unet64`", "64x64", "bf16", "3.00 (128)", "1.60 (128)", "35.09* (1)"],
    ]
    assert text.endswith(
        "torch.compile is faster in 1 of these 4 ratios. `*`: the two sides may be of two runs."
    )


def test_the_pages_have_the_tables_of_the_csv_files():
    """`python -m benchmarks.table into=docs/performance.md summary=README.md
    csv=docs/benchmarks/models.csv` writes them anew."""
    files = sorted(harness.RESULTS.glob("*.csv"))
    lines = table.find_lines([row for path in files for row in harness.read_rows(path)])
    for page, begin, text in (
        ("README.md", table.BEGIN_SUMMARY, table.format_summary(lines)),
        ("docs/performance.md", table.BEGIN, table.format_lines(lines)),
    ):
        assert f"{begin}\n{text}\n" in (harness.ROOT / page).read_text(), page
    with (harness.ROOT / "docs" / "benchmarks" / "models.csv").open(newline="") as file:
        assert [row["ratio"] for row in csv.DictReader(file)] == [f"{x.ratio:.3f}" for x in lines]


def test_files(tmp_path):
    results = tmp_path / "results"
    harness.write_rows(results / "nvidia-h200.csv", ROWS)
    page, out = tmp_path / "page.md", tmp_path / "models.csv"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    given = [f"results={results}", f"csv={out}"]
    assert table.main([*given, f"into={page}"]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{table.BEGIN}\n|") and text.endswith(f"{table.END}\nafter\n")
    assert "old" not in text and table.main([*given, f"into={page}"]) == 0
    assert page.read_text() == text
    with out.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4 and lines[0]["ratio"] == "0.857" and lines[0]["ours_commit"] == "abc1234"
    page.write_text(f"{table.BEGIN_SUMMARY}\nold\n{table.END_SUMMARY}\n")
    assert table.main([*given, f"summary={page}"]) == 0
    assert "old" not in page.read_text() and "`ldm_320`" in page.read_text()
    page.write_text("no marks")
    with pytest.raises(ConfigError, match="has no line <!-- models -->"):
        table.main([*given, f"into={page}"])
    with pytest.raises(ConfigError, match="has no rows of ours beside torch.compile"):
        table.main([f"results={tmp_path / 'nowhere'}"])
