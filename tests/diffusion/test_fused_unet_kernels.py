"""The planned network on the Triton kernels, against float64: output and gradients are within twice
the error of PyTorch's layers in the same 16 bits."""

from contextlib import nullcontext

import pytest
import torch

import triton_kernels
from diffusion.models.conditions import Conditions, with_null_token
from diffusion.models.flat_parameters import FlatParameters
from diffusion.models.unet import UNet
from diffusion.plan import execute
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.step import memory
from diffusion.plan.step.network import TrainingUNet, training_network
from diffusion.runtime.backend import Backend
from triton_kernels import reference
from triton_kernels.conv import upsampled as conv_upsampled

from .test_fused_unet import MODELS, make

UNET64 = {
    "model_channels": 64,
    "num_res_blocks": 2,
    "attention_resolutions": (4, 8),
    "channel_mult": (1, 2, 3, 4),
    "num_groups": 32,
    "num_head_channels": 32,
}


def build(backend: Backend, options: dict, size: tuple[int, int], device: torch.device) -> UNet:
    return make(UNET64 | options | {"backend": backend}, size).float().to(device)


def unet64(backend: Backend) -> UNet:
    """The model of the benchmarks, on the GPU."""
    return build(backend, {}, (64, 64), torch.device("cuda"))


def conditions(model: UNet, batch: int, device: torch.device) -> Conditions | torch.Tensor | None:
    """What the model wants to be given beside images and times."""
    labels = torch.arange(batch, device=device) % 3 if model.num_classes else None
    vectors, tokens = None, ()
    if model.vector_dim:
        vectors = torch.randn(batch, model.vector_dim + 1, device=device)
    if model.context_dim:
        lengths = 5 - torch.arange(batch, device=device) % 5
        tokens = with_null_token(torch.randn(batch, 6, model.context_dim, device=device), lengths)
    return Conditions(labels, None, vectors, *tokens).shortest()


def check(
    options: dict,
    size: tuple[int, int],
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    recompute: bool = False,
) -> None:
    exact = build(Backend("torch", reference, torch.float64), options, size, device).double()
    torch_model = build(Backend("torch", reference, dtype, allow_tf32=True), options, size, device)
    model = build(Backend("triton", triton_kernels, dtype, allow_tf32=True), options, size, device)
    flat = FlatParameters(model, together=TOGETHER)
    plan = training_network(model, flat, recompute)
    assert isinstance(plan, TrainingUNet)
    x = torch.randn(batch, *size, 3, device=device)
    t = torch.randint(0, 1000, (batch,), device=device)
    labels = conditions(model, batch, device)
    dy = torch.randn(batch, *size, model.out_channels, device=device)
    draws = {"rng": torch.tensor([5, 11], device=device), "first": 7}
    outputs = [
        plan(x, t, labels, **draws),
        torch_model.forward_nhwc(x, t, labels, **draws),
        exact.forward_nhwc(x.double(), t, labels, **draws),
    ]
    for y in outputs:
        y.backward(dy.to(y.dtype))
    found = [((y.double() - outputs[2]).norm() / outputs[2].norm()).item() for y in outputs[:2]]
    assert found[0] <= 2 * found[1], found
    expected = torch.cat([p.grad.flatten() for p in exact.parameters()])
    theirs = torch.cat([p.grad.flatten() for p in torch_model.parameters()])
    ours = torch.cat([p.grad.flatten() for p in model.parameters()])
    errors = [((g.double() - expected).norm() / expected.norm()).item() for g in (ours, theirs)]
    assert errors[0] <= 2 * errors[1], errors
    grads = flat.views(flat.grad)
    norm = expected.norm().item()
    for (name, p), q in zip(exact.named_parameters(), torch_model.parameters(), strict=True):
        budget = 2 * (q.grad.double() - p.grad).norm() + 1e-4 * norm
        assert (grads[name].double() - p.grad).norm() <= budget, name


# What a level can have, in as few programs as there can be, for the interpreter is slow
ONE_LEVEL = {"num_res_blocks": 1, "channel_mult": (1,), "attention_resolutions": (1,)}
TWO_LEVELS = {"num_res_blocks": 1, "channel_mult": (1, 1), "attention_resolutions": ()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "size"),
    [
        (ONE_LEVEL | {"use_scale_shift_norm": True, "dropout": 0.2}, (4, 4)),
        (TWO_LEVELS | {"conv_resample": True}, (8, 8)),
        (TWO_LEVELS | {"model_channels": 24, "num_groups": 8, "num_head_channels": 24}, (6, 6)),
        (ONE_LEVEL | {"context_dim": 5, "attention_resolutions": ()}, (4, 4)),
        (ONE_LEVEL | {"model_channels": 18, "num_groups": 6, "num_head_channels": 9}, (4, 6)),
    ],
    ids=[
        *("film, dropout, attention", "strided", "3x3 and halves of 24 channels"),
        *("context", "18 channels"),
    ],
)
def test_small_models(options, size, device):
    check(options, size, 1, torch.float16, device)


