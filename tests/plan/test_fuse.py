"""What is fused computes the same; and a block's launches can be predicted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn

from diffusion import accelerate
from diffusion.models.blocks import AttentionBlock, ResBlock
from diffusion.plan.__main__ import example
from diffusion.plan.build import plan
from diffusion.plan.fuse import rows as fuse_rows
from diffusion.plan.fuse.backward import BACKWARD_ROWS
from diffusion.plan.fuse.elementwise import ONE_PASS
from diffusion.plan.fuse.forward import FORWARD_ROWS
from diffusion.plan.fuse.preparing import PREPARING
from diffusion.plan.fuse.rewrite import Fusing
from diffusion.plan.fuse.rows import leaving_out
from diffusion.plan.graph import Node
from diffusion.plan.launch.table import LAUNCHES, launch_reference
from diffusion.plan.ops import WEIGHT_GRADS
from diffusion.plan.schedule.moves import nodes_of
from diffusion.runtime.backend import TORCH_FP32
from tests.diffusion.diffusers_models import ours
from tests.plan.compare import in_float64
from tests.plan.networks import NAMES, network
from tests.plan.random_networks import networks
from tests.plan.strangers import Embedded, Magnitudes, Mixed, Normed, SumsOfOneVariance
from triton_kernels import fused_ops
from triton_kernels.attention.launch import CROSS_ATTENTION_GRAD
from triton_kernels.reference import fused
from triton_kernels.registry.chips import chip

BUDGET = 1e-9
OPTIONS = {
    "num_groups": 4,
    "norm_eps": 1e-5,
    "dropout": 0.5,
    "dropout_layer": 0,
    "use_scale_shift_norm": False,
    "zero_init": False,
    "backend": TORCH_FP32,
}


def agree(module, args, kwargs=None):
    """The largest difference of a result or a gradient from the module's own, relative."""
    kwargs = kwargs or {}
    args = tuple(a.detach().requires_grad_(a.is_floating_point()) for a in args)
    sources = [*(p for p in module.parameters() if p.requires_grad), *args]
    sources = [s for s in sources if s.requires_grad]
    y, z = (
        getattr(r, "sample", r) for r in (f(*args, **kwargs) for f in (accelerate(module), module))
    )
    dy = torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=z.dtype)
    mine, theirs = (torch.autograd.grad(r, sources, dy, allow_unused=True) for r in (y, z))
    assert [g is None for g in mine] == [g is None for g in theirs]
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if b is not None]
    scale = max(float(b.abs().max()) for _, b in pairs)
    errors = [
        float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * scale) for a, b in pairs
    ]
    return max(float((y - z).abs().max() / z.abs().max()), *errors)


FEW = [n for n in NAMES if any(s in n for s in ("film", "classes", "dropout", "size", "unet.cu"))]


@pytest.fixture
def products_on_small_images(monkeypatch):
    """Of as few and as narrow ones as tests have, which no GPU would gain from."""
    monkeypatch.setattr(Fusing, "serves_upsampled", lambda *_: True)


@pytest.mark.parametrize("name", FEW)
def test_networks(name):
    module, args, kwargs = network(name)
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    assert agree(in_float64(module), args, kwargs) < BUDGET


@pytest.mark.parametrize("name", NAMES)
def test_networks_with_products_on_small_images(name, products_on_small_images):
    module, args, kwargs = network(name)
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    assert agree(in_float64(module), args, kwargs) < BUDGET


@pytest.mark.long
@settings(max_examples=25, deadline=None, derandomize=True)
@given(networks())
def test_random_networks(drawn):
    assert agree(*drawn) < BUDGET


class Decoder(nn.Module):
    """A residual block that reads a concat, as in the decoder."""

    def __init__(self, **options):
        super().__init__()
        self.block = ResBlock(8, 16, 6, **OPTIONS | options)

    def forward(self, x, skip, emb, rng):
        return self.block(torch.cat((x, skip), dim=3), emb, rng)


def block_args():
    torch.manual_seed(0)
    images = torch.randn(2, 4, 4, 3), torch.randn(2, 4, 4, 5)
    return *images, torch.randn(2, 6), torch.tensor([1, 2])


