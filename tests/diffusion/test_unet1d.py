"""The 1-D UNet: recorded results, the layers against PyTorch's, every option, both backends."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import triton_kernels
from diffusion.errors import ConfigError
from diffusion.formats.weights import load_weights
from diffusion.models.layers import Conv1d, ConvTranspose1d, set_backend
from diffusion.models.unet1d import UNet1d
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32, Backend
from diffusion.sampling.sampler import DDPM
from triton_kernels import reference

from .golden_unet import check_golden, relative
from .policy_oracle import policy_oracle

SMALL = {"input_dim": 2, "global_cond_dim": 10, "diffusion_step_embed_dim": 32}
TINY = {
    "input_dim": 3,
    "global_cond_dim": 5,
    "diffusion_step_embed_dim": 8,
    "down_dims": (8, 16),
    "kernel_size": 3,
    "n_groups": 4,
}


def tiny(**options) -> UNet1d:
    torch.manual_seed(0)
    return UNet1d(**{**TINY, **options})


# --- recorded results -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_golden(golden, backend):
    model = UNet1d(**SMALL, down_dims=(32, 64))
    load_weights(golden / "unet1d_small.weights.safetensors", model)
    if backend == "triton":
        model.cuda()
        set_backend(model, Backend("triton", triton_kernels))
    check_golden(golden, "unet1d_small", model, {k: k for k, _ in model.named_parameters()})


def test_the_published_size():
    with torch.device("meta"):
        assert UNet1d(input_dim=2, global_cond_dim=1028).num_parameters == 79_947_266


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [reference, triton_kernels], ids=["torch", "triton"])
@pytest.mark.parametrize("shape", [(2, 4, 3), (1, 1, 5), (3, 7, 2)], ids=str)
def test_conv_transpose(device, shape, ops):
    """Output and every gradient, against PyTorch's in float64."""
    torch.manual_seed(0)
    n, t, c = shape
    layer = ConvTranspose1d(c, backend=Backend("", ops)).to(device)
    x = torch.randn(n, 1, t, c, device=device, requires_grad=True)
    dy = torch.randn(n, 1, 2 * t, c, device=device)
    y = layer(x)
    ours = [y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)]

    x64, w64, b64 = (p.detach().double().requires_grad_() for p in (x, layer.weight, layer.bias))
    y64 = F.conv_transpose1d(x64[:, 0].mT, w64, b64, stride=2, padding=1).mT[:, None]
    theirs = [y64, *torch.autograd.grad(y64, (x64, w64, b64), dy.double())]
    assert y.is_contiguous()
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("length", [4, 7])
def test_strided_conv(length):
    torch.manual_seed(0)
    layer = Conv1d(3, 5, 3, stride=2)
    x = torch.randn(2, 1, length, 3)
    expected = F.conv1d(x[:, 0].mT, layer.weight, layer.bias, stride=2, padding=1).mT
    torch.testing.assert_close(layer(x)[:, 0], expected)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: ConvTranspose1d(4), lambda: nn.ConvTranspose1d(4, 4, 4, stride=2, padding=1)),
        (lambda: Conv1d(4, 6, 3, stride=2), lambda: nn.Conv1d(4, 6, 3, stride=2)),
    ],
    ids=["transposed", "strided"],
)
def test_initialised_as_pytorch_does(ours, theirs):
    torch.manual_seed(3)
    a = ours()
    torch.manual_seed(3)
    b = theirs()
    assert torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias)


# --- the network ----------------------------------------------------------------------------------

CASES = {
    "default": {},
    "shift_only": {"cond_predict_scale": False},
    "unconditional": {"global_cond_dim": None},
    "one_level": {"down_dims": (8,)},
    "three_levels": {"down_dims": [8, 8, 16]},
    "wide_kernel": {"kernel_size": 5, "n_groups": 8},
}


def inputs(model: UNet1d, n: int = 2, t: int = 8) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    x = torch.randn(n, t, model.input_dim)
    cond = None if model.global_cond_dim is None else torch.randn(n, model.global_cond_dim)
    return x, torch.arange(n) * 7, cond


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_output_and_gradients(options):
    """Against the network written a second time, in float64."""
    model = tiny(**options)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)  # norms start as the identity
    x, t, cond = inputs(model, t=12)
    given = [x] if cond is None else [x, cond]
    wanted = [v.requires_grad_() for v in given] + list(model.parameters())
    y, dy = model(x, t, cond), torch.randn(x.shape)
    ours = [y, *torch.autograd.grad(y, wanted, dy)]

    x, *rest = (v.detach().double().requires_grad_() for v in given)
    state = {k: v.detach().double().requires_grad_() for k, v in model.named_parameters()}
    y = policy_oracle(
        state, options.get("n_groups", TINY["n_groups"]), x, t, rest[0] if rest else None
    )
    theirs = [y, *torch.autograd.grad(y, [x, *rest, *state.values()], dy.double())]
    whole = torch.stack([g.norm() for g in theirs[1:]]).norm()
    for a, b in zip(ours, theirs, strict=True):
        # the second: of a bias before a norm with one channel a group, which vanishes
        assert (a - b).norm() < 1e-5 * b.norm() + 1e-7 * whole, b.shape


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_options_on_both_backends(device, options):
    """Triton's output and gradients are those of the reference. A gradient that vanishes in exact
    arithmetic (of a bias before a norm with one channel a group) has to be small on both."""
    model = tiny(**options).to(device)
    x, t, cond = (None if v is None else v.to(device) for v in inputs(model))
    x.requires_grad_()
    dy = torch.randn(x.shape, device=device)
    results = []
    for ops in (reference, triton_kernels):
        set_backend(model, Backend("", ops))
        y = model(x, t, cond)
        assert y.shape == x.shape
        results.append([y, *torch.autograd.grad(y, (x, *model.parameters()), dy)])
    whole = torch.stack([g.norm() for g in results[0][1:]]).norm()
    for expected, ours in zip(*results, strict=True):
        if expected.norm() < 1e-6 * whole:
            assert ours.norm() < 1e-6 * whole, expected.shape
        else:
            assert relative(ours, expected) < 1e-4, expected.shape


