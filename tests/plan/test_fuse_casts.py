"""Casts, parts and additions that need no pass of their own: the same numbers, bit for bit, with
fewer nodes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion import accelerate
from diffusion.plan.build import plan
from diffusion.plan.calls.planned import Planned
from diffusion.plan.fuse.rows import applied, leaving_out
from diffusion.plan.ops import WEIGHT_GRADS
from tests.diffusion.test_fused_unet import OF_CASTS
from tests.plan.strangers import Normed

ARGS = torch.randn(2, 3, 4, 6), torch.tensor([3.0, 400.0])


def made(module, args):
    """A plan under autocast, and what it makes with all gradients."""
    with torch.autocast("cpu", torch.bfloat16):
        planned = plan(module, args, trains=True)
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    parameters = [tensors[name] for name in planned.graph.parameters]
    (y,) = Planned.apply(planned, None, None, None, len(args), *args, *parameters)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    return planned, (y, *torch.autograd.grad(y, parameters, dy, allow_unused=True))


def same(ours, theirs):
    return all((a is b is None) or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "rows", [OF_CASTS, *((name,) for name in OF_CASTS)], ids=lambda rows: rows[-1]
)
def test_a_network_in_two_types(rows):
    """Residuals are float32 there, and convolutions read 16 bits."""
    torch.manual_seed(0)
    module = Normed()
    planned, results = made(module, ARGS)
    with leaving_out(*rows):
        before, expected = made(module, ARGS)
    assert same(results, expected)
    assert len(planned.graph.nodes) < len(before.graph.nodes) or rows[0] in (
        "parts cast where they are read",  # of which it is what the next reads
        "parts read where they lie",  # which are nodes, but no copies
    )


def test_what_they_become():
    torch.manual_seed(0)
    with applied() as rows:
        planned, _ = made(Normed(), ARGS)
    assert rows >= {*OF_CASTS}
    with applied() as rows, leaving_out(*OF_CASTS):
        made(Normed(), ARGS)
    assert rows.isdisjoint(OF_CASTS)
    forward = planned.graph.nodes
    norms = [node for node in forward if node.op == "channel_norm"]
    assert sum("residual" in node.inputs for node in norms) >= 3
    cats = [node for node in forward if node.op == "cat" and len(node.out.shape) == 4]
    assert all(v.dtype == node.out.dtype for node in cats for v in node.many("x"))
    assert any(n.out.dtype == torch.bfloat16 and "residual" in n.inputs for n in norms)
    sums = [n for n in forward if n.op == "elementwise" and len(n.out.shape) == 4]
    assert any(v.dtype != node.out.dtype for node in sums for v in node.inputs.values())


class Others(nn.Module):
    """Where a row does not apply: what is cast is read as it was, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x, t):
        y = self.conv(x)
        both = torch.cat((y.float(), x.float()[:, :1], F.normalize(y.float(), dim=1)[:, :3]), dim=1)
        return self.last(both) + both[:, :2] + (both[:, 2:4] * y[:, :2])


def test_what_others_read_is_left():
    torch.manual_seed(0)
    module = Others()
    _, results = made(module, ARGS)
    with leaving_out(*OF_CASTS):
        assert same(results, made(module, ARGS)[1])


class Turned(nn.Module):
    """Attention over frames as video networks have it: norms in float32 over images, products in 16
    bits over the frames of a pixel; what is cast is turned, and what is turned is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.frames = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.frames(self.norm(x).unflatten(0, (-1, 3)).transpose(1, 2))
        return y.float().transpose(1, 2).flatten(0, 1).exp() * x


def test_copies_are_written_as_they_are_read():
    """And their gradients."""
    torch.manual_seed(0)
    module, args = Turned(), (torch.randn(6, 4, 6),)
    planned, results = made(module, args)
    with leaving_out("copies as they are read"):
        before, expected = made(module, args)
    assert same(results, expected)
    copies = [node for node in planned.graph.nodes if node.op == "layout"]
    assert sum(node.inputs["x"].dtype != node.out.dtype for node in copies) == 2
    now, was = (p.graph.count() for p in (planned, before))
    assert now.get("cast", 0) == was["cast"] - 2 and now["layout"] == was["layout"]


class Half(nn.Module):
    """Of whose channels some are cast, and turned for a convolution in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.each = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, x):
        return self.each(self.conv(x).float().sin()[:, 4:])


def test_parts_are_cast_where_they_lie_and_then_copied():
    torch.manual_seed(0)
    counts = made(Half(), (torch.randn(2, 3, 4, 6),))[0].graph.count()
    assert counts["columns"] == 1 and "slice" not in counts


