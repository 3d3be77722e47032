"""Layers: PyTorch's initialisation and results, and the layout that the kernels need."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion.models.layers import (
    Conv1d,
    Conv2d,
    GroupNorm,
    Linear,
    TimestepEmbedding,
    set_backend,
)
from diffusion.runtime.backend import TORCH_FP32, Backend
from triton_kernels import reference

PAIRS = {
    "conv3x3": (lambda: Conv2d(5, 7, 3), lambda: nn.Conv2d(5, 7, 3, padding=1)),
    "conv1x1": (lambda: Conv2d(5, 7, 1), lambda: nn.Conv2d(5, 7, 1)),
    "conv_one_channel": (lambda: Conv2d(1, 4, 3), lambda: nn.Conv2d(1, 4, 3, padding=1)),
    "conv_stride_2": (
        lambda: Conv2d(5, 7, 3, stride=2),
        lambda: nn.Conv2d(5, 7, 3, stride=2, padding=1),
    ),
    "conv1d_kernel_1": (lambda: Conv1d(5, 7), lambda: nn.Conv1d(5, 7, 1)),
    "conv1d_kernel_5": (lambda: Conv1d(5, 7, 5), lambda: nn.Conv1d(5, 7, 5, padding=2)),
    "linear": (lambda: Linear(6, 9), lambda: nn.Linear(6, 9)),
}


@pytest.fixture(params=PAIRS.values(), ids=PAIRS.keys())
def pair(request):
    made = []
    for make in request.param:
        torch.manual_seed(3)
        made.append(make())
    return made


def test_parameters_start_as_in_pytorch(pair):
    ours, theirs = (dict(m.named_parameters()) for m in pair)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value)


def test_forward_is_pytorchs(pair):
    ours, theirs = pair
    channels = theirs.weight.shape[1]
    if isinstance(theirs, nn.Linear):
        x = torch.randn(4, channels)
        y, expected = ours(x), theirs(x)
    elif isinstance(theirs, nn.Conv1d):
        x = torch.randn(2, 1, 9, channels)
        y, expected = ours(x)[:, 0], theirs(x[:, 0].transpose(1, 2)).transpose(1, 2)
    else:
        x = torch.randn(2, 6, 5, channels)
        y, expected = ours(x), theirs(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    torch.testing.assert_close(y, expected)


def test_weights_have_channels_last(pair):
    weight = pair[0].weight
    assert weight.movedim(1, -1).is_contiguous()


def test_layout_survives_loading_and_copying():
    layer = Conv2d(5, 7, 3)
    layer.load_state_dict(nn.Conv2d(5, 7, 3).state_dict())
    for weight in (layer.weight, copy.deepcopy(layer).weight):
        assert weight.permute(0, 2, 3, 1).is_contiguous()


def test_zero_leaves_later_draws_alone():
    draws = []
    for zero in (False, True):
        torch.manual_seed(0)
        layer = Conv2d(3, 4, 3, zero=zero)
        draws.append(torch.rand(3))
    assert torch.equal(*draws)
    assert not layer.weight.any() and not layer.bias.any()


@pytest.mark.parametrize("activation", ["identity", "silu", "mish"])
def test_group_norm(activation):
    layer = GroupNorm(3, 6, activation=activation)
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    x, scale, shift = torch.randn(2, 5, 4, 6), torch.randn(2, 6), torch.randn(2, 6)
    z = F.group_norm(x.permute(0, 3, 1, 2), 3, layer.weight, layer.bias).permute(0, 2, 3, 1)
    z = z * (1 + scale[:, None, None]) + shift[:, None, None]
    expected = z if activation == "identity" else getattr(F, activation)(z)
    torch.testing.assert_close(layer(x, scale, shift), expected)


@pytest.mark.parametrize("dim", [8, 7])
def test_timestep_embedding_is_one_a_sample(dim):
    t = torch.tensor([0, 3, 999])
    embedding = TimestepEmbedding(dim, max_period=1000)(t)
    assert embedding.shape == (3, dim) and embedding.dtype == torch.float32
    half = dim // 2
    for n, step in enumerate(t.double()):
        for i in range(half):
            angle = step * 1000 ** (-i / half)
            assert embedding[n, i] == pytest.approx(torch.cos(angle).item(), abs=1e-4)
            assert embedding[n, half + i] == pytest.approx(torch.sin(angle).item(), abs=1e-4)
    assert (embedding[:, 2 * half :] == 0).all()


def test_fractional_timesteps():
    embed = TimestepEmbedding(8)
    assert torch.equal(embed(torch.tensor([2.0])), embed(torch.tensor([2])))
    assert not torch.equal(embed(torch.tensor([2.5])), embed(torch.tensor([2])))


def test_set_backend_reaches_every_layer():
    model = nn.Sequential(Conv2d(3, 4, 3), nn.Sequential(GroupNorm(2, 4)))
    backend = Backend("torch", reference, torch.bfloat16)
    set_backend(model, backend)
    assert model[0].backend is backend and model[1][0].backend is backend
    assert copy.deepcopy(model)[0].backend is backend
    assert Conv2d(3, 4, 3).backend is TORCH_FP32
