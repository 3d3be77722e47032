"""An accelerated module stands in for the module: results, gradients, chains, autocast, DDP."""

import copy
import gc
import json
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DDPMPipeline, DDPMScheduler
from torch import nn
from torch.autograd import forward_ad

from diffusion import accelerate
from diffusion.plan.build import plan
from diffusion.plan.graph import PlanError
from diffusion.plan.record.without_gpu import cuda_autocast
from tests.diffusion.diffusers_models import theirs
from tests.end_to_end.run import run
from tests.kernels import chips
from tests.plan.networks import NAMES, network
from tests.plan.on_a_gpu import LOW
from tests.plan.two_processes import images, small
from triton_kernels.registry.chips import CHIPS
from triton_kernels.runtime.device import standing_for
from triton_kernels.runtime.launch_recorder import rehearsal

BUDGET = 1e-4  # of float32, relative


def sample(result):
    return getattr(result, "sample", result)


def close(a, b, budget=BUDGET):
    return bool((a - b).abs().max() <= budget * b.abs().max())


def plans_of(fast, *calls):
    """How many plans serve these calls."""
    return len({id(fast.plan_of(args, {})[0]) for args in calls})


@pytest.mark.parametrize("name", [n for n in NAMES if "film" in n or "google" in n])
def test_results_and_gradients(name):
    module, args, kwargs = network(name)
    fast = accelerate(module)
    y, z = fast(*args, **kwargs), module(*args, **kwargs)
    assert type(y) is type(z)
    y, z = sample(y), sample(z)
    assert y.requires_grad and close(y, z)
    dy = torch.randn_like(z)
    parameters = {k: p for k, p in module.named_parameters() if p.requires_grad}
    ours, theirs_ = (
        torch.autograd.grad(out, list(parameters.values()), dy, allow_unused=True) for out in (y, z)
    )
    largest = max(float(g.abs().max()) for g in theirs_ if g is not None)
    for name_, a, b in zip(parameters, ours, theirs_, strict=True):
        assert (a is None) == (b is None), name_
        if b is not None:
            error = float((a - b).abs().max())
            assert error <= BUDGET * max(float(b.abs().max()), 1e-2 * largest), name_


def test_shares_parameters_and_attributes():
    module, args, kwargs = network("diffusers: as diffusers trains")
    fast = accelerate(module)
    assert {id(p) for p in fast.parameters()} == {id(p) for p in module.parameters()}
    assert fast.config is module.config and fast.dtype == module.dtype
    before = sample(fast(*args)).detach()
    with torch.no_grad():
        module.conv_out.bias.add_(1)
    assert torch.allclose(sample(fast(*args)), before + 1, atol=1e-5)
    assert fast.eval() is fast and not module.training


def test_copies_share_nothing():
    """As an average of a model is made."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
    fast, x = accelerate(net), torch.randn(1, 3, 8, 8)
    y = fast(x)
    other = copy.deepcopy(fast)
    with torch.no_grad():
        other.module[1].bias.add_(1)
        assert torch.allclose(other(x), y + 1, atol=1e-5)
        assert torch.equal(fast(x), y)


def test_a_parameter_that_changes_unseen_counts():
    """Through `.data`, as averages are swapped in, of which no version tells."""
    module, (x, t), _ = network("diffusers: as diffusers trains")
    fast = accelerate(module)
    with torch.no_grad():
        for _ in range(2):
            module.down_blocks[1].attentions[0].to_q.weight.data.add_(0.5)
            assert close(sample(fast(x, t)), sample(module(x, t)))


def test_no_grad_and_other_batches():
    module, (x, t), _ = network("diffusers: as diffusers trains")
    fast = accelerate(module)
    with torch.no_grad():
        y = fast(x, t, return_dict=False)
    assert isinstance(y, tuple) and not y[0].requires_grad
    calls = [(x, 7)]
    for n in (1, 3):
        x = torch.randn(n, 3, 8, 8)
        with torch.no_grad():
            assert close(fast(x, 7).sample, module(x, 7).sample)
            calls.append((x, 7))
    with torch.no_grad():
        assert plans_of(fast, *calls, *calls) == 3


def test_another_timestep_needs_no_other_plan():
    module, (x, _), _ = network("diffusers: as diffusers trains")
    fast = accelerate(module)
    with torch.no_grad():
        for t in (0, 5, 999):
            assert close(fast(x, t).sample, module(x, t).sample)
        for kind in (int, np.int64):
            assert plans_of(fast, *((x, kind(t)) for t in (0, 5, 999))) == 1
        assert close(fast(x, np.int64(7)).sample, module(x, 7).sample)


class Of(nn.Module):
    """A layer, and a function of it."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Conv2d(3, 3, 1)

    def forward(self, x, t):
        return self.function(self.layer(x), t)


