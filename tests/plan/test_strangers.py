"""Other people's modules are planned, and compute what they compute themselves."""

import copy

import pytest
import torch
from torch.utils import _pytree as pytree

import tests.plan.repositories  # noqa: F401  whose modules are among these
from diffusion import accelerate
from tests.plan.compare import compare
from tests.plan.strangers import STRANGERS, SumsOfOneVariance


def made(name, dtype=torch.float64):
    """The module, its parameters random, and what it is called with."""
    torch.manual_seed(1)
    module, args, kwargs = STRANGERS[name]()
    for p in module.parameters():
        if p.ndim == 1:  # of norms and biases, which begin as ones and zeros
            torch.nn.init.normal_(p, std=0.3)
    given = pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs)
    )
    return module.to(dtype), *given


def tensors(result):
    return [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", STRANGERS)
def test_results_and_gradients_in_float64(name):
    compared = compare(*made(name))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9


@pytest.mark.parametrize("name", STRANGERS)
def test_accelerated(name):
    """With and without gradients; the module is as it was, and results are of the same types."""
    module, args, kwargs = made(name, torch.float32)
    before = copy.deepcopy(module.state_dict())
    fast, z = accelerate(module), module(*args, **kwargs)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            y = fast(*args, **kwargs)
        assert type(y) is type(z)
        for a, b in zip(pytree.tree_leaves(y), pytree.tree_leaves(z), strict=True):
            assert type(a) is type(b)
            if isinstance(a, torch.Tensor):
                assert a.requires_grad == (b.requires_grad and enabled)
                assert (a - b).abs().max() <= 1e-4 * b.abs().max()
            else:
                assert a == b
    loss = sum(x.square().sum() for x in tensors(fast(*args, **kwargs)) if x.requires_grad)
    loss.backward()
    assert any(p.grad is not None for p in module.parameters())
    for key, x in module.state_dict().items():
        assert torch.equal(x, before[key]) and not torch._is_functional_tensor(x), key


AUTOCAST = ["UNet2DConditionModel", "two masks", "ConvNeXt", "written to", "norms over channels"]


@pytest.mark.parametrize("name", AUTOCAST)
def test_under_autocast(name):
    """No further from float64 than twice what the module is."""
    exact, args, kwargs = made(name)
    results = [tensors(exact(*args, **kwargs))]
    module, args, kwargs = made(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        results += [tensors(net(*args, **kwargs)) for net in (module, accelerate(module))]
    for exact, theirs, ours in zip(*results, strict=True):
        assert theirs.dtype == ours.dtype
        budget = 2 * (theirs - exact).abs().max()
        assert (ours - exact).abs().max() <= budget


@pytest.mark.parametrize("low", [False, True])
def test_an_image_in_channels_last(low):
    """PyTorch gives what it makes of one other strides, such as its mean over all pixels."""
    module, (x,), _ = made("residual_network", torch.float32)
    assert any(isinstance(part, torch.nn.AdaptiveAvgPool2d) for part in module.modules())
    x = x.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        (theirs,), (ours,) = (tensors(net(x)) for net in (module, accelerate(module)))
    torch.testing.assert_close(ours, theirs, atol=1e-2 if low else 1e-6, rtol=0)


def on(device, given):
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), given)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", STRANGERS)
def test_on_a_gpu(name, low, monkeypatch):
    """Results and gradients, in float32 and under autocast, are no further from float64 than a
    few times what the module's own are. Not in TF32, which cuDNN may take or leave for each layer
    where it is allowed."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    exact, *given = made(name)
    module, *given32 = made(name, torch.float32)
    module, given32 = module.cuda(), on("cuda", given32)
    found = []
    for net, (args, kwargs) in (
        (exact, given),
        (module, given32),
        (accelerate(module), given32),
    ):
        with torch.autocast("cuda", torch.bfloat16, enabled=low and net is not exact):
            results = [x for x in tensors(net(*args, **kwargs)) if x.requires_grad]
        loss = sum(x.double().square().sum() for x in results)
        trained = [p for p in net.parameters() if p.requires_grad]
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        grads = torch.cat([g.double().cpu().flatten() for g in grads if g is not None])
        found.append(([x.detach().double().cpu() for x in results], grads))
    (exact, exact_grad), (theirs, their_grad), (ours, our_grad) = found
    floor = 1e-3 if low else 1e-5
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm() + floor * c.norm()
    budget = 2 * (their_grad - exact_grad).norm() + floor * exact_grad.norm()
    assert (our_grad - exact_grad).norm() <= budget


@pytest.mark.gpu
@pytest.mark.parametrize(("images", "side"), [(1, 16), (1, 32), (64, 16), (16, 64)])
def test_evaluations_times_a_number_on_a_gpu(images, side):
    """Of 64 channels, in 16 bits, with norms in the launches that multiply: no further from float64
    than twice what the module is."""
    check_evaluation("cuda", images, side)


def check_evaluation(device, images, side):
    torch.manual_seed(1)
    exact = SumsOfOneVariance(64, 6).double().to(device).eval()
    given = torch.randn(images, 3, side, side), torch.randn(images, 6)
    given = [x.to(device, torch.bfloat16) for x in given]
    module = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(module.state_dict())  # as they were rounded
    with torch.no_grad():
        want = exact(*(x.double() for x in given))
        theirs, fast = module(*given), accelerate(module)
        for _ in range(3):  # the last by a graph
            ours = fast(*given)
            assert (ours - want).norm() <= 2 * (theirs - want).norm()


def test_evaluations_times_a_number():
    check_evaluation("cpu", 2, 8)