def launches(made, which):
    """Ops of a plan, without those that move nothing, and the inputs of each."""
    nodes = nodes_of(getattr(made.schedule, which))
    return [(n.op, set(n.inputs)) for n in nodes if n.op not in ("reshape", "slice", "sum", "cat")]


def test_launches_of_a_residual_block_drawing():
    made = plan(Decoder().eval(), block_args())
    norm = {"weight", "bias"}
    assert launches(made, "forward") == [
        ("moments", {"x"}),
        ("moments", {"x"}),
        ("norm", {"x0", "x1", "partials0", "partials1"} | norm),
        ("linear", {"x", "weight", "bias"}),
        ("conv_fused", {"x", "weight", "bias", "emb"}),
        ("norm", {"x0", "partials0"} | norm),
        (
            "conv_fused",
            {"x", "weight", "bias", "extra0", "columns0", "extra1", "columns1", "extra_bias"},
        ),
    ]
    assert made.schedule.backward == []


def test_launches_of_a_residual_block_training():
    made = plan(Decoder(), block_args(), trains=True, of_inputs=(0, 1, 2))
    forward = launches(made, "forward")
    assert ("norm", {"x0", "partials0", "weight", "bias", "rng"}) in forward, (
        "drops while it passes"
    )
    backward = launches(made, "backward")
    grad = {"dy", "weight", "x0", "table"}
    assert sorted(op for op, _ in backward) == sorted(
        ["conv_input_grad"] * 2
        + ["norm_backward", "skip_backward", "linear_dx"]
        + ["conv_dw"] * 2  # in two pieces of work
        + ["weight_grads", "linear_dw"]  # of the skip's two halves, and the embedding's
        + ["row_sums", "bias_grads"]  # of the output, whose gradient comes from elsewhere; of all
    )
    assert [i for op, i in backward if op == "conv_input_grad"] == [
        grad | {"rng"},  # of the dropped activation
        grad | {"x1"},
    ]
    (norm,) = (n for n in nodes_of(made.schedule.backward) if n.op == "norm_backward")
    assert "emb" in norm.outputs, "the embedding's gradient comes from the norm's sums"
    # nothing of either pass is a concat, an addition or a pass for a bias
    assert not {"add", "norm_act_grad", "conv_dx"} & {op for op, _ in backward}


class Shifted(nn.Module):
    """Two convolutions, and what is added to all pixels between them: of a token, or an image."""

    def __init__(self, summand):
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norm, self.summand = nn.GroupNorm(2, 8), summand

    def forward(self, x, emb):
        shift = self.summand(emb).view(emb.shape[0], 8, 1, 1)
        return self.second(F.silu(self.norm(self.first(x) + shift)))