def test_a_number_that_diffusers_rounds_is_no_tensor():
    """For a time of 7.5 UNet2DModel computes what it does for 7; for a tensor, not."""
    module, (x, _), _ = network("diffusers: as diffusers trains")
    fast = accelerate(module)
    with torch.no_grad():
        # also behind a tensor, as diffusers' schedulers give
        for t in (torch.tensor(7.5), 7.5, 7, torch.tensor(7), 8, 900.25):
            assert close(fast(x, t).sample, module(x, t).sample), t


@pytest.mark.parametrize(
    ("function", "plans"),
    [
        (lambda y, t: y * t, 1),
        (lambda y, t: y + torch.as_tensor(t, dtype=y.dtype).sin() * 3, 1),
        (lambda y, t: y / (t + 1) if isinstance(t, float) else y, 3),
        (lambda y, t: y[:, : 1 + int(t > 0.2)], 3),
        (lambda y, t: y * torch.tensor([t, 1.0, 2.0], device=y.device)[:, None, None], 3),
        (lambda y, t: y * y.new_tensor([t]), 3),
        (lambda y, t: y * torch.as_tensor(t, device=y.device), 1),
        (lambda y, t: y * {0.1: 5.0}.get(t, 7.0), 3),
    ],
)
def test_numbers_are_tensors_where_the_module_does_the_same(function, plans):
    module, x = Of(function), torch.randn(2, 3, 4, 4)
    fast = accelerate(module)
    for t in (0.1, 0.3, 0.7):
        torch.testing.assert_close(fast(x, t), module(x, t))
    assert plans_of(fast, (x, 0.1), (x, 0.3), (x, 0.7)) == plans


@pytest.mark.parametrize("alike", [True, False])
def test_many_plans_of_numbers_are_said_once(alike, caplog):
    fast = accelerate(Of(lambda y, t: y * t if alike else y * {0: 5.0}.get(t, 7.0)))
    with torch.no_grad():
        for t in range(18):
            fast(torch.ones(1, 3, 2, 2), t)
    said = [
        record.message for record in caplog.records if "each number needs a plan" in record.message
    ]
    assert len(said) == (0 if alike else 1)


def test_a_number_keeps_its_digits_in_float64():
    """As a tensor it would be of float32."""
    module, x = Of(lambda y, t: y * t).double(), torch.randn(2, 3, 4, 4).double()
    torch.testing.assert_close(accelerate(module)(x, 0.1), module(x, 0.1), rtol=1e-14, atol=0)


