"""Attention that is written as two products around a softmax is one op, and nothing else is."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from diffusion.plan.build import plan
from diffusion.plan.launch.products import is_of_kernels
from diffusion.plan.trace import trace
from tests.plan.compare import compare
from triton_kernels import fused_ops
from triton_kernels.attention.tiles import MAX_HEAD_DIM
from triton_kernels.registry.chips import chip

ONE, NONE, HEADS = 1, 0, 3


def heads(x):  # [N, T, C] as [N, heads, T, d]
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def packed(x):  # as [N heads, T, d]
    return heads(x).flatten(0, 1)


def scores(q, k, scale=0.3):
    return heads(q) @ heads(k).mT * scale


def _latent_diffusion(q, k, v, b):
    q, k, v = map(packed, (q, k, v))
    p = (torch.einsum("bid,bjd->bij", q, k) * 0.3).softmax(-1)
    return torch.einsum("bij,bjd->bid", p, v).unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)


def _processor(q, k, v, b):
    """As diffusers' AttnProcessor."""
    q, k, v = map(packed, (q, k, v))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    p = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=0.3).softmax(-1)
    return torch.bmm(p.to(v.dtype), v)


def _guided_diffusion(q, k, v, b):
    q, k, v = (x.mT for x in map(packed, (q, k, v)))  # [N heads, d, T]
    scale = 1 / math.sqrt(math.sqrt(q.shape[1]))
    p = torch.softmax(torch.einsum("bct,bcs->bts", q * scale, k * scale), dim=-1)
    return torch.einsum("bts,bcs->bct", p, v)


def _ddpm(q, k, v, b):
    """Its AttnBlock: of one head, and of probabilities the other way round."""
    q, k, v = q, k.mT, v.mT
    p = F.softmax(torch.bmm(q, k) * q.shape[-1] ** -0.5, dim=2).permute(0, 2, 1)
    return torch.bmm(v, p)


def _score_sde(q, k, v, b):
    """Over images."""
    q, k, v = (x.mT[..., :4].unflatten(-1, (2, 2)) for x in (q, k, v))  # [N, C, 2, 2]
    w = torch.einsum("bchw,bcij->bhwij", q, k) * 0.3
    p = F.softmax(w.flatten(3), dim=-1).view(w.shape)
    return torch.einsum("bhwij,bcij->bchw", p, v)


def _sr3(q, k, v, b):
    """Over images, in heads, of which there may be one: then einsum takes columns before rows."""
    q, k, v = (x.mT[:, None, :, :4].unflatten(-1, (2, 2)) for x in (q, k, v))
    w = torch.einsum("bnchw,bncyx->bnhwyx", q, k).contiguous() / math.sqrt(3)
    p = w.flatten(4).softmax(-1).view(w.shape)
    return torch.einsum("bnhwyx,bncyx->bnchw", p, v)


def _less_largest(q, k, v, b, dim=-1):
    """As lucidrains' networks."""
    s = torch.einsum("bhid,bhjd->bhij", heads(q) * 0.3, heads(k))
    s = s - s.amax(dim=dim, keepdim=True).detach()
    return torch.einsum("bhij,bhjd->bhid", s.softmax(-1), heads(v))


def _axial(q, k, v, b):
    """Along the rows of an image, in heads."""
    q, k, v = (heads(x[:, :4]).unflatten(2, (2, 2)) for x in (q, k, v))
    p = (torch.einsum("bhijd,bhikd->bhijk", q, k) * 0.3).softmax(-1)
    return torch.einsum("bhijk,bhikd->bhijd", p, v)


def _two_sums(q, k, v, b):
    p = scores(q, k).softmax(-1)
    return p @ heads(v), p


FORMS = {
    "products": (lambda q, k, v, b: scores(q, k).softmax(-1) @ heads(v), ONE),
    "of one head": (lambda q, k, v, b: (q @ k.mT / 2).softmax(-1) @ v, ONE),
    "keys first": (lambda q, k, v, b: scores(k, q).softmax(-2).mT @ heads(v), ONE),
    "and an offset": (lambda q, k, v, b: (scores(q, k) + 3.0).softmax(-1) @ heads(v), ONE),
    "negative twice": (lambda q, k, v, b: scores(-1 * q, k, -0.3).softmax(-1) @ heads(v), ONE),
    "as latent diffusion": (_latent_diffusion, ONE),
    "as diffusers' processor": (_processor, ONE),
    "as guided diffusion": (_guided_diffusion, ONE),
    "as DDPM": (_ddpm, ONE),
    "as score_sde": (_score_sde, ONE),
    "as SR3": (_sr3, ONE),
    "less the largest score": (_less_largest, ONE),
    "along rows": (_axial, ONE),
    "and its weights": (_two_sums, ONE),
    "less the largest of keys": (lambda *given: _less_largest(*given, dim=-2), NONE),
    "over queries": (lambda q, k, v, b: scores(q, k).softmax(-2) @ heads(v), NONE),
    "turned": (lambda q, k, v, b: scores(q, k[:, :5]).softmax(-1).mT @ heads(v[:, :5]), NONE),
    "with a bias": (lambda q, k, v, b: (scores(q, k) + b).softmax(-1) @ heads(v), NONE),
    "with a learned scale": (lambda q, k, v, b: (scores(q, k) * b[0, 0]).softmax(-1) @ v[0], NONE),
    "a negative scale": (lambda q, k, v, b: scores(q, k, -0.3).softmax(-1) @ heads(v), NONE),
    "a sigmoid": (lambda q, k, v, b: scores(q, k).sigmoid() @ heads(v), NONE),
    "batches in another order": (
        lambda q, k, v, b: scores(q, k).softmax(-1).transpose(0, 1) @ heads(v).transpose(0, 1),
        NONE,
    ),
    "one head of keys": (
        lambda q, k, v, b: (heads(q) @ k[:, None, :, :4].mT).softmax(-1) @ v[:, None, :, :4],
        NONE,
    ),
    "of other widths": (lambda q, k, v, b: (q @ k.mT).softmax(-1) @ v[..., :5], NONE),
}  # fmt: skip


