"""Curves of losses, and whether they are the same."""

import numpy as np
import pytest

from benchmarks import curves, parity
from diffusion.data.elephants import elephants
from diffusion.errors import ConfigError

from .small import tiny_settings


def test_losses_are_smoothed_before_they_are_compared():
    a, b = np.array([1.0, 3.0, 2.0, 4.0]), np.array([2.0, 2.0, 2.0, 2.0, 9.0])
    assert curves.smooth(a, 2).tolist() == [2.0, 2.5, 3.0]
    assert curves.smooth(a, 99).tolist() == [2.5]
    assert curves.difference(a, b, 2) == pytest.approx((0.25, 0.5))
    assert curves.difference(a, b, 1) == pytest.approx((0.5, 1.0))
    with pytest.raises(ConfigError, match="has no steps"):
        curves.difference(a, np.array([]), 2)


def test_losses_are_read_as_written(tmp_path):
    losses = [0.1, 1 / 3, 2e-7]
    curves.write_losses(tmp_path / "a.csv", losses)
    assert curves.read_losses(tmp_path / "a.csv").tolist() == pytest.approx(losses, rel=1e-8)
    (tmp_path / "b.csv").write_text("step,loss\n50,1\n100,1\n")
    with pytest.raises(ConfigError, match="a row for every step"):
        curves.read_losses(tmp_path / "b.csv")
    for name, text in (("c.csv", "a,b\n1,2\n"), ("missing.csv", None)):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="columns step and loss"):
            curves.read_losses(tmp_path / name)


def test_parity_writes_curves_and_a_picture(tmp_path, monkeypatch, capsys):
    """Two runs of the same backend are the same, and a third differs."""
    tiny_settings(monkeypatch)
    monkeypatch.setattr(parity, "_TURN", 2)
    monkeypatch.setattr(parity, "load_dataset", lambda **_: elephants(count=6, size=16))
    folder = tmp_path / "images"
    folder.mkdir()
    names = ("torch-bf16", "torch-tf32", "torch-fp32")
    options = {
        "dataset": folder,
        "steps": 3,
        "batch": 2,
        "model": "tiny",
        "runs": ",".join(names),
        "device": "cpu",
        "window": 2,
        "out": tmp_path,
        "plot": tmp_path / "parity.png",
    }
    assert parity.main([f"{key}={value}" for key, value in options.items()]) == 0
    assert "torch-bf16 / torch-fp32" in capsys.readouterr().out
    low, same, full = (curves.read_losses(tmp_path / f"{name}.csv") for name in names)
    assert len(full) == 3 and (same == full).all() and (low != full).any()
    assert (tmp_path / "parity.png").stat().st_size > 10_000
