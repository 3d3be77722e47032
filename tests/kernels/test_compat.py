"""Kernels in Gluon depend on the version of Triton in one file, and on having it at all in none."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.backends.nvidia import compiler

import triton_kernels
from triton_kernels.runtime.device import describe
from triton_kernels.runtime.ptxas import prefer_older_ptxas

ROOT = Path(triton_kernels.__file__).parent
# What some version of 3.6 to 3.9 has under another name.
RENAMED = re.compile(
    r"\b(_reinterpret\(|\.reinterpret\(|async_copy_\w+_to_\w+|tma\.async_(load|store)|thread_barrier"
    r"|async_copy\.async_load|gl\.barrier)"
)


def test_what_was_renamed_is_found_in_one_file():
    using = {p.name for p in ROOT.rglob("*.py") if RENAMED.search(p.read_text())}
    assert using == {"compat.py"}


@pytest.mark.long
def test_without_what_the_kernels_use_there_are_no_hopper_kernels():
    """As a Triton would be that has moved something; everything else works."""
    code = (
        "from triton.experimental.gluon.language.nvidia import hopper; del hopper.warpgroup_mma\n"
        "import triton_kernels\n"
        "from triton_kernels.hopper.descriptors import MISSING, SUPPORTED\n"
        "print(SUPPORTED, MISSING)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, timeout=240
    )
    assert done.stdout.startswith("False AttributeError: "), done.stderr
    assert "warpgroup_mma" in done.stdout


@pytest.mark.parametrize(
    ("taken", "there", "found"),
    [
        ("ptxas-blackwell", True, "ptxas"),
        ("ptxas-blackwell", False, None),  # a wheel without the older one
        ("ptxas", True, None),
    ],
)
def test_the_older_assembler_is_for_hopper(taken, there, found, tmp_path, monkeypatch):
    variable = "TRITON_PTXAS_BLACKWELL_PATH"
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)
    if there:
        (tmp_path / "ptxas").touch()
    tool = SimpleNamespace(path=str(tmp_path / taken))
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: tool)
    prefer_older_ptxas()
    assert os.environ.get(variable) == (None if found is None else str(tmp_path / found))


def test_an_assembler_that_somebody_chose_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", "/usr/bin/ptxas")
    (tmp_path / "ptxas").touch()
    tool = SimpleNamespace(path=str(tmp_path / "ptxas-blackwell"))
    monkeypatch.setattr(compiler, "get_ptxas", lambda arch: tool)
    prefer_older_ptxas()
    assert os.environ["TRITON_PTXAS_BLACKWELL_PATH"] == "/usr/bin/ptxas"


@pytest.mark.long
def test_views_begin_at_their_items():
    """In the machine code of whichever Triton is there: they did elsewhere with 3.9."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.views_kernel"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        cwd=ROOT.parent,
        timeout=240,
    )
    found = json.loads(done.stdout.splitlines()[0]) if done.returncode == 0 else done.stderr
    assert found and all(found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("items", [1, 2, 4])
def test_views_on_a_gpu(items, terms, device):
    from .views_kernel import CHANNELS, COUNT, PLACES, ROWS, copy_view

    if not describe(device).hopper:
        pytest.skip("views that overlap are of kernels for Hopper GPUs")
    x = torch.randn((COUNT, ROWS, CHANNELS), device=device).bfloat16()
    for place in PLACES:
        for known in (None, place):
            y = torch.full((items, ROWS, CHANNELS), float("nan"), device=device).bfloat16()
            copy_view[(1,)](x, y, place, known, terms, items, COUNT, ROWS, CHANNELS)
            assert torch.equal(y, x[place : place + items]), (place, known)
