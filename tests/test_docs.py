"""What the documents name exists: files, modules, headings, settings, names of Python."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = (
    "triton_kernels",
    "diffusion",
    "triton_diffusion",
    "configs",
    "benchmarks",
    "tools",
    "tests",
    "docs",
)
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
    """`conv/fused.py` is any file whose path ends so; NAME, F, RUN and * stand for others."""
    named = re.findall(r"`([\w./*-]+\.(?:py|yaml))`", prose(path))
    for name in named:
        if re.search(r"[A-Z*]", name) or name == "config.yaml":  # a run's
            continue
        assert any(file.endswith(f"/{name}") for file in FILES), name


@documents
def test_kernels_that_are_named_exist(path):
    """With or without the underscore in front, which a plan does not print; tried.md has those that
    were removed."""
    if path.name == "tried.md":
        return
    source = "\n".join(file.read_text() for file in (ROOT / "triton_kernels").rglob("*.py"))
    kernels = {
        name.lstrip("_") for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)
    }
    named = re.findall(r"`(\w+_kernel)`", prose(path))
    assert not {name.lstrip("_") for name in named} - kernels


@documents
def test_modules_that_are_run_exist(path):
    for module in re.findall(r"python -m ([\w.]+)", path.read_text()):
        if module.split(".")[0] in FOLDERS:
            file = ROOT / module.replace(".", "/")
            assert file.with_suffix(".py").is_file() or (file / "__main__.py").is_file(), module


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@documents
def test_settings_of_commands_exist(path):
    """Every command of a block, with capitals for what they stand for; of a sweep the first."""
    for line in "\n".join(blocks(path, "")).replace("\\\n", " ").splitlines():
        script = re.match(r"(?:python|torchrun [\w=-]+) (?:tools/)?(\w+)\.py ", line)
        if script is None:
            continue
        words = shlex.split(line[script.end() :], comments=True)
        settings = [word for word in words if word not in ("-m", "...") and word[-3:] != "..."]
        settings = [re.sub("=([^[]+),.*", r"=\1", word) for word in settings]
        if "hydra/sweeper=optuna" in settings:
            pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(ROOT / "configs"), version_base=None):
            compose(script[1], overrides=settings)


@documents
def test_what_samples_of_code_import_exists(path):
    """What they import, and of this project's modules what they use."""
    for code in blocks(path, "python"):
        tree = ast.parse(code)
        modules = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    modules[alias.asname or alias.name] = importlib.import_module(alias.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id)
                assert module is None or hasattr(module, node.attr), ast.unparse(node)


def test_the_page_of_the_interface_is_made_from_the_docstrings():
    make_api = importlib.import_module("docs.make_api")
    assert make_api.page() == make_api.PAGE.read_text(), "run python docs/make_api.py"


def test_the_page_of_the_interface_has_properties_without_a_call():
    page = (ROOT / "docs" / "api.md").read_text()
    assert "\nnum_parameters: int" in page and "def num_parameters" not in page
    assert not re.search(r'(: |-> )"(str|int|nn)', page)  # annotations without quotation marks


def test_what_is_read_first_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "docs" / "design.md").read_text().split()) <= 2000


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([\w.]+\.md)\)", index))
