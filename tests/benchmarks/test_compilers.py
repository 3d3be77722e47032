"""What compiles before a benchmark times: whom it is, for which chip, and all that is launched."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import compilers, precompile
from benchmarks.compilers import Compilers
from tests.end_to_end.run import run

from ..kernels.chips import HOPPER

_CHILD = "import sys; from benchmarks.compilers import serve; serve({})"


def _compilers(body: str, count: int, numbers: list[int]) -> Compilers:
    return Compilers([sys.executable, "-c", _CHILD.format(body)], count, numbers)


def test_compilers_are_asked_in_order_and_survived(tmp_path):
    work = f"lambda n: open({str(tmp_path)!r} + f'/{{n}}', 'w').close() or print('noise')"
    compilers = _compilers(work, 2, [3, 1, 2])
    while (number := compilers.next_ready([1, 2, 3])) != 1:
        assert (tmp_path / str(number)).exists()
    assert all(compilers.next_ready([n]) == n for n in (1, 2, 3))
    assert compilers.failed == 0 and len(list(tmp_path.iterdir())) == 3
    compilers.close()
    dying = _compilers("lambda n: sys.exit(1)", 1, [0, 1])
    assert dying.next_ready([1, 0]) in (0, 1) and dying.next_ready([1]) == 1
    assert dying.failed == 1
    dying.close()
    assert Compilers([], 0, range(3)).next_ready([2, 1]) == 2


@pytest.mark.parametrize("before", [["-m"], ["-m", "tests.kernels.other_chip", "80"]], ids=str)
def test_shares_compile_for_the_chip_that_is_timed(before, monkeypatch):
    """Within `other_chip` the processes that compile are within it too."""
    started = []

    class Share:
        def __init__(self, command, **_):
            started.append(command)

        def wait(self):
            return 0

    module = "benchmarks.tune"
    monkeypatch.setattr(sys, "orig_argv", ["python", *before, module, "batch=8"])
    monkeypatch.setattr(subprocess, "Popen", Share)
    compilers.run_shares(module, ["batch=8"], 2)
    expected = [sys.executable, *before, module, "batch=8", "processes=2"]
    assert started == [[*expected, f"part={part}"] for part in range(2)]
    monkeypatch.setattr(precompile, "describe", lambda device: HOPPER)
    precompile.start(module, ["batch=8"], torch.device("cuda"), "report=r")
    chip = f"compile_for={json.dumps(HOPPER)}"
    assert started[-1] == [sys.executable, *before, module, "batch=8", chip, "report=r"]
    assert precompile.chip_of({"compile_for": json.dumps(HOPPER)}) == HOPPER


def test_what_compiles_too_long_is_given_up():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    precompile.await_compiled(process, 0.1)
    assert process.returncode < 0


@pytest.mark.long
def test_kernels_are_compiled_beforehand():
    """Those of every benchmark that says so, by a process without a GPU."""
    code, out, err = run("-m", "tests.benchmarks.compiled_kernels")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert {(arch, processes) for arch, processes, _ in found.values()} == {(90, 3)}
    # an evaluation is timed as dependent launches, and checked as others
    both = {"norm_single_cta_kernel", "norm_single_cta_kernel+"}
    assert both | {"_begin_step_kernel+"} <= set(found["papers"][2])
    named = {name: {k.rstrip("+") for k in kernels} for name, (*_, kernels) in found.items()}
    step, several = named["train_step"], named["scaling"]
    assert several < step  # which is checked, too, and has two precisions
    assert {"norm_dx_inline_kernel", "_adamw_kernel"} <= several
    assert named["accelerated train"] >= {"norm_dx_inline_kernel", "attention_fwd_kernel"}
    assert named["accelerated evaluate"] - named["accelerated train"]  # what those alone have
    assert {"conv_forward_kernel", "conv_single_tile_kernel"} <= named["sweep_joins"]
    of_few = {"conv_single_tile_kernel", "_add_kernel"}
    assert of_few | {"norm_apply_kernel"} <= named["sweep_configs"]
