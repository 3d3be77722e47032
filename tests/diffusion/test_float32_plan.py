"""The planned network in float32 that is not TF32, on the Triton kernels: its output and every
gradient are those of float64 but for float32's own rounding."""

import pytest
import torch
from torch import Tensor, nn

import triton_kernels
from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.inference import InferenceUNet, sampling_network
from diffusion.plan.step.network import TrainingUNet, training_network
from diffusion.runtime.backend import Backend
from triton_kernels import reference
from triton_kernels.attention.launch import ATTENTION_GRAD, CROSS_ATTENTION_GRAD
from triton_kernels.runtime.device import without

from ..tensor_cores import tensor_cores_cut_off  # noqa: F401  a fixture
from .test_fused_unet import MODELS
from .test_fused_unet_kernels import ODD, ONE_LEVEL, TWO_LEVELS, build, conditions

DOUBLE = Backend("torch", reference, torch.float64)
EXACT = Backend("triton", triton_kernels, torch.float32, allow_tf32=False)
IN_TF32 = Backend("triton", triton_kernels, torch.float32, allow_tf32=True)
MOST, MOST_OF_MANY_LAYERS = 2e-6, 5e-6  # of a norm
pytestmark = pytest.mark.usefixtures("tensor_cores_cut_off")


def errors(
    options: dict,
    size: tuple[int, int],
    device: torch.device,
    batch: int = 1,
    backend: Backend = EXACT,
    recompute: bool = False,
) -> dict[str, float]:
    """Of the output and of every gradient, relative to the norm of it, or of all of them."""
    exact = build(DOUBLE, options, size, device).double()
    model = build(backend, options, size, device)
    flat = FlatParameters(model, together=TOGETHER)
    plan = training_network(model, flat, recompute)
    assert isinstance(plan, TrainingUNet)
    x = torch.randn(batch, *size, 3, device=device)
    t = torch.randint(0, 1000, (batch,), device=device)
    given = conditions(model, batch, device)
    dy = torch.randn(batch, *size, model.out_channels, device=device)
    draws = {"rng": torch.tensor([5, 11], device=device), "first": 7}
    y, expected = plan(x, t, given, **draws), exact.forward_nhwc(x.double(), t, given, **draws)
    y.backward(dy)
    expected.backward(dy.double())
    found = {"output": distance(y, expected) / expected.norm().item()}
    norm = torch.cat([p.grad.flatten() for p in exact.parameters()]).norm().item()
    grads = flat.views(flat.grad)
    found |= {name: distance(grads[name], p.grad) / norm for name, p in exact.named_parameters()}
    return found


def distance(got: Tensor, exact: Tensor) -> float:
    return (got.double() - exact).norm().item()