def test_threads_that_call_at_once():
    """A recording puts other tensors in the place of a module's parameters meanwhile."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 3, 1))
    fast, x = accelerate(net), torch.randn(8, 3, 8, 8)

    def evaluate(n):
        with torch.no_grad():
            return fast(x[:n])

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(evaluate, range(1, 9)))
    for y in results:
        torch.testing.assert_close(y, net(x[: len(y)]), rtol=1e-4, atol=1e-5)


def test_an_accelerated_part_of_an_accelerated_module():
    inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.SiLU())
    fast, x = (
        accelerate(nn.Sequential(accelerate(inner), nn.Conv2d(3, 2, 1))),
        torch.randn(1, 3, 4, 4),
    )
    torch.testing.assert_close(fast(x), fast.module[1](inner(x)))
    torch.testing.assert_close(accelerate(accelerate(inner))(x), inner(x))


def test_gradients_of_inputs_and_frozen_parameters():
    module, (x, t), _ = network("diffusers: as diffusers trains")
    for p in module.parameters():
        p.requires_grad_(False)
    module.conv_in.weight.requires_grad_()
    fast, grads = accelerate(module), []
    for net in (fast, module):
        x = x.detach().requires_grad_()
        module.conv_in.weight.grad = None
        sample(net(x, t)).square().sum().backward()
        grads.append((x.grad, module.conv_in.weight.grad))
    assert close(grads[0][0], grads[1][0]) and close(grads[0][1], grads[1][1])


@pytest.mark.parametrize(
    ("scheduler", "dtype", "gain", "budget"),
    [
        (DDPMScheduler, torch.float32, 1, BUDGET),
        # a rounding error of DDIM grows by a third in every step of these untrained networks: by
        # 1e7 in all, so that float32 says nothing of what the network itself draws
        (DDIMScheduler, torch.float64, 1, 1e-6),
        (DDIMScheduler, torch.float32, 0.02, BUDGET),
    ],
)
def test_a_chain_of_50_steps(scheduler, dtype, gain, budget):
    module = theirs().to(dtype)
    module.conv_out.weight.data.mul_(gain)
    images = []
    for net in (module, accelerate(module)):
        steps = scheduler(num_train_timesteps=1000)
        steps.set_timesteps(50)
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        generator = torch.Generator().manual_seed(1)
        for t in steps.timesteps:
            with torch.no_grad():
                x = steps.step(net(x, t).sample, t, x, generator=generator).prev_sample
        images.append(x)
    assert close(images[1], images[0], budget)


def test_in_a_pipeline_of_diffusers():
    drawn = []
    for fast in (False, True):
        pipeline = DDPMPipeline(theirs(), DDPMScheduler())
        if fast:
            pipeline.unet = accelerate(pipeline.unet)
        generator = torch.Generator().manual_seed(0)
        options = {"num_inference_steps": 3, "output_type": "np", "generator": generator}
        drawn.append(torch.from_numpy(pipeline(batch_size=1, **options).images))
    assert close(drawn[1], drawn[0])


def test_training_takes_the_same_steps():
    losses = []
    for fast in (False, True):
        module, (x, t), _ = network("diffusers: as google/ddpm")
        net = accelerate(module.train()) if fast else module.train()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.mse_loss(sample(net(x, t)), torch.ones_like(x))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    ours, theirs_ = torch.tensor(losses[5:]), torch.tensor(losses[:5])
    assert close(ours, theirs_) and theirs_[-1] < theirs_[0]


class TwoBiases(nn.Module):
    """Both biases have one gradient, and so have the weights of two linear layers of one input."""

    def __init__(self):
        super().__init__()
        self.conv, self.skip = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = (self.conv(x) + self.skip(x)).permute(0, 2, 3, 1)
        return self.a(y) + self.b(y)


def test_gradients_add_up_over_calls():
    """autograd keeps the first gradient as it is and adds the next in place, so what two parameters
    have in common would be added to both of them twice, and clipped twice."""
    torch.manual_seed(0)
    module, x = TwoBiases(), torch.randn(2, 4, 6, 6)
    expected = copy.deepcopy(module)
    fast = accelerate(module)
    for net in (fast, expected):
        for scale in (1, 2, 3):
            net(scale * x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_autocast():
    module, (x, t), _ = network("diffusers: as diffusers trains")
    fast = accelerate(module)
    exact = sample(module(x, t)).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, z = sample(fast(x, t)), sample(module(x, t))
    assert y.dtype == z.dtype == torch.bfloat16
    budget = 2 * (z - exact).abs().max()
    assert 0 < (y - exact).abs().max() <= budget
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in module.parameters() if p.grad is not None)


def test_a_module_in_bfloat16():
    module, (x, t), _ = network("diffusers: film, residual blocks resample")
    exact = sample(module(x, t)).detach()
    module = module.bfloat16()
    y, z = sample(accelerate(module)(x.bfloat16(), t)), sample(module(x.bfloat16(), t))
    assert y.dtype == z.dtype == torch.bfloat16
    assert 0 < (y - exact).abs().max() <= 2 * (z - exact).abs().max()


@pytest.fixture(scope="module")
def launched():
    code, out, err = run("-m", "tests.plan.on_a_gpu")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", NAMES)
def test_16_bits_on_a_gpu(launched, name, low):
    """Both passes are planned, and have their kernels."""
    kernels = launched[f"{name} {low}"]
    norms = "norm_apply|norm_from_partials"  # by the number of tiles
    for family in ("conv", "wgrad", norms, "norm_dx", "attention_fwd", "attention_bwd"):
        expected = "attention" not in family or not ("policy" in name or "no attention" in name)
        assert any(re.search(family, kernel) for kernel in kernels) == expected, family
    if name.startswith("diffusers"):  # the framework's layers are in float32 unless told otherwise
        # autocast enlarges a skip in float32, and so is the sum: its norm reads it once more, and
        # coefficients are made in the launch of dx where all images have one type
        of_types = {"_norm_partials_kernel", "norm_dx_kernel"}
        more = of_types if "residual blocks resample" in name else set()
        assert {*kernels} | more == {*launched[f"{name} {LOW[0]}"]}


def test_a_layer_norm_of_16_bits_in_a_rehearsal():
    """A CPU stands for the GPU there, and its kernel keeps the statistics in 16 bits."""
    with rehearsal(chips.HOPPER):
        fast = accelerate(nn.LayerNorm(8).bfloat16())
        fast(torch.randn(2, 8).bfloat16()).float().sum().backward()
    assert fast.weight.grad.dtype == torch.bfloat16


def test_a_norm_in_float64_between_layers_in_a_rehearsal():
    """Kernels have none: what reads float64 is the reference's, too."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
            self.norm = nn.GroupNorm(2, 8).double()

        def forward(self, x):
            return self.last(F.silu(self.norm(self.first(x).double()).float()))

    with rehearsal(CHIPS["a100"].gpu):  # whose kernels the interpreter can note
        fast = accelerate(Wide())
        with torch.autocast("cpu", torch.bfloat16):
            y = fast(torch.randn(2, 8, 6, 6))
        y.float().sum().backward()
    assert fast.norm.weight.grad.dtype == torch.float64


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.Dropout(0.5, inplace=True), nn.Dropout2d(0.5)]
)
def test_dropout_of_pytorch(layer):
    """Its gradient drops what its result dropped."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), layer)
    fast, x = accelerate(net.train()), torch.ones(64, 3, 4, 4, requires_grad=True)
    y = fast(x)
    (grad,) = torch.autograd.grad(y.sum(), net[0].bias)
    kept = y != 0
    if isinstance(layer, nn.Dropout2d):
        assert torch.equal(kept, kept[:, :, :1, :1].expand_as(kept))
    assert 0.4 < kept.float().mean() < 0.6
    assert torch.allclose(grad, 2.0 * kept.sum((0, 2, 3)))
    assert not torch.equal(fast(x), y)  # drawn anew
    torch.testing.assert_close(fast.eval()(x), net(x))  # dropped nothing


@pytest.mark.parametrize("weights", [True, False])
def test_attention_that_drops(weights):
    """Of one key, whose weight is 0 or 2, and is returned so: under a GPU's autocast, too, as the
    page of a plan has it."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.of = nn.MultiheadAttention(4, 4, dropout=0.5, bias=False, batch_first=True)

        def forward(self, x, key):
            y, kept = self.of(x, key, key, need_weights=weights, average_attn_weights=False)
            return y, kept

    net, x, key = Attends(), torch.randn(3, 5, 4), torch.ones(3, 1, 4, requires_grad=True)
    with torch.no_grad():
        net.of.in_proj_weight[8:], net.of.out_proj.weight[:] = torch.eye(4), torch.eye(4)
    y, kept = accelerate(net.train())(x, key)
    assert set(y.unique().tolist()) == {0.0, 2.0}
    if weights:
        assert torch.equal(kept[..., 0], y.mT)
    (grad,) = torch.autograd.grad(y.sum(), key)
    torch.testing.assert_close(grad[:, 0], y.sum(1))
    torch.testing.assert_close(accelerate(net.eval())(x, key)[0], net(x, key)[0])
    with standing_for(chips.HOPPER), cuda_autocast(torch.bfloat16):
        made = plan(net.train(), (x, key), {}, trains=True)
    assert made.graph.count()["dropout"] == 2  # and its gradient


