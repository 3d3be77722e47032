"""A plan on the Triton kernels gives what it gives on the reference kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion.models.blocks import AttentionBlock, CrossAttentionBlock, ResBlock
from diffusion.plan.accelerate import Accelerated
from diffusion.plan.calls import planned
from diffusion.plan.calls.calls import Calls
from diffusion.plan.launch import products
from diffusion.plan.launch.table import launch_kernels, launch_reference
from diffusion.runtime.backend import TORCH_FP32
from tests.plan.strangers import Mixed, Normed
from tests.plan.test_fuse import OPTIONS
from tests.products_in_tf32 import ProductsInTF32
from tests.tensor_cores import tensor_cores_cut_off  # noqa: F401  a fixture
from triton_kernels.registry.spec import MOST_CHANNELS

pytestmark = pytest.mark.usefixtures("tensor_cores_cut_off")

GROUPS = OPTIONS | {"num_groups": 2}
FLOAT32_ERROR = 2e-5  # of sums in another order


def check_errors(found, by_pytorch, tf32):
    """`found`: a result and gradients of ours. `by_pytorch()` gives PyTorch's. In TF32 ours may
    differ from PyTorch's in float32 by twice as much as PyTorch's in TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        exact = by_pytorch()
        with ProductsInTF32():
            rounded = by_pytorch()

    def largest(results):
        pairs = zip(results, exact, strict=True)
        return max(((a - b).norm() / b.norm().clamp(min=1)).item() for a, b in pairs)

    assert largest(found) <= max(FLOAT32_ERROR, 2 * largest(rounded) if tf32 else 0)


class Block(nn.Module):
    """What a level of a decoder has: a concat, a 1x1 skip, attention; and channels that no fused
    kernel takes."""

    def __init__(self, channels):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.block = ResBlock(2 * channels, 2 * channels, 8, **GROUPS)
        options = {"num_groups": 4, "norm_eps": 1e-5, "order": "qkv_heads", "zero_init": False}
        self.attention = AttentionBlock(2 * channels, 1, **options, backend=TORCH_FP32)
        self.wide = ResBlock(2 * channels, channels, 8, **GROUPS)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x, emb, rng):
        x = self.stem(x)
        h = torch.cat((x, 2 * x), dim=1).permute(0, 2, 3, 1)
        h = self.attention(self.block(h, emb, rng))
        return self.down(self.wide(h, emb, rng).permute(0, 3, 1, 2))


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("channels", [16, 6])
def test_same_results_and_gradients(channels, tf32, device, monkeypatch):
    """In TF32 by the fused kernels, in float32 by those that multiply in it."""
    monkeypatch.setattr(Calls, "_tf32", lambda self: (tf32, tf32))
    module = Block(channels).to(device)
    x = torch.randn(1, 3, 4, 8, device=device)
    emb, rng = torch.randn(1, 8, device=device), torch.tensor([3, 4], device=device)
    parameters = list(module.parameters())

    def made_by(launch):
        monkeypatch.setattr(planned, "launcher", lambda device: launch)
        y = Accelerated(module)(x, emb, rng)
        return y.detach(), *torch.autograd.grad(y, parameters, torch.ones_like(y) + y.detach())

    check_errors(made_by(launch_kernels), lambda: made_by(launch_reference), tf32)


def test_float32_is_multiplied_as_pytorch_is_told(monkeypatch):
    """A module of PyTorch's: convolutions in TF32 by its default, linear layers in float32. Layers
    of the framework say themselves."""
    module, x = (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)),
        torch.ones(1, 3, 4, 4),
    )
    fast, ops = Accelerated(module), []
    for allowed in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        made, *_ = fast.plan_of((x,), {})
        ops.append([node.op for node in made.graph.nodes if node.op.startswith("conv")][0])
        assert all(node.tf32 == allowed for node in made.graph.nodes if len(node.out.shape) == 4)
    assert ops == ["conv_fused", "conv"]
    assert Accelerated(Block(16))._planned_calls._tf32() == (False, False)