@pytest.mark.parametrize(
    ("summand", "emb"), [(nn.Linear(6, 8), (2, 1, 6)), (nn.AdaptiveAvgPool2d(1), (2, 8, 4, 4))]
)
def test_what_is_added_to_all_pixels_is_an_embedding(summand, emb):
    module, args = Shifted(summand), (torch.randn(2, 8, 4, 4), torch.randn(emb))
    made = plan(module, args, trains=True)
    assert "emb" in next(i for op, i in launches(made, "forward") if op == "conv_fused")
    (norm,) = (n for n in nodes_of(made.schedule.backward) if n.op == "norm_backward")
    assert ("emb" in norm.outputs) == any(p.requires_grad for p in summand.parameters())
    assert agree(in_float64(module), tuple(a.double() for a in args)) < BUDGET


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(("dtype", "channels"), [(BF16, 64), (BF16, 72), (BF16, 68), (FP32, 64)])
def test_what_dropout_keeps_is_drawn_once(dtype, channels):
    """In 16 bits, and of whole bytes: who drops forward writes bits, which backward reads."""
    block = ResBlock(8, channels, 6, **OPTIONS | {"backend": replace(TORCH_FP32, dtype=dtype)})
    *images, emb, rng = block_args()
    x = torch.cat(images, 3).to(block.backend.dtype)
    made = plan(block, (x, emb, rng), trains=True, of_inputs=(0, 1))
    writing = [n for n in nodes_of(made.schedule.forward) if "words" in n.outputs]
    reading = [n for n in nodes_of(made.schedule.backward) if "words" in n.inputs]
    if dtype == FP32 or channels % 8:
        assert not writing and not reading
        return
    (norm,), (grad,) = writing, reading
    assert norm.attrs["layer"] == grad.attrs["layer"] and grad.op == "conv_input_grad"
    assert grad.inputs["words"] is norm.outputs["words"]
    assert norm.outputs["words"].shape == (2, 4, 4, -(-channels // 64))


class Drops(nn.Module):
    """As a GPU's autocast has it: what is between the convolutions is in float32."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(8, 8, 3, padding=1, dtype=low) for _ in range(2))
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x):
        a = F.silu(self.norm(self.first(x).float()))
        return self.last(F.dropout(a, 0.5, self.training).to(x.dtype))


def test_what_is_dropped_in_float32_is_dropped_by_the_norm_s_pass():
    """The pass rounds once what is cast behind the dropout, and the gradient has 16 bits."""
    low, exact = Drops(BF16).train(), Drops(FP32).train()
    x = torch.randn(2, 8, 4, 4).to(BF16).requires_grad_()
    made = plan(low, (x,), trains=True, of_inputs=(0,))
    forward, backward = nodes_of(made.schedule.forward), nodes_of(made.schedule.backward)
    (norm,), (grad,) = ([n for n in nodes if "rng" in n.inputs] for nodes in (forward, backward))
    assert (norm.op, norm.out.dtype) == ("norm", BF16)
    assert (grad.op, grad.inputs["dy"].dtype) == ("conv_input_grad", BF16)
    exact.load_state_dict(low.state_dict())
    results = []
    for module, start in ((low, x), (exact, x.detach().float().requires_grad_())):
        torch.manual_seed(1)  # of the draws
        y = accelerate(module)(start)
        (dx,) = torch.autograd.grad(y, start, torch.ones_like(y))
        results.append((y.float(), dx.float()))
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).norm() < 2**-7 * theirs.norm()


def test_launches_of_an_attention_block():
    block = AttentionBlock(
        8, 2, num_groups=4, norm_eps=1e-5, order="qkv_heads", zero_init=False, backend=TORCH_FP32
    )
    made = plan(block, (torch.randn(2, 4, 4, 8),), trains=True, of_inputs=(0,))
    assert [op for op, _ in launches(made, "forward")] == [
        "moments",
        "norm",
        "linear",
        "attention",
        "conv_fused",
    ]
    dx = next(n for n in nodes_of(made.schedule.backward) if n.op == "norm_backward")
    assert "add1" in dx.inputs, "the residual's gradient is added while dx is written"


def test_separate_projections_are_one_product():
    module, args, _ = network("diffusers: as diffusers trains")
    made = plan(module, args)
    attentions = [n for n in made.graph.nodes if n.op == "attention"]
    assert len(attentions) == 4 and all(set(n.inputs) == {"qkv"} for n in attentions)
    assert all(n.attrs["order"] == "qkv_heads" for n in attentions)


class Crossing(nn.Module):
    """Attention to a context as other projects write it."""

    def __init__(self, masked):
        super().__init__()
        torch.manual_seed(0)
        self.masked, self.stem = masked, nn.Conv2d(3, 8, 3, padding=1)
        self.q = nn.Linear(8, 8, bias=False)
        self.k, self.v = (nn.Linear(6, 8, bias=False) for _ in range(2))

    def forward(self, x, context):
        h = self.stem(x).flatten(2).transpose(1, 2)  # [N, T, C]
        parts = (y.unflatten(2, (2, 4)).transpose(1, 2) for y in self._parts(h, context))
        mask = (context[..., 0] > 0)[:, None, None] if self.masked else None
        return F.scaled_dot_product_attention(*parts, attn_mask=mask).transpose(1, 2).flatten(2)

    def _parts(self, h, context):
        return self.q(h), self.k(context), self.v(context)


@pytest.mark.parametrize("masked", [False, True])
def test_projections_of_a_context_are_one_product(masked):
    args = torch.randn(2, 3, 4, 4).double(), torch.randn(2, 5, 6).double()
    module = in_float64(Crossing(masked))
    (attention,) = [n for n in plan(module, args).graph.nodes if n.op == "attention"]
    assert set(attention.inputs) == {"q", "kv"} | ({"mask"} if masked else set())
    assert agree(module, args) < BUDGET


class OfConcat(nn.Module):
    """A convolution of a concatenation."""

    def __init__(self, c):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(n * c, c, 3, padding=1) for n in (1, 1, 2))

    def forward(self, x):
        return self.convs[2](torch.cat([conv(x) for conv in self.convs[:2]], dim=1))


@pytest.mark.parametrize(("size", "products"), [(16, 2), (2, 1)])
def test_gradients_of_halves_where_filters_are_smaller(size, products):
    """Columns of filters are copies, as parts of a gradient are."""
    args = (torch.randn(2, 8, size, size).double(),)
    module = OfConcat(8).double()
    assert agree(module, args) < BUDGET
    assert plan(module, args, trains=True).graph.count()["conv_dx"] == products


@pytest.mark.parametrize("trains", [False, True])
def test_every_row_is_used_by_the_networks(trains, products_on_small_images):
    module = ours({"dropout": 0.3}).model.train(trains)
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([3, 4])
    kwargs = {"rng": torch.tensor([1, 2])} if trains else {}
    theirs, args, _ = network("diffusers: as diffusers trains")
    plans = plan(module, (x, t), kwargs, trains=trains), plan(theirs, args, trains=trains)
    if not trains:  # channels are padded in 16 bits
        low = [x.bfloat16() if x.is_floating_point() else x for x in args]
        plans += (plan(theirs.bfloat16(), tuple(low)),)
    crossing = Crossing(True), (torch.randn(2, 3, 4, 4), torch.randn(2, 5, 6))
    layers = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
    rows = (torch.randn(2, 3, 8),)
    plans += plan(*crossing, trains=trains), plan(layers, rows, trains=trains)
    plans += (plan(Gated(8), rows, trains=trains),)
    plans += (plan(OfConcat(8), (torch.randn(2, 8, 16, 16),), trains=trains),)
    odd = nn.Linear(1030, 1030).bfloat16(), (torch.randn(2, 1030).bfloat16(),)
    plans += (plan(*odd, trains=trains),)
    if trains:  # on a GPU without a kernel for the gradient
        lacking = ",".join(kernel.name for kernel in CROSS_ATTENTION_GRAD.kernels)
        kernels = fused_ops, chip("h100").gpu._replace(off=lacking)
        plans += (plan(*crossing, trains=True, kernels=kernels),)
    given = torch.randn(2, 3, 8, 12), torch.randn(2, 6)
    plans += (plan(Embedded(16, 6), given, trains=trains),)
    plans += (plan(SumsOfOneVariance(8, 6), given, trains=trains),)
    wide = torch.randn(2, 8, 4, 6), torch.randn(2, 6)
    plans += (plan(Mixed(), tuple(x.bfloat16() for x in wide), trains=trains),)
    with torch.autocast("cpu", torch.bfloat16):
        normed = Normed(), (torch.randn(2, 3, 4, 6), torch.tensor([3.0, 400.0]))
        plans += (plan(*normed, trains=trains),)
        plans += (plan(Magnitudes(16), (torch.randn(2, 3, 8, 12),), trains=trains),)
    why = [reason for p in plans for reasons in p.graph.why.values() for reason in reasons]
    mode = "train" if trains else "sample"
    rows = PREPARING + FORWARD_ROWS + (BACKWARD_ROWS if trains else ())
    for row in rows:
        used = any(reason.startswith(row.name) for reason in why)
        if row.name != "gradients of weights in float32":  # there is nothing to cast here
            assert used == (mode in row.when), row.name


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU(), nn.GELU("tanh"), nn.Mish()])
@pytest.mark.parametrize("shape", [(2, 5, 6), (7, 6), (2, 3, 4, 6), (2, 3, 2, 2, 6)])
def test_derivatives_of_activations_are_taken_by_the_input_gradient(activation, shape):
    """Of a linear layer over rows of any kind; not where others read the activation."""
    module = nn.Sequential(nn.Linear(6, 8), activation, nn.Linear(8, 4)).double()
    args = (torch.randn(shape).double(),)
    assert agree(module, args) < BUDGET
    nodes = plan(module, args, trains=True).graph.count()
    assert nodes["conv_input_grad"] == 1 and "act_grad" not in nodes
    both = Both(module).double()
    assert agree(both, args) < BUDGET
    nodes = plan(both, args, trains=True).graph.count()
    assert nodes["elementwise"] == 1 and "conv_input_grad" not in nodes


class Gated(nn.Module):
    """As the blocks of DiT; and what else reads the product, if `again`."""

    def __init__(self, c, again=False):
        super().__init__()
        self.again, self.layer, self.gate = again, nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, x):
        y = self.gate(x[:, :1]) * self.layer(x)
        return x + y + y.sin() if self.again else x + y


@pytest.mark.parametrize("again", [False, True])
def test_a_product_is_added_where_it_is_multiplied(again):
    module, args = Gated(6, again).double(), (torch.randn(2, 3, 6).double(),)
    assert agree(module, args) < BUDGET
    for trains in (False, True):
        forward = nodes_of(plan(module, args, trains=trains).schedule.forward)
        ops = [node.op for node in forward]
        assert ops.count("elementwise") == 1 and "mul" not in ops
        assert ops.count("arith") == again  # sin
    with torch.autocast("cpu", torch.bfloat16):
        assert agree(Gated(6, again), (torch.randn(2, 3, 6),)) < 0.03


class Both(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        y = self.layers[:2](x)
        return self.layers[2](y) + y[..., :4]


@pytest.mark.parametrize("trains", [False, True])
def test_rows_of_an_embedding_are_read_where_they_lie(trains):
    """Scale and shift of FiLM, which are halves of a layer's result, by both passes."""
    block = ResBlock(8, 16, 6, **OPTIONS | {"use_scale_shift_norm": True, "dropout": 0})
    *images, emb, _ = block_args()
    args = torch.cat(images, 3).double(), emb.double()
    assert agree(in_float64(block), args) < BUDGET
    made = plan(block, args, trains=trains)
    nodes = made.graph.count()
    assert nodes["columns"] == 2 and "slice" not in nodes
    makers = made.graph.producers()
    reading = [n for n in made.schedule.nodes if {"scale", "shift"} & set(n.inputs)]
    assert len(reading) == 1 + trains
    assert all(makers[n.inputs["scale"]].op == "columns" for n in reading)


class Modulated(nn.Module):
    """A block of a policy: FiLM behind the activation of the first norm, and what skips the block
    behind that of the second."""

    def __init__(self, c: int = 8, width: int = 3):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(c, c, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(2, c) for _ in range(2))
        self.film = nn.Linear(width, 2 * c)

    def forward(self, x, emb):
        h = F.mish(self.norms[0](self.convs[0](x)))
        scale, shift = self.film(emb)[:, :, None].chunk(2, dim=1)
        h = scale * h + shift
        return F.mish(self.norms[1](self.convs[1](h))) + x


def test_what_comes_behind_the_activation_is_in_the_pass_of_a_norm():
    """Scale, shift and what skips the block; and their gradients in that of its activation."""
    block, args = Modulated().double(), (torch.randn(2, 8, 5).double(), torch.randn(2, 3).double())
    assert agree(block, args) < BUDGET
    made = plan(block, args, trains=True)
    (first, second) = (n for n in made.graph.nodes if n.op == "norm")
    assert {"after_scale", "after_shift"} <= set(first.inputs) and "after_add" not in first.inputs
    assert "after_add" in second.inputs and "after_scale" not in second.inputs
    kinds = made.graph.count()
    assert kinds["norm_act_grad"] == 2 and "conv_input_grad" not in kinds
    assert not {"norm_apply", "mul", "elementwise", "add"} & set(kinds)
    alone = plan(block, args).graph.count()
    assert "norm_apply" in alone, "whose launches other networks join"


def test_a_number_behind_a_sum_is_no_pass():
    """Neither forward, where the sums for the next norm stay in the launch that adds, nor backward,
    but for that of the last sum, whose gradient no norm makes."""
    made = plan(SumsOfOneVariance(8, 6), (torch.randn(2, 3, 8, 12), torch.randn(2, 6)), trains=True)
    counts = made.graph.count()
    assert counts["affine"] == 1 and "moments" not in counts
    scaled = [n.op for n in made.graph.nodes if "factor" in n.attrs and n.op != "upsample"]
    assert sorted(scaled) == ["conv_fused"] * 8 + ["norm_dx"] * 5 + ["skip_dx"] * 2


def test_sums_serve_every_norm_and_are_those_before_upsampling():
    """The decoder's norms read partials that the encoder has made: convolutions, and the pooling in
    front of its second level."""
    module, args, _ = network("ours: unet.cu's")
    made = plan(module, args)
    assert "moments" not in made.graph.count()
    (pool,) = [n for n in made.graph.nodes if n.op == "avg_pool"]
    assert len(made.graph.consumers()[pool.outputs["partials"]]) == 2  # behind it, in the decoder
    tables = [n for n in made.graph.nodes if n.op == "norm" and len(n.many("x")) == 2]
    assert (16, 64) in [n.attrs["pixels"] for n in tables]


def test_gradients_of_weights_in_16_bits_are_not_rounded():
    module, args, _ = network("diffusers: as diffusers trains")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = plan(module, args, trains=True)
    grads = [n for n in nodes_of(made.schedule.backward) if n.op in WEIGHT_GRADS]
    assert grads and all(v.dtype == torch.float32 for n in grads for v in n.outputs.values())
    images = [v for n in grads for v in n.inputs.values() if len(v.shape) == 4]
    assert all(v.dtype == torch.bfloat16 for v in images)


def test_a_result_that_backward_or_the_caller_reads_is_not_hidden():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            y = self.conv(x)
            return y + x, y

    torch.manual_seed(0)
    module, x = Both(), torch.randn(2, 4, 5, 5)
    a, b = accelerate(module)(x)
    assert torch.allclose(a, module(x)[0], atol=1e-6)
    assert torch.allclose(b, module(x)[1], atol=1e-6)


def test_a_convolution_of_stride_2_has_no_epilogue():
    net = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4))
    counts = plan(net, (torch.randn(2, 4, 6, 6),)).graph.count()
    assert counts["conv"] == 1 and counts["moments"] == 1 and "conv_fused" not in counts


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    ("size", "window", "takes"), [((6, 8), 2, True), ((7, 8), 2, False), ((6, 9), 3, False)]
)
def test_means_leave_their_sums_for_a_norm(size, window, takes, trains):
    """Where a kernel takes them: of 2x2 pixels, with no row or column left over."""
    net = nn.Sequential(nn.AvgPool2d(window), nn.GroupNorm(2, 4)).double()
    x = torch.randn(2, 4, *size, dtype=torch.float64)
    assert agree(net, (x,)) < BUDGET
    nodes = plan(net, (x,), trains=trains).graph
    (pool,) = [n for n in nodes.nodes if n.op == "avg_pool"]
    assert ("partials" in pool.outputs) == takes
    assert nodes.count().get("moments", 0) == (not takes)


