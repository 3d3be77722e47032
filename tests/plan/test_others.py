"""Networks that are no `UNet` train by a plan: gradients as layer by layer, dropout, the log."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import triton_kernels
from diffusion.models.conditions import Conditions
from diffusion.models.flat_parameters import FlatParameters
from diffusion.models.layers import Conv2d, Network, set_backend
from diffusion.models.unet1d import UNet1d
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.fuse import embeddings
from diffusion.plan.step.others import TrainingNetwork
from diffusion.runtime.backend import Backend
from tests.diffusion.diffusers_models import perturbed
from tests.plan.compare import FLOAT64, in_float64

T, RNG = torch.tensor([3, 400]), torch.tensor([5, 6])


def policy(**options) -> nn.Module:
    sizes = {"diffusion_step_embed_dim": 16, "down_dims": (16, 32), "global_cond_dim": 5}
    return perturbed(UNet1d(2, **sizes, **options))


def images(**options) -> nn.Module:
    """With dropout of channels that are no multiple of four."""
    from tests.diffusion.test_fused_unet import make

    sizes = {"model_channels": 18, "channel_mult": (1, 2), "num_groups": 6, "num_head_channels": 6}
    return make(sizes | {"dropout": 0.3} | options, (8, 8)).train()


NETWORKS = {
    "policy": (policy, (2, 1, 8, 2), torch.randn(2, 5)),
    "policy, film": (lambda: policy(cond_predict_scale=True), (2, 1, 8, 2), torch.randn(2, 5)),
    "dropout of 18 channels": (images, (2, 8, 8, 3), None),
    # one level, for what they are given is added to any
    "classes": (
        lambda: images(num_classes=3, channel_mult=(1,)),
        (2, 8, 8, 3),
        torch.tensor([0, 2]),
    ),
    "a vector": (
        lambda: images(vector_dim=4, channel_mult=(1,)),
        (2, 8, 8, 3),
        Conditions(vector=torch.randn(2, 5).double()),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_as_layer_by_layer(name, caplog):
    """Results and gradients, added to those that are there."""
    build, shape, labels = NETWORKS[name]
    torch.manual_seed(0)
    model = in_float64(build())
    flat = FlatParameters(model)
    x, dy = torch.randn(shape).double(), None
    labels = labels.double() if torch.is_tensor(labels) and labels.is_floating_point() else labels
    network, found = TrainingNetwork(model, flat), []
    for run in (model.forward_nhwc, network, network):
        flat.grad.fill_(1)
        y = run(x, T, labels, rng=RNG, first=4)
        dy = torch.randn_like(y) if dy is None else dy
        y.backward(dy)
        found.append((y.detach(), flat.grad.clone()))
    for y, grad in found[1:]:
        torch.testing.assert_close(y, found[0][0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad, found[0][1], rtol=1e-6, atol=1e-6)
    assert not caplog.records and len(network.plans) == 1


def test_hooks_of_parameters_see_their_gradients():
    torch.manual_seed(0)
    model, x = in_float64(policy()), torch.randn(2, 1, 8, 2).double()
    flat, found = FlatParameters(model), []
    _, (seen, *_) = zip(*model.named_parameters(), strict=True)
    seen.register_hook(lambda gradient: 2 * gradient)
    seen.register_post_accumulate_grad_hook(lambda parameter: found.append(parameter.grad.clone()))
    for run in (model.forward_nhwc, TrainingNetwork(model, flat)):
        flat.grad.zero_()
        run(
            x, T, torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).double()
        ).sum().backward()
    torch.testing.assert_close(found[1], found[0])
    assert found[0].any()


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_on_the_kernels(name, device):
    """In float32, beside the layers in float64."""
    build, shape, labels = NETWORKS[name]
    found = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        model, exact = build().to(device, dtype), dtype == torch.float64
        set_backend(model, FLOAT64 if exact else Backend("triton", triton_kernels, dtype))
        flat = FlatParameters(model)
        run = model.forward_nhwc if exact else TrainingNetwork(model, flat)
        torch.manual_seed(1)
        x, dy = (torch.randn(*shape[:3], c).to(device, dtype) for c in (shape[3], 1))

        def placed(value: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return value.to(device, dtype if value.is_floating_point() else None)

        given = labels
        if labels is not None:
            given = labels.each(placed) if isinstance(labels, Conditions) else placed(labels)
        y = run(x, T.to(device), given, rng=RNG.to(device), first=4)
        y.backward(dy.expand_as(y))
        found.append((y.detach().double(), flat.grad.double()))
    (z, exact_grad), (y, grad) = found
    assert (y - z).norm() <= 1e-5 * z.norm()
    assert (grad - exact_grad).norm() <= 1e-4 * exact_grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["a policy", "unused, and used twice", "written"])
def test_gradients_of_steps(name, dtype, device, monkeypatch):
    """Of several steps of two parts each: written in their places, or zeroed before; the layers in
    float64 say what they are."""
    torch.manual_seed(0)
    build = {"a policy": policy, "written": Writing}.get(name, Odd)
    model = build().to(device)
    exact = copy.deepcopy(model).double()
    set_backend(exact, FLOAT64)
    set_backend(model, Backend("triton", triton_kernels, dtype))
    flat = FlatParameters(model, together=TOGETHER)
    monkeypatch.setattr(embeddings, "_LARGE", 1)
    network = TrainingNetwork(model, flat)
    cond = torch.randn(2, 5, device=device) if name == "a policy" else None
    flat.grad.fill_(7)
    for step in range(3):
        network.forget_gradients()
        exact.zero_grad()
        for part in range(2):
            x, dy = (torch.randn(2, 1, 8, 2, device=device) for _ in range(2))
            network(x, T.to(device), cond, first=2 * part).backward(dy.to(dtype))
            given = None if cond is None else cond.double()
            exact.forward_nhwc(x.double(), T.to(device), given).backward(dy.double())
        grads = flat.views(flat.grad)
        for parameter, p in exact.named_parameters():
            wanted = torch.zeros_like(p) if p.grad is None else p.grad
            error = (grads[parameter].double() - wanted).norm()
            most = (1e-4 if dtype == torch.float32 else 2e-2) * wanted.norm().clamp(min=1e-2)
            assert error <= most, (step, parameter)
    (*_, (_, calls)) = network.plans.values()
    ((made,),) = calls.plans.values()
    weights = {n for n, p in model.named_parameters() if p.ndim > 1}
    placed = {n.removeprefix("model.") for at in made.placed.values() for n in at.names}
    in_16_bits = {n for at in made.low.values() for n in at.names}
    if name == "a policy":  # but filters of a concatenation, and what are made of them
        made_of = ("up_modules.0.0.residual_conv.", "up_modules.0.2.conv.")
        made_of += () if dtype != torch.float32 else ("cond_encoder.1.",)  # in rows without zeros
        assert all(any(part in n for part in made_of) for n in weights - placed)
        low = {"model." + n for n in placed}
        assert dtype == torch.float32 or len(low & in_16_bits) > 20
    elif name == "written":
        assert "last.weight" in placed
        assert not {"model.normed", "model.shrunk"} & in_16_bits
    else:
        assert "once.weight" in placed and not placed & {"twice.weight", "unused.weight"}


class Odd(Network):
    """A layer that nobody calls, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.unused = (Conv2d(8, 8, 1) for _ in range(3))
        self.first, self.last = Conv2d(2, 8, 3), Conv2d(8, 2, 3)

    def forward_nhwc(self, x, t, labels=None, *, rng=None, first=0):
        h = self.once(self.first(x.to(self.backend.dtype)))
        return self.last(self.twice(self.twice(h)))