class Attends(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.q, self.kv = function, nn.Linear(12, 12), nn.Linear(12, 24)
        self.bias = nn.Parameter(torch.randn(5, 7))

    def forward(self, x, context):
        return self.function(self.q(x), *self.kv(context).chunk(2, -1), self.bias)


def attends(name):
    torch.manual_seed(0)
    return Attends(FORMS[name][0]), (torch.randn(2, 5, 12), torch.randn(2, 7, 12))


@pytest.mark.parametrize("name", FORMS)
def test_forms_in_float64(name):
    module, args = attends(name)
    compared = compare(module.double(), tuple(x.double() for x in args))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    assert compared.graph.count().get("attention", 0) == FORMS[name][1]


@pytest.mark.parametrize("name", [name for name in FORMS if FORMS[name][1]])
def test_forms_under_no_grad(name):
    """As a network that is conditioned on its own result has them, within a call that trains."""
    module, args = attends(name)
    attention = module.function

    def conditioned(q, k, v, b):
        with torch.no_grad():
            first = pytree.tree_leaves(attention(q, k, v, b))
        return q * first[0].sum()

    module.function = conditioned
    compared = compare(module.double(), tuple(x.double() for x in args))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    assert all(compared.grads[name] == (None, None) for name in ("kv.weight", "kv.bias", "x1"))
    assert compared.graph.count()["attention"] == ONE


def _by_guided_diffusion(rows, first):
    """q, k and v [N heads, d, T], of which either the heads or the parts come first, or these where
    the module has put heads first, as CTM's does."""
    n, c, t = rows.shape
    if first == "parts, with heads":
        rows = rows.unflatten(1, (3, HEADS, -1)).transpose(1, 2).reshape(n, c, t)
    parts = rows.chunk(3, 1) if first == "parts" else rows.view(n * HEADS, -1, t).chunk(3, 1)
    q, k, v = (x.reshape(n * HEADS, -1, t) for x in parts)
    scale = q.shape[1] ** -0.25
    p = torch.einsum("bct,bcs->bts", q * scale, k * scale).softmax(-1)
    return torch.einsum("bts,bcs->bct", p, v).reshape(n, -1, t)


@pytest.mark.parametrize("first", ["heads", "parts", "parts, with heads"])
def test_parts_of_one_product_are_not_copied(first):
    """Also where they are multiplied with numbers on the way."""

    class Attends(nn.Sequential):
        def forward(self, x):
            return self[1](_by_guided_diffusion(self[0](x.flatten(2)), first))

    module = Attends(nn.Conv1d(12, 36, 1), nn.Conv1d(12, 12, 1)).double()
    compared = compare(module, (torch.randn(2, 12, 2, 3).double(),))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    graph = trace(module, (torch.randn(2, 12, 2, 3).double(),)).graph
    (node,) = (node for node in graph.nodes if node.op == "attention")
    assert graph.producers()[node.inputs["qkv"]].op == "linear"
    assert graph.count().get("slice", 0) == 0 and graph.count()["layout"] == 2  # x, the result


@pytest.mark.parametrize("by_hand", [False, True])
def test_over_frames_what_one_product_makes_is_not_copied(by_hand):
    """q, k and v of videos and pixels, which are two axes of the product's result."""

    class Attends(nn.Sequential):
        def forward(self, x):
            parts = (heads(y.flatten(0, 1)) for y in self[0](x).chunk(3, -1))
            q, k, v = (y.unflatten(0, x.shape[:2]) for y in parts) if by_hand else parts
            if not by_hand:
                return self[1](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            p = (q * 0.5 @ k.mT).softmax(-1)
            return self[1]((p @ v).transpose(2, 3).flatten(3))

    module = Attends(nn.Linear(12, 36), nn.Linear(12, 12)).double()
    args = (torch.randn(2, 6, 5, 12).double(),)
    compared = compare(module, args)
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    graph = trace(module, args).graph
    (node,) = (node for node in graph.nodes if node.op == "attention")
    assert node.inputs["qkv"].shape == (12, 5, 36)
    assert not {"slice", "layout", "cat"} & set(graph.count())


@pytest.mark.parametrize("queries", [1, 5])
def test_one_key(queries):
    """Of rows [N, C], which a module has reshaped: as the embedding of an image beside tokens."""
    attends = F.scaled_dot_product_attention
    module = Attends(
        lambda q, k, v, b: attends(*(heads(x.unflatten(0, (2, -1))) for x in (q, k, v)))
    )
    args = torch.randn(2 * queries, 12).double(), torch.randn(2, 12).double()
    compared = compare(module.double(), args)
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    packed = nn.Sequential(nn.Linear(12, 36), nn.Unflatten(1, (1, 3, HEADS, 4)))
    module = Attends(lambda q, k, v, b: attends(*packed(q).permute(2, 0, 3, 1, 4)))
    module.packed = packed
    compared = compare(module.double(), args)
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9


@pytest.mark.parametrize("d", [512, 520])
def test_wide_heads(d):
    """Those that the kernels have no place for are PyTorch's, forward and backward."""

    class Attends(nn.Linear):
        def forward(self, x):
            q, k, v = (y.unsqueeze(1) for y in super().forward(x).chunk(3, -1))
            return F.scaled_dot_product_attention(q, k, v)

    module, args = Attends(4, 3 * d).double(), (torch.randn(2, 5, 4).double(),)
    (node,) = (node for node in trace(module, args).graph.nodes if node.op == "attention")
    assert is_of_kernels(node) == (d == MAX_HEAD_DIM)
    compared = compare(module, args)
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9


@pytest.mark.parametrize("keys", [None, 7])
def test_wide_heads_whose_gradient_a_gpu_has_no_kernel_for(keys):
    """Gradients of 512 channels in 32 bits take 128 KiB of shared memory, and an RTX 4090 has 99.
    The plan knows that, and leaves attention to PyTorch."""

    class Attends(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.qkv, self.kv = nn.Linear(4, 3 * d), nn.Linear(4, 2 * d)

        def forward(self, x, y):
            q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
            if keys is not None:
                k, v = (part.unsqueeze(1) for part in self.kv(y).chunk(2, -1))
            return F.scaled_dot_product_attention(q, k, v)

    def left(d, gpu, dtype=torch.float32):
        module, args = Attends(d).to(dtype), (torch.randn(2, 5, 4), torch.randn(2, keys or 1, 4))
        args = tuple(x.to(dtype) for x in args)
        made = plan(module, args, trains=True, kernels=(fused_ops, chip(gpu).gpu))
        nodes = [node for node in made.graph.nodes if node.op.startswith("attention")]
        assert len(nodes) == 2
        (found,) = {not is_of_kernels(node) for node in nodes}
        return found

    assert left(512, "rtx4090") and left(260, "rtx4090")
    assert not left(256, "rtx4090") and not left(512, "a100") and not left(512, "h100")
    assert not left(512, "rtx4090", torch.bfloat16)


@pytest.mark.parametrize("name", [name for name, (_, count) in FORMS.items() if count])
def test_in_16_bits(name):
    """Also where the softmax is in float32: nothing is lost that the module has."""
    module, args = attends(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert trace(module, args).graph.count()["attention"] == 1
    args = tuple(x.bfloat16() for x in args)
    graph = trace(module.bfloat16(), args).graph
    attention = next(node for node in graph.nodes if node.op == "attention")
    assert {v.dtype for v in (*attention.inputs.values(), attention.out)} == {torch.bfloat16}


def test_scores_of_more_digits_than_the_result_stay():
    module = Attends(
        lambda q, k, v, b: (q.float().tanh() @ k.float().mT).softmax(-1).to(v.dtype) @ v
    )
    args = torch.randn(2, 5, 12).bfloat16(), torch.randn(2, 7, 12).bfloat16()
    assert "attention" not in trace(module.bfloat16(), args).graph.count()


def test_products_of_two_dtypes_are_cast_under_autocast():
    """As probabilities, of a softmax that autocast makes in float32, with values in 16 bits."""
    module = Attends(lambda q, k, v, b: (scores(q, k) + b).softmax(-1, torch.float32) @ heads(v))
    with torch.autocast("cpu", torch.bfloat16):
        graph = trace(module, (torch.randn(2, 5, 12), torch.randn(2, 7, 12))).graph
    products = [node for node in graph.nodes if "matmul" in str(node.attrs.get("target"))]
    assert len(products) == 2
    for node in products:
        assert {v.dtype for v in (*node.inputs.values(), node.out)} == {torch.bfloat16}