class Rows(nn.Module):
    """Linear layers over the pixels of an image, around a norm, with one beside them."""

    def __init__(self, channels):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.skip = (nn.Linear(channels, channels) for _ in range(3))
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x):
        rows = x.permute(0, 2, 3, 1)
        y = F.silu(self.norm(self.first(rows).permute(0, 3, 1, 2))).permute(0, 2, 3, 1)
        return (self.second(y) + self.skip(rows)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("tf32", [True, False])
def test_linear_layers_of_images_have_the_precision_of_products(tf32, device, monkeypatch):
    """Which PyTorch decides by another flag than that of convolutions."""
    monkeypatch.setattr(Calls, "_tf32", lambda self: (True, tf32))
    monkeypatch.setattr(planned, "launcher", lambda device: launch_kernels)
    module, x = Rows(16).to(device), torch.randn(1, 16, 4, 8, device=device, requires_grad=True)
    given = [x, *module.parameters()]

    def made_by(network):
        y = network(x)
        return y.detach(), *torch.autograd.grad(y, given, torch.ones_like(y) + y.detach())

    check_errors(made_by(Accelerated(module)), lambda: made_by(module), tf32)


def test_of_16_bits_every_product_has_the_kernels_of_16_bits(monkeypatch):
    """PyTorch's flags of TF32 concern float32 alone."""
    monkeypatch.setattr(Calls, "_tf32", lambda self: (True, False))  # as PyTorch begins
    module, x = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)), torch.ones(2, 3, 8)
    for low in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            made, *_ = Accelerated(module).plan_of((x,), {})
        ops = "linear", "weight_grads", "conv_input_grad"
        products = [n for n in made.graph.nodes if n.op.startswith(ops)]
        results = [v for n in products for role, v in n.outputs.items() if role != "partials"]
        assert len(results) == 5 and {node.tf32 for node in products} == {low}


@pytest.mark.parametrize("padding", [(1, 1, 1, 1), (0, 1, 0, 1), (1, 0, 2, 1)], ids=str)
def test_gradients_multiply_nothing_of_the_forward_pass_again(padding, device, monkeypatch):
    layer = nn.Sequential(nn.ZeroPad2d(padding), nn.Conv2d(4, 8, 3, stride=2), nn.Linear(3, 5))
    layer.to(device)
    x = torch.randn(2, 4, 6, 6, device=device, requires_grad=True)
    monkeypatch.setattr(Calls, "_tf32", lambda self: (False, False))
    monkeypatch.setattr(planned, "launcher", lambda device: launch_kernels)
    y = Accelerated(layer)(x)
    expected = layer(x)
    monkeypatch.setattr(products, "_conv2d", None)
    dy, given = torch.randn_like(y), (x, layer[1].weight)
    found = torch.autograd.grad(y, given, dy)
    for a, b in zip(found, torch.autograd.grad(expected, given, dy), strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()


class Crossing(nn.Module):
    """Attention to a context, with keys and values side by side, apart, and with a mask."""

    def __init__(self, channels):
        super().__init__()
        torch.manual_seed(0)
        options = {"num_groups": 4, "norm_eps": 1e-5, "zero_init": False, "backend": TORCH_FP32}
        self.block = CrossAttentionBlock(channels, 6, 2, **options)
        self.k, self.v = nn.Linear(6, channels), nn.Linear(6, channels)
        self.scale = 1.0

    def forward(self, x, context):
        mask = context[..., 0] > 0
        h = self.block(x, context[:, None], mask)

        def heads(y):
            return y.unflatten(2, (2, -1)).transpose(1, 2)

        q, k, v = (heads(y) for y in (h.flatten(1, 2), self.k(context), self.v(context)))
        o = F.scaled_dot_product_attention(q, k, v, scale=self.scale * q.shape[-1] ** -0.5)
        every = torch.ones(1, 1, 1, o.shape[2], dtype=torch.bool, device=o.device)
        return F.scaled_dot_product_attention(o, o, o, every)


@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_attention_to_a_context(scale, device, monkeypatch):
    """By the kernels, or where they lack the scale by PyTorch."""
    monkeypatch.setattr(Calls, "_tf32", lambda self: (False, False))
    module = Crossing(16).to(device)
    module.scale = scale
    x, context = torch.randn(2, 3, 4, 16, device=device), torch.randn(2, 5, 6, device=device)
    parameters, found, expected = list(module.parameters()), [], module(x, context)
    for launch in (launch_kernels, launch_reference):
        monkeypatch.setattr(planned, "launcher", lambda device, launch=launch: launch)
        y = Accelerated(module)(x, context)
        found.append((y.detach(), *torch.autograd.grad(y, parameters, expected.detach())))
    found.append((expected.detach(), *torch.autograd.grad(expected, parameters, expected.detach())))
    for a, b, c in zip(*found, strict=True):
        assert max((a - b).abs().max(), (b - c).abs().max()) <= 2e-5 * c.abs().max().clamp(min=1)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Conv2d(4, 8, 3), (1, 4, 5, 6)),
        (nn.Conv2d(4, 8, (1, 3), padding=(0, 1)), (1, 4, 5, 6)),
        (nn.Conv2d(4, 8, 3, stride=(2, 1), padding=1), (1, 4, 5, 6)),
        (nn.Conv1d(4, 8, 3, stride=2, padding=1), (1, 4, 6)),
        (nn.Conv1d(4, 8, 5), (1, 4, 9)),
        (nn.Conv2d(8, 8, 3, stride=2, padding=1), (2, 8, 6, 10)),
        (nn.Conv2d(4, 8, 4, stride=2, padding=1), (2, 4, 6, 10)),
        (nn.Conv2d(3, 8, 5, stride=3, padding=(1, 2)), (2, 3, 7, 9)),
        (nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(8, 16, 3, stride=2)), (2, 8, 6, 10)),
        (nn.Sequential(nn.ZeroPad2d((2, 1, 0, 3)), nn.Conv2d(4, 8, 2, stride=2)), (2, 4, 5, 7)),
    ],
    ids=[
        *("no zeros around it", "of one row", "of two strides", "of rows, stride 2", "of rows"),
        *("halves", "halves, 4x4", "5x5, a third", "halves, zeros behind it", "zeros on one side"),
    ],
)
def test_convolutions_that_no_fused_kernel_has(layer, shape, device, monkeypatch):
    """Of other sizes than the image's, or strides that differ: by the public op, or PyTorch."""
    layer, x = layer.to(device), torch.randn(shape, device=device, requires_grad=True)
    monkeypatch.setattr(Calls, "_tf32", lambda self: (True, True))
    monkeypatch.setattr(planned, "launcher", lambda device: launch_kernels)
    expected, y = layer(x), Accelerated(layer)(x)
    dy = torch.randn_like(y)
    given = x, *layer.parameters()
    pairs = zip(
        torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy), strict=True
    )
    for a, b in ((y, expected), *pairs):
        assert (a - b).abs().max() <= 2e-3 * b.abs().max()