class Writing(Network):
    """A parameter that is normed before it is read, and one that is scaled after two layers have
    read it, so that its gradient has no place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Conv2d(2, 8, 3), Conv2d(8, 2, 3)
        self.normed, self.shrunk = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def forward_nhwc(self, x, t, labels=None, *, rng=None, first=0):
        dtype = self.backend.dtype
        with torch.no_grad():
            self.normed.copy_(F.normalize(self.normed, dim=1))
        h = F.linear(self.first(x.to(dtype)), self.normed.to(dtype, copy=True))
        for _ in range(2):
            h = F.linear(h, self.shrunk.to(dtype, copy=True)) / 4
        y = self.last(h)
        with torch.no_grad():
            self.shrunk.mul_(0.9)
        return y


class Recurrent(Network):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(3, 3)

    def forward_nhwc(self, x, t, labels=None, *, rng=None, first=0):
        return self.inner(x.flatten(1, 2))[0].view(x.shape)


def test_without_a_plan_the_log_says_why(caplog):
    caplog.set_level(logging.INFO)
    model, x = Recurrent(), torch.randn(2, 4, 4, 3)
    network = TrainingNetwork(model, FlatParameters(model))
    for _ in range(2):
        torch.testing.assert_close(network(x, T), model.forward_nhwc(x, T))
    (record,) = caplog.records
    assert "one by one, without a plan: " in record.message and "lstm" in record.message