def test_forms_of_the_step():
    """One number for all, as the original takes it."""
    model = tiny()
    x, _, cond = inputs(model)
    y = model(x, torch.tensor([5, 5]), cond)
    assert torch.equal(model(x, 5, cond), y)
    assert torch.equal(model(x, torch.tensor(5), cond), y)


def test_samples_are_independent():
    """Each sample has its own step and condition."""
    model = tiny()
    x, t, cond = inputs(model)
    alone = torch.cat([model(x[i : i + 1], t[i : i + 1], cond[i : i + 1]) for i in range(2)])
    torch.testing.assert_close(model(x, t, cond), alone)
    assert not torch.allclose(model(x, t, cond.flip(0)), alone)
    assert not torch.allclose(model(x, t.flip(0), cond), alone)


def test_empty_batch():
    model = tiny()
    y = model(torch.zeros(0, 8, 3), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 5))
    assert y.shape == (0, 8, 3)


@pytest.mark.parametrize("length", [2, 6])
def test_a_chain_of_chunks_whose_numbers_fours_do_not_divide(length):
    """Random numbers are made by fours."""
    model = tiny()
    sampler = DDPM(make_schedule("cosine", 9), TORCH_FP32, steps=2)
    cond = inputs(model)[2]
    x = sampler.sample(model.forward_nhwc, (2, 1, length, 3), seed=0, labels=cond)
    alone = sampler.sample(model.forward_nhwc, (1, 1, length, 3), seed=0, labels=cond[1:], first=1)
    torch.testing.assert_close(x[1:], alone)


def test_one_sample_that_ends_at_one_position():
    """Where a channel is a group, a group is a single number there."""
    model = tiny(down_dims=(8, 8, 8), n_groups=8)
    x, t, cond = inputs(model, n=1, t=4)
    y = model(x, t, cond)
    batch = model(x.expand(2, -1, -1), t.expand(2), cond.expand(2, -1))
    torch.testing.assert_close(batch, y.expand(2, -1, -1))


def test_half_precision_keeps_the_statistics_in_float32():
    model = tiny()
    x, t, cond = inputs(model)
    y = model(x, t, cond)
    set_backend(model, Backend("torch", reference, torch.bfloat16))
    low = model.forward_nhwc(x[:, None], t, cond)
    assert low.dtype == torch.bfloat16
    assert relative(low[:, 0].float(), y) < 0.03


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"down_dims": 256}, "down_dims=256"),
        ({"down_dims": "256"}, "down_dims=256"),
        ({"down_dims": []}, "down_dims="),
        ({"down_dims": [8, 10]}, r"down_dims=\[8, 10\]; expected multiples of n_groups"),
        ({"down_dims": [12, 16]}, "begins with 12"),
        ({"n_groups": 0}, "n_groups=0"),
        ({"kernel_size": 4}, "kernel_size=4"),
        ({"diffusion_step_embed_dim": 7}, "diffusion_step_embed_dim=7"),
        ({"diffusion_step_embed_dim": 2}, "diffusion_step_embed_dim=2"),
    ],
)
def test_wrong_options(options, named):
    with pytest.raises(ConfigError, match=named):
        tiny(**options)


def test_wrong_inputs():
    model = tiny()
    x, t, cond = inputs(model)
    for wrong, named in (
        ((x[:, :7], t, cond), "7 time steps"),
        ((x[..., :2], t, cond), "expected"),
        ((x[0], t, cond), "expected"),
        ((x, t, None), "condition is missing"),
        ((x, t, cond[:, :4]), "condition has shape"),
    ):
        with pytest.raises(ValueError, match=named):
            model(*wrong)
    with pytest.raises(ValueError, match="model has none"):
        tiny(global_cond_dim=None)(x, t, cond)
    with pytest.raises(ValueError, match="contiguous"):
        model.forward_nhwc(x.mT.contiguous().mT[:, None], t, cond)