def test_means_without_a_norm_have_no_sums():
    nodes = plan(nn.AvgPool2d(2), (torch.randn(2, 4, 6, 8),)).graph.nodes
    assert [list(n.outputs) for n in nodes if n.op == "avg_pool"] == [["y"]]


@pytest.mark.parametrize("trains", [False, True])
def test_a_row_that_is_left_out_changes_nothing_else(trains):
    """As `benchmarks.ablate` compares: no value is made by it."""
    module = ours({}).model.train(trains)
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([3, 4])
    kwargs = {"rng": torch.tensor([1, 2])} if trains else {}
    whole = plan(module, (x, t), kwargs, trains=trains)
    names = {reason.split(" (")[0] for reasons in whole.graph.why.values() for reason in reasons}
    for name in sorted(names)[:: 3 if trains else 2]:
        with leaving_out(name):
            part = plan(module, (x, t), kwargs, trains=trains)
        rest = [reason for reasons in part.graph.why.values() for reason in reasons]
        assert not any(reason.startswith(f"{name} (") for reason in rest)
        assert part.graph.count() != whole.graph.count()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        y = self.conv(x).sin() * 0.5 + 1
        return y * 3 - 2 + torch.tanh(y)


@pytest.mark.parametrize("trains", [False, True])
def test_the_row_of_the_page(trains, monkeypatch):
    """docs/plan.md, word for word: of four nodes it makes two, for y is read twice."""
    page = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    section = page.split("## Add a row to the fuse table")[1]
    exec(section.split("```python\n")[1].split("```")[0], given := {})
    row, module, x = given["ONE_AFFINE"], Scaled().double(), torch.randn(2, 3, 4, 4).double()
    with leaving_out(ONE_PASS.name):
        before = plan(module, (x,), trains=trains).graph.count()["affine"]
    at = FORWARD_ROWS.index(ONE_PASS)
    monkeypatch.setattr(fuse_rows, "FORWARD_ROWS", (*FORWARD_ROWS[:at], row, *FORWARD_ROWS[at:]))
    monkeypatch.setitem(fuse_rows.ROWS, row.name, row)
    with leaving_out(ONE_PASS.name):
        made = plan(module, (x,), trains=trains).graph
    assert before - made.count()["affine"] == 2
    assert [row.name in str(reasons) for reasons in made.why.values()].count(True) == 2
    assert agree(module, (x,)) < BUDGET
    with leaving_out(row.name, ONE_PASS.name):
        assert plan(module, (x,), trains=trains).graph.count()["affine"] == before


