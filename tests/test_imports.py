"""Imports point one way: entry scripts -> triton_diffusion -> diffusion -> triton_kernels."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest
import torch

from . import NUMPY_WAS_FIRST

ROOT = Path(__file__).resolve().parents[1]
OURS = {"triton_kernels", "diffusion", "triton_diffusion", "tools", "benchmarks", "tests"}
OURS |= {"train", "sample"}


@functools.cache
def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Of a file, wherever they stand in it."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(path: Path) -> set[str]:
    """Top-level names of the absolute imports of a file."""
    names = set()
    for node in imports(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no Python files in {folder}"
    return found


@pytest.mark.parametrize("path", files("triton_kernels"), ids=lambda p: p.name)
def test_kernels_know_torch_and_triton_only(path):
    assert imported(path) - sys.stdlib_module_names <= {"torch", "triton"}


@pytest.mark.parametrize("path", files("diffusion"), ids=lambda p: p.name)
def test_diffusion_does_not_know_who_calls_it(path):
    names = imported(path)
    assert not names & {"hydra", "omegaconf"}
    assert names & OURS <= {"triton_kernels"}


def known(path: Path) -> set[Path]:
    """Files of its package that a file imports, but for the package's face, which names all."""
    found = set()
    for node in imports(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for place in (base, *(base / alias.name for alias in node.names)):
                found |= {place.with_suffix(".py"), place / "__init__.py"}
    faces = {ROOT / name / "__init__.py" for name in ("diffusion", "triton_kernels")}
    return {file for file in found if file.exists()} - faces


@pytest.mark.parametrize(
    "folder",
    [
        *sorted({p.parent for p in files("diffusion")} - {ROOT / "diffusion"}),
        *sorted(
            {p.parent for p in files("triton_kernels")} & set((ROOT / "triton_kernels").iterdir())
        ),
    ],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_what_a_folder_knows_does_not_know_it(folder):
    """So that `plan/step`, which asks `plan/schedule`, is not asked by it, and a norm does not
    know the convolutions that make it in their launches."""
    inside = {path for path in folder.rglob("*.py")}
    waiting = list(inside)
    reached: set[Path] = set()
    while waiting:
        path = waiting.pop()
        further = known(path) - inside - reached
        reached |= further
        waiting += further
    assert not {path: known(path) & inside for path in reached if known(path) & inside}


@pytest.mark.parametrize("path", files("tools"), ids=lambda p: p.name)
def test_tools_do_not_know_each_other(path):
    assert imported(path) & OURS <= {"triton_kernels", "diffusion", "triton_diffusion"}


@pytest.mark.parametrize("script", ["train.py", "sample.py"])
def test_entry_scripts_are_short(script):
    assert len((ROOT / script).read_text().splitlines()) <= 80


def test_no_vendor_library_behind_a_kernel():
    banned = ("F.conv", "F.group_norm", "scaled_dot_product", "torch.matmul", "torch.mm", "addmm")
    for path in files("triton_kernels"):
        if "reference" not in path.relative_to(ROOT).parts:
            text = path.read_text()
            assert not [name for name in banned if name in text], path.name


@pytest.mark.parametrize(
    "folder", ["triton_kernels", "diffusion", "triton_diffusion", "benchmarks"]
)
def test_what_another_file_uses_has_no_underscore(folder):
    """So a kernel that its own file launches is `_x_kernel`, and one of a file of kernels is
    `x_kernel`."""
    private = [
        f"{path.relative_to(ROOT)}: {alias.name}"
        for path in files(folder)
        for node in imports(path)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert not private


def test_what_no_other_file_launches_has_an_underscore():
    texts = {path: path.read_text() for path in files("triton_kernels")}
    kernels = {
        (path, name)
        for path, text in texts.items()
        for name in re.findall(r"^def ([a-z]\w+_kernel)\(", text, re.MULTILINE)
    }
    assert kernels
    for path, name in kernels:
        users = [other for other, text in texts.items() if other != path and name in text]
        assert users, f"{path.relative_to(ROOT)}: only this file launches {name}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, in Triton's interpreter")
def test_numpy_is_imported_when_its_number_of_threads_is_set():
    """Else `-p no:NAME` of addopts leaves the plugin of pytest out that imports it."""
    assert not NUMPY_WAS_FIRST
