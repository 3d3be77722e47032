"""The names of jobs' folders, and which process takes which GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from triton_diffusion import sweep
from triton_diffusion.sweep import job_folder

from .end_to_end.processes import started

ROOT = Path(__file__).resolve().parents[1]


def test_a_folder_is_named_after_what_is_swept():
    assert job_folder(["optim.lr=1e-4", "train.seed=1"], ["optim.lr", "train.seed"]) == (
        "optim.lr=0.0001_train.seed=1"
    )
    # not after the order, the way a number is written, or where and how long it trains
    swept = ["train.seed", "optim.lr"]
    given = ["run_dir=a", "train.steps=9", "train.seed=1", "device=cpu", "optim.lr=0.0001"]
    assert job_folder(given, swept) == "optim.lr=0.0001_train.seed=1"
    # but the steps, where they are what is swept
    assert job_folder(["train.steps=9"], ["train.steps"]) == "train.steps=9"


def test_other_settings_are_another_folder():
    one = job_folder(["optim.lr=1e-4", "train.seed=1"], ["optim.lr"])
    two = job_folder(["optim.lr=1e-4", "train.seed=2"], ["optim.lr"])
    assert one.startswith("optim.lr=0.0001-") and two.startswith("optim.lr=0.0001-") and one != two


def test_any_value_makes_a_name_of_its_own():
    values = ["/a/b", "/a.b", "'a b'", "'a:b'", "[1,2]", "[1,3]", f"{'x' * 300}a", f"{'x' * 300}b"]
    names = [job_folder([f"dataset.path={value}"], ["dataset.path"]) for value in values]
    assert len(set(names)) == len(names)
    assert all("/" not in name and " " not in name and len(name) < 200 for name in names)


@pytest.mark.parametrize("text", ["{", "7", "[" * 100_000], ids=["cut", "number", "deep"])
def test_a_record_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / sweep.RECORD).write_text(text)
    assert not [*sweep._records(tmp_path)]


CLAIM = (
    "from triton_diffusion.sweep import _claim_gpu;"
    " print(_claim_gpu(['x0', 'x1']), flush=True); input()"
)


def test_a_process_takes_a_gpu_that_is_free(tmp_path):
    """Two have one each, a third shares, and one that ended leaves its own."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}

    def process():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        one = started([sys.executable, "-c", CLAIM], cwd=ROOT, env=environment, **pipes)
        return one, one.stdout.readline().strip()

    those = [process() for _ in range(3)]
    assert [gpu for _, gpu in those] == ["x0", "x1", "x0"]
    those[1][0].communicate("\n", timeout=60)
    assert process()[1] == "x1"