def test_a_forward_by_vmap():
    """With layers that are one op elsewhere; also under autocast, where a cast was a constant."""

    def each(y):
        return F.linear(F.scaled_dot_product_attention(y, y, y) @ y, y[0])

    torch.manual_seed(0)
    module = Of(lambda y, t: torch.vmap(each)(y)).double()
    x, fast = torch.randn(2, 3, 4, 4).double(), accelerate(copy.deepcopy(module))
    for net in (module, fast):
        net(x, None).square().sum().backward()
    torch.testing.assert_close(fast(x, None), module(x, None))
    for p, q in zip(fast.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    beside = nn.Linear(4, 4).requires_grad_(False)
    module = Of(lambda y, t: torch.vmap(beside)(y))
    with torch.autocast("cpu", torch.bfloat16):
        assert accelerate(module)(x.float(), None).dtype is module(x.float(), None).dtype


def test_refusals_say_why():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.LSTM(36, 4))
    with pytest.raises(PlanError, match="lstm"):
        accelerate(net)(torch.randn(1, 3, 8, 8))
    module, (x, t), _ = network("ours: unet.cu's")
    with pytest.raises(ValueError, match="multiples of 2"):
        accelerate(module)(x[:, :, :7], t)
    fast, x = accelerate(nn.Conv2d(3, 3, 1)), torch.randn(2, 3, 4, 4)
    with pytest.raises(PlanError, match=r"argument 0 is \[0, 3, 4, 4\]: no plan is for empty"):
        fast(x[:0])
    with pytest.raises(PlanError, match=r"argument 0 is torch.sparse_coo: no plan is for sparse"):
        fast(x.to_sparse())
    with pytest.raises(PlanError, match="an argument is of ndarray"):
        accelerate(Of(lambda y, t: y))(x, np.ones(3))
    with pytest.raises(PlanError, match="argument is a list_iterator, of which each call takes"):
        accelerate(Of(lambda y, t: y * next(t)))(x, iter([1.0, 2.0]))
    with pytest.raises(PlanError, match="torch.func cannot transform a plan"):
        torch.func.jvp(fast, (x,), (x,))
    for gradient in (
        lambda y, t: torch.func.grad(lambda x: x.sin().sum())(y),
        lambda y, t: torch.func.jvp(torch.sin, (y,), (y,))[1],
    ):
        with pytest.raises(PlanError, match="a gradient by torch.func, which the forward takes"):
            accelerate(Of(gradient))(x, None)
    for enabled in (True, False):  # dual tensors have tangents under `no_grad`, too
        with torch.set_grad_enabled(enabled), forward_ad.dual_level():
            with pytest.raises(PlanError, match="no forward-mode gradients"):
                fast(forward_ad.make_dual(x, x))
    with pytest.raises(TypeError, match="function is no torch.nn.Module"):
        accelerate(lambda x: x)


