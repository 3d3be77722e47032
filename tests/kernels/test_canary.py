"""Kernels that compute something else than they should are found and switched off."""

import logging
import os

import pytest
import torch

import triton_kernels
from diffusion.errors import ConfigError
from diffusion.runtime import backend
from triton_kernels import canary
from triton_kernels.conv.hopper.weight_grads import row_wgrad
from triton_kernels.conv.weight_grad import weight_grad_spec
from triton_kernels.runtime import device as device_module
from triton_kernels.runtime.device import describe, standing_for, switch_off, switched_off, without

from .chips import HOPPER

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE = canary._SHAPE


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """As in a process that has tried nothing yet; afterwards as before."""
    monkeypatch.setattr(device_module, "_off", None)
    monkeypatch.setenv("TRITON_KERNELS_OFF", "")
    if not torch.cuda.is_available():
        monkeypatch.setattr(canary, "_SHAPE", (1, 8, 8, 16, 16))  # quick in the interpreter
    canary._try.cache_clear()
    yield
    canary._try.cache_clear()


@pytest.fixture
def plant(monkeypatch):
    """Let one of the canary's launchers do something else if it is asked for this family. Those for
    Hopper GPUs are not asked."""
    others = {family: c for family, c in canary.CONFIGS.items() if family != "hopper"}
    monkeypatch.setattr(canary, "CONFIGS", others)

    def planted(name: str, family: str, wrong) -> None:
        right = getattr(canary, name)
        kind = type(canary.CONFIGS[family][name == "conv_weight_grad"])

        def launch(*args, config, **rest):
            result = right(*args, config=config, **rest)
            return wrong(args, result) if type(config) is kind else result

        monkeypatch.setattr(canary, name, launch)

    return planted


def test_right_kernels_stay_on(device):
    assert canary.kernels_off(device) == []
    assert switched_off() == {}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nobody_needs_gradients_where_it_is_asked(device, mode):
    """As in sampling."""
    with mode():
        assert canary.kernels_off(device) == []


def test_a_hopper_gpu_has_parts_for_the_weight_gradient():
    """Where there are too few tiles to share, the kernel that it tries has none."""
    n, h, w, ci, co = SHAPE
    x, weight = torch.empty((n, h, w, ci), dtype=torch.bfloat16), torch.empty((co, ci, 3, 3))
    spec = weight_grad_spec(x, x, weight, 1, (1, 1), "tf32")
    assert row_wgrad.WEIGHT_GRAD.refuse(spec, HOPPER) is None
    (config,) = row_wgrad.WEIGHT_GRAD.configs(spec, HOPPER)
    assert config.tile == canary.WGRAD_TILE and config.splits >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("family", canary.CONFIGS)
def test_each_family_is_right(family, device):
    if not getattr(describe(device), family, family == "plain"):
        pytest.skip(f"no kernels of the family {family} run on this GPU")
    assert canary.wrong(device, *canary.CONFIGS[family]) is None


def test_a_wrong_gradient_switches_its_family_off(plant, device):
    plant("conv_weight_grad", "tma", lambda args, _: args[2].mul_(1.05))
    (line,) = canary.kernels_off(device)
    assert line.startswith("kernels that copy by the TMA unit are off: the weight gradient of a")
    assert "wrong by 5.0% of its size" in line and "slower without them" in line
    assert not describe(device).tma
    assert os.environ["TRITON_KERNELS_OFF"] == "tma"  # processes that this one starts know it


def test_one_wrong_number_in_many_is_seen(plant, device):
    def spoil(args, result):
        result[0][0, 0, 0, 0] = float("nan")
        return result

    plant("conv_forward", "tma", spoil)
    assert "the result of a small convolution is wrong" in canary.kernels_off(device)[0]


