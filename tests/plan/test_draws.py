"""Draws of a module are a plan's: new in every call, and the module's from the same state."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion import accelerate
from diffusion.plan.graph import PlanError
from diffusion.plan.trace import trace
from triton_kernels import reference


class Draws(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.conv = function, nn.Conv2d(3, 3, 1)
        self.table = nn.Embedding(11, 3)
        self.register_buffer("alphas", torch.linspace(0.9, 0.1, 10))

    def forward(self, x, *given):
        return self.function(self, x, *given)


def _labels(net, x):
    """Dropped, as DiT drops them."""
    y = torch.arange(len(x), device=x.device)
    y = torch.where(torch.rand(len(x), device=x.device) < 0.5, 10, y)
    return net.conv(x) + net.table(y)[:, :, None, None]


def _paths(net, x):
    """Two, each dropped by itself, in the ways of two libraries."""
    kept = x.new_empty((len(x), 1, 1, 1)).bernoulli_(0.5).div_(0.5)
    x = x + net.conv(x) * kept
    return x + net.conv(x) * torch.floor(0.5 + torch.rand(len(x), 1, 1, 1, device=x.device).to(x))


def _loss(net, x):
    """Of DDPM, with its timesteps and noise."""
    t, noise = torch.randint(0, 10, (len(x),), device=x.device), torch.randn_like(x)
    alpha = net.alphas[t][:, None, None, None]
    return F.mse_loss(net.conv(alpha.sqrt() * x + (1 - alpha).sqrt() * noise), noise), t


def _latents(net, x):
    mean, log = net.conv(x).repeat(1, 2, 1, 1).chunk(2, 1)
    noise = torch.randn(mean.shape, generator=None)  # as diffusers' latents are drawn
    return mean + torch.exp(0.5 * log) * noise.to(mean)


def _written(net, x):
    noise = torch.empty_like(x).normal_(0, 0.1) + torch.zeros_like(x).uniform_(-1, 1)
    return net.conv(F.alpha_dropout(x, 0.5, True) + noise)


def _chosen(net, x):
    y = net.conv(x).flatten(1)
    at = torch.multinomial(y.softmax(-1), 3)
    return y.gather(1, at), torch.bernoulli(y.sigmoid()) * y, F.gumbel_softmax(y)


FUNCTIONS = {f.__name__[1:]: f for f in (_labels, _paths, _loss, _latents, _written, _chosen)}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_the_modules(name):
    torch.manual_seed(0)
    module, x = Draws(FUNCTIONS[name]).double(), torch.randn(4, 3, 5, 4, dtype=torch.float64)
    fast, first = accelerate(module), []
    for call in (1, 2, 2):
        made = []
        for net in (module, fast):
            torch.manual_seed(call)
            y = net(x)
            y = y if isinstance(y, tuple) else (y,)
            loss = sum(v.square().sum() for v in y if v.is_floating_point())
            grads = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
            made.append([*y, *(g for g in grads if g is not None)])
        for a, b in zip(*made, strict=True):
            torch.testing.assert_close(a, b)
        first.append(made[1][0].detach())
    assert not torch.equal(first[0], first[1]) and torch.equal(first[1], first[2])
    assert len(fast._planned_calls.plans) == 1


def test_calls_do_not_repeat_one_another():
    module = Draws(lambda net, x: net.conv(x) * torch.rand(1) + net.conv(x) * torch.rand(1))
    fast, x = accelerate(module), torch.randn(2, 3, 4, 4)
    with torch.no_grad():
        assert len({float(fast(x).sum()) for _ in range(5)}) == 5
    assert trace(module, (x,)).graph.count()["draw"] == 2  # which are not one


def test_a_number_beside_draws_is_a_tensor():
    fast = accelerate(Draws(lambda net, x, t: net.conv(x) * t + torch.randn_like(x)))
    x = torch.randn(2, 3, 4, 4)
    plans = [fast.plan_of((x, t), {})[0] for t in (0.25, 0.75)]
    assert plans[0] is plans[1]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda net, x: x + torch.randn(1, generator=torch.Generator()), "generator of the module"),
        (lambda net, x: x * torch.rand(()).item(), "item of a tensor"),
        (lambda net, x: F.rrelu(net.conv(x), training=True), "rrelu"),
        (lambda net, x: x * (torch.manual_seed(0) is None), "torch.manual_seed would be called"),
    ],
)
def test_draws_that_no_plan_makes_are_refused(function, why):
    with pytest.raises(PlanError, match=rf"{why}.*test_draws.py:\d+"):
        accelerate(Draws(function))(torch.ones(1, 3, 4, 4))


class Dropped(nn.Module):
    """Behind a norm, behind a product, and of rows."""

    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.c = nn.GroupNorm(4, 8), nn.Linear(8, 5)

    def forward(self, x):
        drop = self.dropout(x)
        x = self.b(drop(F.silu(self.norm(self.a(x))), 0.3, (0, 2, 3, 1)))
        x = drop(x, 0.2, (0, 2, 3, 1)).mean((2, 3))
        return drop(self.c(x), 0.5, (0, 1))


def _of_pytorch(x):
    return lambda y, p, order: F.dropout(y, p, True)


def _of_kernels(x):
    """What `triton_kernels` drops by a seed of PyTorch's generator, of elements as they lie."""
    rng, layers = torch.randint(0, 2**63 - 1, (2,)), iter(range(9))

    def drop(y, p, order):
        lies = y.permute(order)
        rows = lies.reshape(lies.shape[0], 1, -1, lies.shape[-1])
        dropped = reference.dropout(rows, p, rng, layer=next(layers)).reshape(lies.shape)
        return dropped.permute([order.index(i) for i in range(len(order))])

    return drop


def test_dropouts_of_a_module_are_drawn_where_they_drop():
    """From one seed in a call, in the norm's pass where there is one, and no mask is kept."""
    torch.manual_seed(0)
    module, x = Dropped(_of_kernels).double(), torch.randn(4, 3, 5, 4).double()
    fast = accelerate(Dropped(_of_pytorch).double())
    fast.load_state_dict(module.state_dict())
    made = []
    for net in (module, fast):
        torch.manual_seed(1)
        y = net(x)
        made.append((y, *torch.autograd.grad(y.square().sum(), list(net.parameters()))))
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)
    nodes = fast.plan_of((x,), {})[0].graph.count()
    assert nodes["draw"] == 1 and nodes["dropout"] == 4  # two of them in either pass


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", ["labels", "paths", "loss", "written"])
def test_on_a_gpu(name, low, monkeypatch):
    """Drawn there, in the order of the module."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    module, x = Draws(FUNCTIONS[name]).cuda(), torch.randn(4, 3, 5, 4, device="cuda")
    fast, made = accelerate(module), []
    for net in (module, fast):
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16, enabled=low), torch.no_grad():
            y = net(x)
        made.append(y[0] if isinstance(y, tuple) else y)
    tolerance = 0.05 if low else 1e-4
    torch.testing.assert_close(*made, rtol=tolerance, atol=tolerance)


def test_latents_of_diffusers_are_the_modules():
    """`AutoencoderKL` that samples draws with `generator=None`."""
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    sizes = {"block_out_channels": (8,), "layers_per_block": 1, "norm_num_groups": 4}
    torch.manual_seed(0)
    module = diffusers.AutoencoderKL(**blocks, **sizes).double()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    made = []
    for net in (module, accelerate(module)):
        torch.manual_seed(1)
        y = net(x, sample_posterior=True).sample
        made.append((y, *torch.autograd.grad(y.square().sum(), list(module.parameters()))))
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-10)