NARROW = {"model_channels": 32, "num_groups": 8, "num_head_channels": 16}
ONE, TWO = ONE_LEVEL | NARROW, TWO_LEVELS | NARROW
FILM = ONE | {"use_scale_shift_norm": True, "dropout": 0.2, "num_classes": 3}, (4, 4)
NEAREST = TWO, (8, 8)
SMALL = {
    "film, dropout, attention, classes": FILM,
    "nearest": NEAREST,
    "strided": (TWO | {"conv_resample": True}, (8, 8)),
    "resampling blocks": (TWO | {"resblock_updown": True}, (8, 8)),
    "3x3 and halves of 24 channels": (
        TWO_LEVELS | {"model_channels": 24, "num_groups": 8, "num_head_channels": 24},
        (6, 6),
    ),
    "context, vector": (
        ONE | {"context_dim": 5, "vector_dim": 2, "attention_resolutions": ()},
        (4, 4),
    ),
    "18 channels": (
        ONE_LEVEL | {"model_channels": 18, "num_groups": 6, "num_head_channels": 9},
        (4, 6),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_float32_is_exact(name, device):
    found = errors(*SMALL[name], device)
    assert max(found.values()) < MOST, found


@pytest.mark.long
@pytest.mark.parametrize(("options", "size"), [FILM, NEAREST], ids=["film", "nearest"])
def test_without_a_tma_unit(options, size, no_tma, device):
    found = errors(options, size, device)
    assert max(found.values()) < MOST, found


@pytest.mark.long
@pytest.mark.parametrize("name", ["film, dropout, attention, classes", "context, vector"])
def test_attention_whose_gradient_has_no_kernel(name, device):
    """As of wide heads on small GPUs. Attention is PyTorch's then, forward and backward."""
    ops = ATTENTION_GRAD, CROSS_ATTENTION_GRAD
    with without(",".join(f"{op.name}/{kernel.name}" for op in ops for kernel in op.kernels)):
        found = errors(*SMALL[name], device)
    assert max(found.values()) < MOST, found


def test_tf32_is_not(device):
    """So that a product in TF32 would be found."""
    found = errors(*NEAREST, device, backend=IN_TF32)
    assert min(found["output"], max(found.values())) > 100 * MOST, found


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("name", [*MODELS, *ODD])
def test_models(name, recompute, device):
    options, size = ODD.get(name, (MODELS.get(name), (32, 32)))
    options = {"num_res_blocks": 1, "attention_resolutions": (2,)} | options
    found = errors(options, size, device, batch=5, recompute=recompute)
    assert max(found.values()) < MOST_OF_MANY_LAYERS, found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["guided_diffusion", "28x28", "24 channels"])
def test_models_without_a_tma_unit(name, no_tma, device):
    options, size = ODD.get(name, (MODELS.get(name), (32, 32)))
    options = {"num_res_blocks": 1, "attention_resolutions": (2,)} | options
    found = errors(options, size, device, batch=5)
    assert max(found.values()) < 2 * MOST_OF_MANY_LAYERS, found  # FMAs round every addition


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [2, 9])
def test_unet64(batch, device):
    found = errors({}, (64, 64), device, batch)
    assert max(found.values()) < MOST_OF_MANY_LAYERS, found


def sampled(
    options: dict, size: tuple[int, int], device: torch.device, backend: Backend, batch: int = 2
) -> tuple[float, nn.Module, tuple, Tensor]:
    """The error of an evaluation for a sampler; the model, its arguments and the exact result."""
    exact = build(DOUBLE, options, size, device).double().eval()
    model = build(backend, options, size, device).eval()
    network = sampling_network(model)
    assert isinstance(network, InferenceUNet)
    x, steps = torch.randn(batch, *size, 3, device=device), torch.tensor([70, 900], device=device)
    given = conditions(model, batch, device)
    t = steps[1].expand(batch)
    with torch.no_grad():
        expected = exact.forward_nhwc(x.double(), t, given)
    row = torch.ones(1, dtype=torch.int64, device=device)
    y = network.at_row(x, row, network.tabulate(steps, given, batch))
    return distance(y, expected) / expected.norm().item(), model, (x, t, given), expected


@pytest.mark.parametrize("name", ["strided", "3x3 and halves of 24 channels", "context, vector"])
def test_evaluations(name, device):
    assert sampled(*SMALL[name], device, EXACT)[0] < MOST


def check_tf32(options: dict, size: tuple[int, int], device: torch.device, batch: int = 2) -> None:
    """The plan rounds operands where the layers round them, or where they cut bits off."""
    error, model, args, exact = sampled(options, size, device, IN_TF32, batch)
    with torch.no_grad():
        layers = distance(model.forward_nhwc(*args), exact) / exact.norm().item()
    assert 10 * MOST_OF_MANY_LAYERS < error < 1.5 * layers


def test_evaluations_in_tf32(device):
    check_tf32(*FILM, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*MODELS, *ODD])
def test_evaluations_of_models(name, device):
    options, size = ODD.get(name, (MODELS.get(name), (32, 32)))
    options = {"num_res_blocks": 1, "attention_resolutions": (2,)} | options
    assert sampled(options, size, device, EXACT, batch=5)[0] < MOST_OF_MANY_LAYERS
    check_tf32(options, size, device, batch=5)