@pytest.fixture
def tf32(monkeypatch):
    """PyTorch's products are in TF32 as well."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # no attribute that monkeypatch could restore
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def check_model(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """With one block a level, of MODELS or ODD."""
    options, size = ODD.get(name, (MODELS.get(name, {}), (32, 32)))
    options = {"num_res_blocks": 1, "attention_resolutions": (2,)} | options
    check(options, size, 5, dtype, device)


various = pytest.mark.parametrize(
    "name", ["", "dropout", "guided_diffusion", "28x28", "24 channels", "context"]
)


@pytest.mark.gpu
@various
def test_models_in_tf32(name, tf32, device):
    check_model(name, torch.float32, device)


@pytest.mark.gpu
def test_unet64_in_tf32(tf32, device):
    check({}, (64, 64), 8, torch.float32, device)


@pytest.mark.long
def test_small_model_without_a_tma_unit(no_tma, device):
    options = {"model_channels": 24, "num_groups": 8, "num_head_channels": 24}
    check(TWO_LEVELS | options, (6, 6), 1, torch.float16, device)


@pytest.mark.gpu
@various
def test_models_without_a_tma_unit(name, no_tma, device):
    check_model(name, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [2, 9])
def test_unet64(batch, device):
    check({}, (64, 64), batch, torch.bfloat16, device)


@pytest.fixture
def fewest_images(monkeypatch):
    """Products are made on small images, and nothing is upsampled again for the gradient of a 1x1
    skip, where there would have to be more images."""
    monkeypatch.setattr(conv_upsampled, "_FEWEST_IMAGES", 1)
    monkeypatch.setattr(conv_upsampled, "_FEWEST_IN_STEP", 1)
    monkeypatch.setattr(memory, "MUCH", 0)


@pytest.mark.gpu
def test_unet64_with_products_on_small_images(fewest_images, device):
    check({}, (64, 64), 9, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("conv_resample", [False, True], ids=["nearest", "convolution"])
def test_products_on_small_images(conv_resample, recompute, fewest_images, device):
    options = {"num_res_blocks": 1, "attention_resolutions": (), "conv_resample": conv_resample}
    check(options, (32, 32), 24, torch.bfloat16, device, recompute)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize(
    "name",
    [
        "classes",
        "film",
        "dropout",
        "strided",
        "padding_behind",
        "resampling_blocks",
        "guided_diffusion",
    ],
)
def test_every_option(name, recompute, device):
    options = {"num_res_blocks": 1, "attention_resolutions": (2,)} | MODELS[name]
    check(options, (32, 32), 5, torch.bfloat16, device, recompute)


ODD = {  # no tile divides their images, or the halves of their concatenations
    "28x28": ({"channel_mult": (1, 2, 3), "attention_resolutions": (2, 4)}, (28, 28)),
    "48x48": ({}, (48, 48)),
    "96 and 96 channels": (
        {"channel_mult": (1, 1), "model_channels": 96, "attention_resolutions": (2,)},
        (16, 16),
    ),
    "24 channels": (
        {"channel_mult": (1, 2), "model_channels": 24, "num_groups": 8, "num_head_channels": 24}
        | {"attention_resolutions": (2,), "conv_resample": True},
        (14, 14),
    ),
    "18 channels": (
        {"channel_mult": (1, 2), "model_channels": 18, "num_groups": 6, "num_head_channels": 9}
        | {"attention_resolutions": (2,), "conv_resample": True},
        (14, 14),
    ),
    "2x2": (
        {"channel_mult": (1, 1, 1), "attention_resolutions": (), "resblock_updown": True},
        (8, 8),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(name, device):
    options, size = ODD[name]
    check({"num_res_blocks": 1} | options, size, 9, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [4, 9], ids=["all kernels overlap", "some do"])
def test_same_bits_twice(batch, device, monkeypatch):
    """And where no kernel of the forward pass begins before the one in front has ended."""
    backend = Backend("triton", triton_kernels, torch.bfloat16, allow_tf32=True)
    model = unet64(backend)
    flat = FlatParameters(model, together=TOGETHER)
    plan = training_network(model, flat)
    x = torch.randn(batch, 64, 64, 3, device=device)
    t = torch.randint(0, 1000, (batch,), device=device)
    seen = []
    for overlap in (True, True, True, True, False):
        if not overlap:
            monkeypatch.setattr(execute, "dependent_launches", lambda pixels: nullcontext())
        flat.grad.zero_()
        plan(x, t).float().square().sum().backward()
        seen.append(flat.grad.clone())
    assert all(torch.equal(seen[0], other) for other in seen[1:])