def test_a_compiler_that_raises_switches_its_family_off(plant, device):
    def refuse(args, result):
        raise RuntimeError("PassManager::run failed\nand much more")

    plant("conv_input_grad", "tma", refuse)
    (line,) = canary.kernels_off(device)
    assert "are off: RuntimeError: PassManager::run failed;" in line


def test_kernels_of_hopper_fall_back_to_those_with_tma(monkeypatch):
    tried = []

    def wrong(device, conv, wgrad):
        tried.append(type(conv).__name__)
        return "the result is wrong" if len(tried) == 1 else None

    hopper = device_module.Device(True, 132, 232_448, hopper=True, arch=90)
    monkeypatch.setattr(device_module, "_INTERPRETER", hopper)
    monkeypatch.setattr(canary, "wrong", wrong)
    (line,) = canary.kernels_off(CPU)
    assert tried == ["TileMma", "Config"]
    assert (describe(CPU).hopper, describe(CPU).tma) == (False, True)
    assert line.startswith("kernels for Hopper GPUs are off: the result is wrong; a training step")
    assert canary.kernels_off(CPU) == [line] and len(tried) == 2  # once a process


def test_a_triton_without_gluon_says_so(monkeypatch):
    hopper = device_module.Device(True, 132, 232_448, hopper=True, arch=90)
    monkeypatch.setattr(device_module, "_INTERPRETER", hopper)
    monkeypatch.setattr(canary, "MISSING", "ImportError: no tma")
    monkeypatch.setattr(canary, "wrong", lambda *_: None)
    (line,) = canary.kernels_off(CPU)
    assert "are off: Triton lacks what they use (ImportError: no tma); a training step" in line


def test_nothing_right(monkeypatch):
    monkeypatch.setattr(canary, "wrong", lambda *_: "all is wrong")
    with pytest.raises(RuntimeError, match="no kernel computes a small convolution: all is wrong"):
        canary.kernels_off(CPU)


@pytest.mark.parametrize("arch", [70, 75])
def test_a_gpu_that_is_too_old_is_refused_in_words(monkeypatch, device, arch):
    """Before a kernel is compiled for it, which fails without saying why."""
    old = device_module.Device(False, 40, 65_536, arch=arch)
    monkeypatch.setattr(device_module, "_INTERPRETER", old)
    monkeypatch.setattr(canary, "wrong", lambda *_: pytest.fail("tried"))
    said = rf"compute capability 7\.{arch % 10}; the kernels need 8\.0 or later"
    with pytest.raises(RuntimeError, match=said):
        canary.kernels_off(CPU)
    x, weight = torch.ones(1, 4, 4, 16, device=device), torch.ones(16, 16, 3, 3, device=device)
    with standing_for(old), pytest.raises(ValueError, match=said):
        triton_kernels.conv2d(x, weight.to(memory_format=torch.channels_last))
    assert device_module.Device(False, 16, 167_936, arch=87).lacks is None
    assert device_module.Device(True, 20, 232_448, arch=110).lacks is None


def test_after_a_crash_it_says_how_to_run_without_the_family(monkeypatch):
    """Other families would be tried in vain: CUDA answers every call with an error."""
    hopper = device_module.Device(True, 132, 232_448, hopper=True, arch=90)
    monkeypatch.setattr(device_module, "_INTERPRETER", hopper)
    tried = []
    monkeypatch.setattr(canary, "wrong", lambda *given: tried.append(given) or "illegal access")
    monkeypatch.setattr(canary, "_lost", lambda device: True)
    with pytest.raises(canary.Crashed, match=r"Hopper GPUs crash with Triton \d.*illegal access"):
        canary.kernels_off(CPU)
    assert len(tried) == 1 and switched_off() == {}
    with pytest.raises(canary.Crashed, match="TRITON_KERNELS_OFF=hopper runs without them"):
        canary.kernels_off(CPU)