def test_backward_again():
    """With retain_graph the same gradients, to the bit; of two losses those of each, as an
    adversarial loss is balanced. Without it PyTorch raises."""
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 3, 3))
    x, weight = torch.randn(2, 3, 9, 8), module[3].weight
    y, z = accelerate(module)(x), module(x)
    for loss in (torch.square, torch.cos):
        grads = [torch.autograd.grad(loss(y).sum(), weight, retain_graph=True) for _ in range(2)]
        assert torch.equal(*map(torch.stack, grads))
        theirs = torch.autograd.grad(loss(z).sum(), weight, retain_graph=True)
        torch.testing.assert_close(grads[0], theirs)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_exported_as_the_module():
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU())
    fast, x, other = accelerate(module), *torch.randn(2, 2, 3, 6, 5)
    made = [torch.export.export(fast, (x,), strict=strict).module() for strict in (False, True)]
    for program in (*made, torch.jit.trace(fast, (x,), check_trace=False)):
        torch.testing.assert_close(program(other), module(other))


def test_changed_parameters_raise():
    net = nn.Conv2d(3, 4, 3)
    y = accelerate(net)(torch.randn(1, 3, 8, 8)).sum()
    with torch.no_grad():
        net.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


class Results(nn.Module):
    """A result that the next layer reads, one in another shape, an argument and a constant."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        return y, self.second(y).flatten(), x, torch.arange(3.0)


def test_results_that_are_written_to():
    """What backward reads may not be, as in the module; the rest is the caller's."""
    torch.manual_seed(0)
    net, x = Results(), torch.randn(2, 3)
    fast, grads = accelerate(net), []
    for called in (net, fast):
        y, z, _, _ = called(x)
        z.mul_(2).clamp_(-1, 1)
        grads.append(torch.autograd.grad(y.sum() + z.square().sum(), list(net.parameters())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    for called in (net, fast):
        y, z, _, _ = called(x)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            fast(x)[3].mul_(2)
            assert torch.equal(fast(x)[3], torch.arange(3.0))


def test_results_do_not_keep_what_backward_reads():
    """Once nobody has them, without a collection of cycles."""
    fast = accelerate(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    gc.disable()
    try:
        kept = weakref.ref(fast(torch.ones(2, 3)))
        assert kept() is None
    finally:
        gc.enable()


def test_a_generator_is_refused():
    class Yields(nn.Conv2d):
        def forward(self, x):
            return (y for y in [self.weight * x])

    with pytest.raises(PlanError, match="the result is a generator"):
        accelerate(Yields(3, 4, 1))(torch.ones(1, 3, 4, 4))


def test_a_gradient_penalty_raises():
    """The penalty would be a constant, and the loss have a gradient without it."""
    fast, x = accelerate(nn.Conv2d(3, 4, 3)), torch.randn(1, 3, 8, 8, requires_grad=True)
    y = fast(x).sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        (y + dx.square().sum()).backward()
    (dw,) = torch.autograd.grad(fast(x).sum(), fast.weight, create_graph=True)
    assert dw.isfinite().all()  # which nobody differentiates


@pytest.mark.parametrize("name", ["jvp", "hvp", "vhp", "hessian"])
def test_second_derivatives_of_pytorch_raise(name):
    """They take zeros for what the first derivative does not say that it depends on."""
    fast, x = accelerate(nn.Conv2d(3, 4, 3)), torch.randn(1, 3, 3, 3)
    function = getattr(torch.autograd.functional, name)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        function(lambda x: fast(x).sin().sum(), x, *([] if name == "hessian" else [x]))


def test_ddp_of_two_processes(tmp_path):
    code, _, err = run("-m", "tests.plan.two_processes", str(tmp_path))
    assert code == 0, err
    grads = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    net = small()
    net(images()).square().mean().backward()
    for name, p in net.named_parameters():
        assert torch.equal(grads[0][name], grads[1][name])
        assert close(grads[0][name], p.grad), name


def test_what_no_used_result_depends_on_has_no_gradient():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            y = self.first(x)
            return y, self.second(y.detach()), self.second(x)

    fast = accelerate(Two())
    fast(torch.ones(2, 3))[0].sum().backward()
    assert fast.first.weight.grad is not None and fast.second.weight.grad is None