def test_gradients_of_weights_are_rounded_once():
    """Of filters in 16 bits, and of those that are rows of another shape in the module; but for the
    1x1 filters of the halves of a concat."""
    module, args, kwargs = example("unet_tiny", 2, "16", "bf16")
    made = plan(module.train(), args, kwargs, trains=True)
    readers = made.graph.consumers()
    grads = [v for n in made.graph.nodes if n.op in WEIGHT_GRADS for v in n.outputs.values()]
    whole = [v for v in grads if all(r is None or r.op != "cat" for r in readers.get(v, ()))]
    assert len(whole) > 40 and all(value.dtype == torch.float32 for value in whole)
    assert all(grad.shape == v.shape for v, grad in made.backward.grads.items())


class Projected(nn.Module):
    """Products of one embedding, of which one makes the filters of another, and one is that of a
    result of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, n) for n in (4, 8, 4, 6))
        self.without_bias = nn.Linear(6, 4, bias=False)

    def forward(self, x):
        a, b, c, filters = (layer(x) for layer in self.layers[:4])
        scale, shift = b.chunk(2, dim=1)
        made = F.linear(x, filters[:4], self.layers[0].bias)
        return a * scale + shift + made * self.without_bias(x), c


def test_products_of_an_embedding_are_one():
    module, x = Projected().double(), torch.randn(5, 6, dtype=torch.float64)
    nodes = plan(module, (x,), trains=True).graph.nodes
    assert [n.out.shape[1] for n in nodes if n.op == "linear"].count(4 + 8 + 6) == 1
    many = plan(module, (torch.randn(50, 6, dtype=torch.float64),), trains=True).graph
    assert many.count()["linear"] == 6, "columns of so many rows would be copies"
    fast, of_all = accelerate(module), [*module.parameters()]
    for results in (slice(0, 1), slice(1, 2), slice(0, 2)):
        mine, theirs = (
            torch.autograd.grad(
                sum(y.square().sum() for y in f(x)[results]), of_all, allow_unused=True
            )
            for f in (fast, module)
        )
        assert [g is None for g in mine] == [g is None for g in theirs]
        pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a is not None]
        assert all(torch.allclose(a, b, rtol=BUDGET) for a, b in pairs)


@pytest.mark.parametrize(("side", "padded"), [(3, True), (5, False), (7, False)])
def test_few_channels_are_padded_for_filters_that_tiles_fetch_at_once(side, padded):
    conv = nn.Sequential(
        nn.Conv2d(3, 16, side, padding=side // 2), nn.Conv2d(16, 3, side, padding=side // 2)
    )
    made = plan(conv.bfloat16(), (torch.randn(2, 3, 8, 8).bfloat16(),), trains=True)
    assert ("pad_channels" in made.graph.count()) == padded


class InRows(nn.Module):
    """A convolution of images [N, H, W, C]."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def test_results_of_few_channels_lie_side_by_side():
    """Also where nothing moves them behind the convolution that writes them."""
    made = plan(InRows().bfloat16(), (torch.randn(2, 4, 4, 8).bfloat16(),), trains=True)
    assert made.graph.producers()[made.graph.outputs[0]].op != "columns"


