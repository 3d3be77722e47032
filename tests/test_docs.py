"""What the documents name exists: files, modules, headings."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("triton_kernels", "diffusion", "configs", "benchmarks", "tools", "tests", "docs")
FILES = [f"/{path.relative_to(ROOT)}" for name in FOLDERS for path in (ROOT / name).rglob("*")]
FILES += [f"/{path.name}" for path in ROOT.iterdir()]

documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def prose(path: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@documents
def test_links_lead_somewhere(path):
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@documents
def test_files_that_are_named_exist(path):
    """`fused/conv.py` is any file whose path ends so; NAME, F, RUN and * stand for others."""
    named = re.findall(r"`([\w./*-]+\.(?:py|yaml))`", prose(path))
    for name in named:
        if re.search(r"[A-Z*]", name) or name == "config.yaml":  # a run's
            continue
        assert any(file.endswith(f"/{name}") for file in FILES), name


@documents
def test_modules_that_are_run_exist(path):
    for module in re.findall(r"python -m ([\w.]+)", path.read_text()):
        if module.split(".")[0] in FOLDERS:
            file = ROOT / module.replace(".", "/")
            assert file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), module