class Widened(nn.Module):
    """Upsampling in float32, as autocast has it on a GPU, and as networks cast themselves."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 3, padding=1)
        self.reads = reads  # what is upsampled in float32 as well

    def forward(self, x):
        y = F.interpolate(self.first(x).float(), scale_factor=2.0, mode="nearest")
        z = self.last(F.pad(y, (0, 2, 1, 0)).to(x.dtype))
        return z.float() + y.mean() if self.reads else z


@pytest.mark.parametrize("reads", [False, True])
def test_numbers_that_are_only_moved_are_not_cast(reads):
    torch.manual_seed(0)
    module, x = Widened(reads).bfloat16(), torch.randn(2, 3, 4, 6).bfloat16()
    graph = plan(module, (x,), trains=True).graph
    (up,) = (node for node in graph.nodes if node.op == "upsample")
    assert up.out.dtype == torch.bfloat16  # if float32 is read, a cast is behind it
    assert reads == any(n.op == "cast" and len(n.out.shape) == 4 for n in graph.nodes)
    fast, grads = accelerate(module), []
    for net in (module, fast):
        y = net(x)
        grads.append((y, *torch.autograd.grad(y.float().square().sum(), list(net.parameters()))))
    for a, b in zip(*grads, strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() <= 2e-2 * a.abs().max()


class Parts(nn.Module):
    """Queries, keys and values, which are one product, and a 1x1 skip of a concat, which is two."""

    def __init__(self, c=8):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(c, c, bias=False) for _ in range(3))
        self.norm, self.conv = nn.GroupNorm(2, 2 * c), nn.Conv2d(2 * c, c, 3, padding=1)
        self.skip, self.c = nn.Conv2d(2 * c, c, 1, bias=False), c

    def forward(self, x):
        n, c, h, w = x.shape
        rows = x.flatten(2).transpose(1, 2)
        y = F.scaled_dot_product_attention(*(m(rows)[:, None] for m in (self.q, self.k, self.v)))
        x = torch.cat((x, y[:, 0].transpose(1, 2).reshape(n, c, h, w).to(x.dtype)), 1)
        return self.conv(F.silu(self.norm(x))) + self.skip(x)


def test_parts_of_gradients_of_weights_are_float32_from_the_start():
    torch.manual_seed(0)
    module = Parts()
    x = torch.randn(2, 8, 4, 4)
    args = (x.bfloat16(),)
    without, rounded = None, None
    with leaving_out("gradients of weights in float32"):
        without, (_, *rounded) = made(module, args)
    planned, (_, *grads) = made(module, args)
    behind = planned.graph.nodes[planned.backward.start :]
    made_there = [v for n in behind if n.op in WEIGHT_GRADS for v in n.outputs.values()]
    assert len(made_there) == 1 + 1 + 2 and {v.dtype for v in made_there} == {torch.float32}
    assert not any(node.op == "cast" and node.inputs["x"].shape[-1] == 8 for node in behind)
    assert len(planned.graph.nodes) < len(without.graph.nodes)
    for a, b in zip(grads, rounded, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() <= 2**-8 * b.norm()
    assert any(not torch.equal(a, b) for a, b in zip(grads, rounded, strict=True))


class Modulated(nn.Module):
    """Norms with scales and shifts of one embedding, which are widened for them."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(layers))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(layers))
        self.films = nn.ModuleList(nn.Linear(1, 16) for _ in range(layers))
        self.stem = nn.Conv2d(3, 8, 1)

    def forward(self, x, t):
        h, emb = self.stem(x), t[:, None] / 1000
        for norm, conv, film in zip(self.norms, self.convs, self.films, strict=True):
            rows = film(emb)[..., None, None].chunk(2, dim=1)
            scale, shift = (part.float() for part in rows)
            h = h + conv(F.silu(norm(h.float()) * (1 + scale) + shift))
        return h


def test_scales_and_shifts_are_read_as_they_are_and_their_gradients_cast_together():
    torch.manual_seed(0)
    module = Modulated()
    planned, results = made(module, ARGS)
    with leaving_out("gradients of an embedding side by side"):
        before, expected = made(module, ARGS)
    assert same(results, expected)
    film = [n.inputs[r] for n in planned.graph.nodes for r in ("scale", "shift") if r in n.inputs]
    assert len(film) > 6 and {v.dtype for v in film} == {torch.bfloat16}
    backward = planned.graph.nodes[planned.backward.start :]
    (cat,) = (node for node in backward if node.op == "cat")
    assert cat.out.shape == (2, 48) and len(cat.inputs) == 6
    assert {v.dtype for v in cat.values} == {torch.float32}
    assert before.graph.count()["cat"] == planned.graph.count()["cat"] + 3


class Behind(nn.Module):
    """A scale and a shift behind the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.norm, self.films = nn.GroupNorm(2, 8), nn.ModuleList(nn.Linear(1, 16) for _ in "12")

    def forward(self, x, t):
        h = self.first(x)
        for film in self.films:
            scale, shift = film(t[:, None])[..., None, None].chunk(2, dim=1)
            h = self.last(scale * F.mish(self.norm(h)) + shift)
        return h


def test_parts_are_read_where_they_lie_as_rows_of_another_shape():
    torch.manual_seed(0)
    module = Behind()
    planned, results = made(module, ARGS)
    with leaving_out("parts read where they lie"):
        before, expected = made(module, ARGS)
    assert same(results, expected)
    now, was = (p.graph.count() for p in (planned, before))
    assert now["columns"] == was["slice"] - now["slice"] == 6
