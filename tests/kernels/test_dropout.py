"""dropout keeps exactly the elements that the reference keeps, forward and backward."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.noise.dropout import dropout


def _rng(device, seed=0x1234_5678_9ABC, step=7):
    return torch.tensor([seed, step], device=device)


def _check(shape, p, rng, dtype, device, **key):
    """Equal bit for bit: each kept element is one float32 product, rounded once."""
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype)
    dy = torch.randn(shape, device=device).to(dtype)
    results = []
    for function in (dropout, reference.dropout):
        leaf = x.clone().requires_grad_()
        y = function(leaf, p, rng, **key)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 4, 4, 8), id="quads"),
        pytest.param((3, 5, 3, 7), id="last-quad-cut-short"),
        pytest.param((2, 9, 11, 13), id="two-programs-a-sample"),
        pytest.param((1, 1, 1, 1), id="one-element"),
    ],
)
def test_same_elements_as_the_reference(shape, dtype, device):
    _check(shape, 0.3, _rng(device), dtype, device, layer=5, first=3)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.999])
def test_probabilities(p, device):
    _check((2, 3, 3, 4), p, _rng(device), torch.float32, device, layer=0)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param({"layer": 40}, id="layer"),
        pytest.param({"layer": 1, "first": 1 << 20}, id="first"),
    ],
)
def test_keys(key, device):
    _check((2, 3, 3, 4), 0.5, _rng(device, seed=-3, step=1 << 31), torch.float32, device, **key)


def test_batches_split_over_devices_agree(device):
    """Sample n of a batch is keyed by first + n, wherever it is computed."""
    x = torch.randn(4, 3, 3, 4, device=device)
    whole = dropout(x, 0.5, _rng(device), layer=2, first=8)
    parts = [dropout(x[i : i + 2], 0.5, _rng(device), layer=2, first=8 + i) for i in (0, 2)]
    assert torch.equal(whole, torch.cat(parts))


def test_share_that_is_dropped(device):
    """10,000 draws at p = 0.3: the share is within five standard deviations, 0.023."""
    y = dropout(torch.ones(1, 100, 10, 10, device=device), 0.3, _rng(device), layer=0)
    assert abs((y == 0).float().mean().item() - 0.3) < 0.023


@pytest.mark.parametrize("function", [dropout, reference.dropout], ids=["triton", "torch"])
def test_empty_batch(function, device):
    x = torch.empty(0, 2, 2, 4, device=device, requires_grad=True)
    y = function(x, 0.5, _rng(device), layer=0)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape


def test_rng_changed_before_backward(device):
    """The mask could not be made again; autograd says so."""
    rng = _rng(device)
    y = dropout(torch.ones(1, 2, 2, 4, device=device, requires_grad=True), 0.5, rng, layer=0)
    rng += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_errors(device):
    x, rng = torch.ones(1, 2, 2, 4, device=device), _rng(device)
    with pytest.raises(ValueError, match="p is 1.0; expected 0 <= p < 1"):
        dropout(x, 1.0, rng, layer=0)
    with pytest.raises(ValueError, match="layer is -1"):
        dropout(x, 0.5, rng, layer=-1)
    with pytest.raises(ValueError, match="rng is torch.int32"):
        dropout(x, 0.5, rng.int(), layer=0)
    with pytest.raises(ValueError, match="contiguous NHWC"):
        dropout(x.transpose(1, 3), 0.5, rng, layer=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(32, 64, 64, 64), (5, 16, 16, 192), (3, 7, 7, 5)], ids=str)
def test_model_shapes(shape, dtype, device):
    for _ in range(3):
        _check(shape, 0.1, _rng(device), dtype, device, layer=11, first=64)