def test_families_named_in_the_environment_are_off(monkeypatch):
    monkeypatch.setenv("TRITON_KERNELS_OFF", "tma")
    assert not describe(CPU).tma
    switch_off("hopper", "a test says so")
    assert switched_off() == {
        "tma": "TRITON_KERNELS_OFF names them",
        "hopper": "a test says so",
    }
    assert os.environ["TRITON_KERNELS_OFF"] == "tma,hopper"


def test_an_unknown_family_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("TRITON_KERNELS_OFF", "gluon")
    with pytest.raises(ValueError, match="TRITON_KERNELS_OFF has gluon; there are hopper, tma"):
        describe(CPU)


class TestBackend:
    @pytest.fixture(autouse=True)
    def without_a_gpu(self, monkeypatch):
        monkeypatch.setattr(backend, "settle_compiler", lambda device: None)

    @pytest.mark.parametrize("name", ["auto", "triton"])
    def test_after_a_crash_there_is_no_backend(self, monkeypatch, name):
        def crash(device):
            raise canary.Crashed("kernels crash")

        monkeypatch.setattr(backend, "kernels_off", crash)
        with pytest.raises(ConfigError, match="^kernels crash$"):
            backend.choose_backend(name, "tf32", GPU)

    def test_what_is_off_is_logged_once_a_choice(self, monkeypatch, caplog):
        monkeypatch.setattr(backend, "kernels_off", lambda device: ["these are off: why; cost"])
        with caplog.at_level(logging.WARNING):
            assert backend.choose_backend("auto", "tf32", GPU).name == "triton"
        assert caplog.messages == ["these are off: why; cost"]

    def test_without_a_right_kernel_auto_is_torch(self, monkeypatch, caplog):
        def none(device):
            raise RuntimeError("no kernel computes a small convolution: why")

        monkeypatch.setattr(backend, "kernels_off", none)
        assert backend.choose_backend("auto", "tf32", GPU).name == "torch"
        assert "backend=torch is used, which is slower: no kernel" in caplog.messages[0]
        with pytest.raises(ConfigError, match="backend=triton cannot be used here: no kernel"):
            backend.choose_backend("triton", "tf32", GPU)

    def test_an_unknown_name_is_the_users_mistake(self, monkeypatch):
        def unknown(device):
            raise ValueError("TRITON_KERNELS_OFF has gluon")

        monkeypatch.setattr(backend, "settle_compiler", unknown)
        with pytest.raises(ConfigError, match="TRITON_KERNELS_OFF has gluon"):
            backend.choose_backend("auto", "tf32", GPU)

    def test_a_cpu_is_not_tried(self, monkeypatch):
        monkeypatch.setattr(backend, "kernels_off", lambda device: pytest.fail("tried"))
        assert backend.choose_backend("auto", "fp32", CPU).name == "torch"


def test_kernels_named_in_the_environment_are_off(monkeypatch):
    monkeypatch.setenv("TRITON_KERNELS_OFF", "tile_mma,conv_few/one_row")
    assert (describe(CPU).tma, describe(CPU).off) == (True, "conv_few/one_row,tile_mma")
    with standing_for(HOPPER), without("single_tile,hopper"):
        assert (describe(CPU).hopper, describe(CPU).off) == (False, "single_tile")
    switch_off("hopper", "a test says so")
    assert os.environ["TRITON_KERNELS_OFF"] == "tile_mma,conv_few/one_row,hopper"
    with without("narrow_output"):
        assert describe(CPU).off == "conv_few/one_row,narrow_output,tile_mma"
    assert describe(CPU).off == "conv_few/one_row,tile_mma"


@pytest.mark.parametrize("name", ["tile_mm", "conv_few/tile_mma"])
def test_an_unknown_kernel_in_the_environment_is_named(monkeypatch, name):
    monkeypatch.setenv("TRITON_KERNELS_OFF", name)
    with pytest.raises(ValueError, match=f"has {name}; there are hopper, tma, .* tile_mma, .*OP/"):
        describe(CPU)
