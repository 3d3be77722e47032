"""benchmarks.taken: kernels that a plan takes, and those that none launches."""

import pytest

from benchmarks import taken
from benchmarks.papers import Case
from diffusion.errors import ConfigError
from tests.end_to_end.run import run


def test_kernels_have_those_who_take_them():
    given = "models=unet_tiny", "batch=2", "gpu=h100", "what=evaluate", "ops=0", "processes=1"
    code, out, err = run("-m", "benchmarks.taken", *given)
    assert code == 0, err
    *lines, last = out.splitlines()
    assert "conv_few/one_row 1: unet_tiny" in lines
    assert "conv_input_grad/tma 0: nobody" in lines
    assert "_begin_step_kernel" not in last and "conv_input_grad_kernel" in last
    assert last.startswith("launched by none: ")


def test_cases_are_all_that_is_asked_for():
    given = {"models": ("unet64",), "batch": (1, 4), "gpu": ("h100", "a100")}
    found = taken.cases(taken.DEFAULTS | given)
    assert len(found) == 2 * (1 + 2 * 2) and ("a100", Case("train", "unet64", 4)) in found
    assert len(taken.cases(taken.DEFAULTS)) > 200


@pytest.mark.parametrize("given", [{"models": ("unet65",)}, {"gpu": ("h101",)}, {"what": ("x",)}])
def test_what_is_unknown_is_named(given):
    with pytest.raises(ConfigError, match=next(iter(given.values()))[0]):
        taken.cases(taken.DEFAULTS | given)