def test_casts_that_norms_make_themselves():
    """As of 16 bits and float32, but of float32 and float64, whose roundings are small."""
    types = torch.float32, torch.float64
    module, x, emb = Mixed(*types), torch.randn(2, 8, 4, 6), torch.randn(2, 6)
    made = plan(module, (x, emb), trains=True)
    nodes, makers = made.graph.nodes, made.graph.producers()
    casts = [n for n in nodes if n.op == "cast" and len(n.out.shape) == 4]
    assert all("upsample" not in {r.op for r in made.graph.consumers()[n.out]} for n in casts)
    second = next(n for n in nodes if n.op == "norm" and len(n.many("x")) == 2)
    assert second.out.dtype == torch.float32 and second.inputs["x0"].dtype == torch.float64
    assert {second.inputs[role].dtype for role in ("scale", "shift")} == {torch.float32}
    grad = next(n for n in nodes if n.op == "norm_act_grad" and len(n.many("x")) == 2)
    assert makers[grad.inputs["da"]].op == "conv_dx" and grad.out.dtype == torch.float32
    dys = torch.randn(2, 8, 16, 24), torch.randn(2, 8, 8, 12, dtype=torch.float64)
    sources = [*module.parameters(), x.requires_grad_(), emb.requires_grad_()]
    mine, theirs = (
        torch.autograd.grad(f(x, emb), sources, dys) for f in (accelerate(module), module)
    )
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


