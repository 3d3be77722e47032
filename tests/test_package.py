"""The wheel in an environment of its own, outside of the checkout."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import diffusion
from diffusion.presets import CONFIGS
from triton_diffusion.commands import COMMANDS

from .end_to_end.run import TINY, environment

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("diffusion", "triton_diffusion", "triton_kernels")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what a package is made of, for building leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "configs", "tools", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, source)
    return source


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    command = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", ".")
    subprocess.run([sys.executable, "-m", *command], cwd=source, check=True, timeout=240)
    (path,) = source.glob("*.whl")
    return path


def test_the_source_package_has_the_scripts(source):
    """With their configuration and what `make demo` reads."""
    code = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    subprocess.run(
        [sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=240
    )
    (path,) = (source / "dist").glob("*.tar.gz")
    names = {name.partition("/")[2] for name in tarfile.open(path).getnames()}
    wanted = ("train.py", "sample.py", "Makefile", "constraints.txt", "README.md", "LICENSE")
    assert names >= {*wanted, "configs/train.yaml", "triton_kernels/py.typed"}
    for folder in ("tools", "examples", "configs"):
        there = (p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".yaml"))
        assert {str(path.relative_to(ROOT)) for path in there} <= names


def test_the_wheel_has_all_that_is_needed_and_three_names(wheel):
    assert wheel.name == f"triton_diffusion-{diffusion.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.split("/")[0] for name in names}
    assert top - {f"triton_diffusion-{diffusion.__version__}.dist-info"} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    wanted = {f"diffusion/configs/{path.relative_to(CONFIGS)}" for path in CONFIGS.rglob("*.yaml")}
    assert len(wanted) > 20 and wanted <= names
    folder = ROOT / "triton_kernels" / "measured"
    rows = {f"triton_kernels/measured/{path.name}" for path in folder.glob("*.jsonl")}
    assert rows and rows <= names


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """The console command of an environment with the wheel, and what it depends on from here."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=240)
    python = folder / "bin" / "python"
    install = ("pip", "--quiet", "--python", python, "install", "--no-deps", "--no-index", wheel)
    subprocess.run([sys.executable, "-m", *map(str, install)], check=True, timeout=240)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    there = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    # its own .pth files are not followed, so an editable install of the checkout stays out
    site = Path(there.stdout.strip())
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    env = environment()
    env.pop("PYTHONPATH", None)

    def run(*arguments: str, cwd: Path) -> tuple[int, str, str]:
        script = folder / "bin" / "triton-diffusion"
        done = subprocess.run(
            [script, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=240
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_the_command_lists_its_commands(command, tmp_path):
    assert command("--version", cwd=tmp_path) == (
        0,
        f"triton-diffusion {diffusion.__version__}\n",
        "",
    )
    code, out, _ = command(cwd=tmp_path)
    assert code == 0 and all(f"\n  {name} " in out for name in COMMANDS)
    code, _, err = command("trian", cwd=tmp_path)
    assert code == 2 and err.startswith("error: trian is no command; choose one of train, sample")
    code, out, _ = command("prepare", "--help", cwd=tmp_path)
    assert (
        code == 0 and out.startswith("# triton-diffusion prepare src=FOLDER") and ".py" not in out
    )


@pytest.mark.long
def test_train_and_sample_outside_of_the_checkout(command, tmp_path):
    code, _, err = command("train", *TINY, "train.steps=2", "run_dir=run", cwd=tmp_path)
    assert code == 0, err
    code, out, err = command("sample", "ckpt=run", "n=2", "steps=2", "out=drawn", cwd=tmp_path)
    assert code == 0, err
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == [
        "000000.png",
        "000001.png",
        "grid.png",
    ]
    code, _, err = command("train", "dataset=packed", "device=cpu", cwd=tmp_path)
    assert code == 2 and err.count("\n") == 1 and "written by triton-diffusion prepare" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_there_is_a_script_of_every_command(name):
    scripts = [ROOT / f"{name}.py", ROOT / "tools" / f"{name}.py"]
    (script,) = (path for path in scripts if path.is_file())
    assert f'run("{name}")' in script.read_text()