@pytest.mark.parametrize("tf32", [True, False])
def test_norms_over_channels(tf32, device, monkeypatch):
    """Of a network whose norms are all of these, as it computes itself."""
    torch.manual_seed(0)
    module, t = Normed(4).to(device), torch.tensor([3.0, 400.0], device=device)
    x = torch.randn(2, 3, 4, 6, device=device)
    parameters, dy = list(module.parameters()), torch.randn_like(module(x, t))
    monkeypatch.setattr(Calls, "_tf32", lambda self: (tf32, tf32))
    monkeypatch.setattr(planned, "launcher", lambda device: launch_kernels)

    def made_by(network):
        y = network(x, t)
        return y.detach(), *torch.autograd.grad(y, parameters, dy)

    check_errors(made_by(Accelerated(module)), lambda: made_by(module), tf32)


@pytest.mark.parametrize("channels", [24, MOST_CHANNELS + 1])
def test_layer_norms(channels, device, monkeypatch):
    """By the kernel, or PyTorch where it has no rows so long; over two axes as over one."""
    module = nn.LayerNorm((3, channels // 3)).to(device)
    x = torch.randn(5, *module.normalized_shape, device=device, requires_grad=True)
    nn.init.normal_(module.weight)
    monkeypatch.setattr(planned, "launcher", lambda device: launch_kernels)
    dy, given = torch.randn_like(x), [x, *module.parameters()]
    ours, theirs = (torch.autograd.grad(f(x), given, dy) for f in (Accelerated(module), module))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 40])
def test_images_of_several_types(width):
    """At most twice as wrong as the module of the same types."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    module = Mixed(width=width).to(device)
    exact = Mixed(torch.float64, torch.float64, width).to(device)
    exact.load_state_dict(module.state_dict())
    x, emb = (torch.randn(shape, device=device) for shape in ((4, width, 16, 24), (4, 6)))

    def grads(run, of, low, wide):
        y, z = run(x.to(low), emb.to(low))
        weights = y.detach().cos().to(low), z.detach().cos().to(wide)
        made = torch.autograd.grad((y, z), [*of.parameters()], weights)
        return [t.detach().double() for t in (y, z, *made)]

    types = torch.bfloat16, torch.float32
    want = grads(exact, exact, torch.float64, torch.float64)
    theirs, mine = (grads(run, module, *types) for run in (module, Accelerated(module)))
    errors = [
        [(a - b).norm() / b.norm() for a, b in zip(g, want, strict=True)] for g in (mine, theirs)
    ]
    assert all(a <= 2 * b + 1e-3 for a, b in zip(*errors, strict=True)), errors