class Beside(nn.Module):
    """What is upsampled beside what is made of that."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 64, 1), nn.Conv2d(128, 3, 3, padding=1)
        self.norm = nn.GroupNorm(4, 128)

    def forward(self, x):
        y = F.interpolate(self.first(x), scale_factor=2.0, mode="nearest")
        return self.last(F.silu(self.norm(torch.cat((y, torch.tanh(y)), dim=1))))


def test_a_norm_upsamples_nothing_that_it_waits_for():
    x = torch.randn(2, 3, 8, 8)
    module, kernels = Beside(), (fused_ops, chip("h100").gpu)
    low = plan(module.bfloat16(), (x.bfloat16(),), trains=True, kernels=kernels)
    assert low.graph.count()["upsample"] == 1
    assert agree(module.double(), (x.double(),)) < BUDGET


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 16, 1)
        self.both = nn.Conv2d(24, 4, 3, padding=1)

    def forward(self, x):
        return self.both(torch.cat((self.first(x), self.second(x).tanh()), dim=1))


def test_halves_of_filters_lie_as_products_read_them(monkeypatch):
    """Gradients of the halves of a concat read those of the filters, which are not reordered."""
    network, x = Halves().to(memory_format=torch.channels_last), torch.randn(2, 3, 8, 8)
    reordered = []
    monkeypatch.setattr(fused, "reorder", lambda x, out: reordered.append(x.shape) or out.copy_(x))
    found = []
    for run in (network, accelerate(network)):
        network.zero_grad()
        run(x).square().sum().backward()
        found.append([parameter.grad for parameter in network.parameters()])
    torch.testing.assert_close(found[1], found[0])
    assert not reordered


def test_rows_of_some_channels_are_copied_in_the_order_of_images():
    images = torch.randn(2, 6, 5, 8)[..., 2:6]  # as parts of channels are read where they lie
    part = Node("slice", {}, {}, {"axis": 1, "start": 1, "stop": 4})
    made = LAUNCHES["slice"](launch_reference, part, {"x": images})
    assert made.is_contiguous() and torch.equal(made, images[:, 1:4])
