"""Without a GPU a module is recorded as on one: under CUDA's autocast, by PyTorch's own lists."""

import re
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from diffusion.plan.build import plan, states_of
from diffusion.plan.calls.planned import evaluate
from diffusion.plan.record.record import record
from diffusion.plan.record.without_gpu import GPU, cuda_autocast
from diffusion.plan.trace import plain_layers, trace
from tests.kernels import chips
from tests.plan.networks import network
from triton_kernels.runtime.device import standing_for

LOW, WIDE = torch.bfloat16, torch.float32
ROW, MATRIX, BATCH, IMAGE, VIDEO = (8,), (8, 8), (4, 8, 8), (2, 4, 8, 8), (2, 4, 3, 8, 8)
ops = torch.ops.aten

# by the op's name in PyTorch's list: a call, and the shapes of its tensors
LOWER = {
    "conv1d": (F.conv1d, BATCH, (3, 8, 2)),
    "conv2d": (F.conv2d, IMAGE, (3, 4, 2, 2), (3,)),
    "conv3d": (F.conv3d, VIDEO, (3, 4, 2, 2, 2)),
    "conv_tbc": (torch.conv_tbc, BATCH, (2, 8, 3), (3,)),
    "conv_transpose1d": (F.conv_transpose1d, BATCH, (8, 3, 2)),
    "conv_transpose2d.input": (F.conv_transpose2d, IMAGE, (4, 3, 2, 2)),
    "conv_transpose3d.input": (F.conv_transpose3d, VIDEO, (4, 3, 2, 2, 2)),
    "convolution": (
        lambda x, w: torch.convolution(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        IMAGE,
        (3, 4, 2, 2),
    ),
    "prelu": (F.prelu, MATRIX, (1,)),
    "addmm": (torch.addmm, MATRIX, MATRIX, MATRIX),
    "addmv": (torch.addmv, ROW, MATRIX, ROW),
    "addr": (torch.addr, MATRIX, ROW, ROW),
    "matmul": (torch.matmul, BATCH, MATRIX),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), BATCH, BATCH),
    "mm": (torch.mm, MATRIX, MATRIX),
    "mv": (torch.mv, MATRIX, ROW),
    "linalg_vecdot": (torch.linalg.vecdot, MATRIX, MATRIX),
    "linear": (F.linear, BATCH, MATRIX, ROW),
    "addbmm": (torch.addbmm, MATRIX, BATCH, BATCH),
    "baddbmm": (torch.baddbmm, BATCH, BATCH, BATCH),
    "bmm": (torch.bmm, BATCH, BATCH),
    "chain_matmul": (lambda *xs: ops.chain_matmul(xs), MATRIX, MATRIX, MATRIX),
    "linalg_multi_dot": (lambda *xs: torch.linalg.multi_dot(xs), MATRIX, MATRIX, MATRIX),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, IMAGE, IMAGE, IMAGE),
}
# what no module calls, or a GPU's own kernels have, or recurrent layers, of which there is no plan
NOT_RECORDED = set(
    "_convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_lstm_cell"
    " _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split()
)


def _of_classes(loss):
    return lambda x: loss(x, torch.zeros(x.shape[0], dtype=torch.long, device=x.device))


FLOAT32 = {
    **{
        name: (getattr(torch, name), MATRIX)
        for name in (
            "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan"
        ).split()
    },
    "pow.Tensor_Scalar": (lambda x: x**2, MATRIX),
    "pow.Tensor_Tensor": (torch.pow, MATRIX, MATRIX),
    "pow.Scalar": (lambda x: 2**x, MATRIX),
    "softplus": (F.softplus, MATRIX),
    "layer_norm": (lambda x, w: F.layer_norm(x, [8], w), MATRIX, ROW),
    "native_layer_norm": (
        lambda x: torch.native_layer_norm(x, [8], None, None, 1e-5)[0],
        MATRIX,
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, [8], w), MATRIX, ROW),
    "group_norm": (lambda x: F.group_norm(x, 2), IMAGE),
    "frobenius_norm.dim": (lambda x: torch.frobenius_norm(x, [1]), MATRIX),
    "nuclear_norm": (torch.nuclear_norm, MATRIX),
    "nuclear_norm.dim": (lambda x: torch.nuclear_norm(x, [0, 1]), MATRIX),
    "cosine_similarity": (F.cosine_similarity, MATRIX, MATRIX),
    "poisson_nll_loss": (F.poisson_nll_loss, MATRIX, MATRIX),
    "cosine_embedding_loss": (F.cosine_embedding_loss, MATRIX, MATRIX, ROW),
    "nll_loss": (_of_classes(F.nll_loss), MATRIX),
    "nll_loss2d": (
        lambda x: F.nll_loss(x, torch.zeros(2, 8, 8, dtype=torch.long, device=x.device)),
        IMAGE,
    ),
    "hinge_embedding_loss": (F.hinge_embedding_loss, MATRIX, MATRIX),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="sum"), MATRIX, MATRIX),
    "l1_loss": (F.l1_loss, MATRIX, MATRIX),
    "smooth_l1_loss": (F.smooth_l1_loss, MATRIX, MATRIX),
    "huber_loss": (F.huber_loss, MATRIX, MATRIX),
    "mse_loss": (F.mse_loss, MATRIX, MATRIX),
    "margin_ranking_loss": (F.margin_ranking_loss, ROW, ROW, ROW),
    "multilabel_margin_loss": (
        lambda x: F.multilabel_margin_loss(x, torch.zeros_like(x, dtype=torch.long)),
        MATRIX,
    ),
    "soft_margin_loss": (F.soft_margin_loss, MATRIX, MATRIX),
    "triplet_margin_loss": (F.triplet_margin_loss, MATRIX, MATRIX, MATRIX),
    "multi_margin_loss": (_of_classes(F.multi_margin_loss), MATRIX),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, MATRIX, MATRIX),
    "dist": (torch.dist, MATRIX, MATRIX),
    "pdist": (F.pdist, MATRIX),
    "cdist": (torch.cdist, MATRIX, MATRIX),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), MATRIX),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), MATRIX),
    "upsample_nearest1d": (lambda x: F.interpolate(x, scale_factor=2), BATCH),
    "_upsample_nearest_exact1d": (lambda x: F.interpolate(x, 16, mode="nearest-exact"), BATCH),
    "upsample_nearest2d": (lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    "_upsample_nearest_exact2d": (lambda x: F.interpolate(x, 16, mode="nearest-exact"), IMAGE),
    "upsample_nearest3d": (lambda x: F.interpolate(x, scale_factor=2), VIDEO),
    "_upsample_nearest_exact3d": (lambda x: F.interpolate(x, 16, mode="nearest-exact"), VIDEO),
    "upsample_linear1d": (lambda x: F.interpolate(x, 16, mode="linear"), BATCH),
    "upsample_bilinear2d": (lambda x: F.interpolate(x, 16, mode="bilinear"), IMAGE),
    "_upsample_bilinear2d_aa": (
        lambda x: F.interpolate(x, 4, mode="bilinear", antialias=True),
        IMAGE,
    ),
    "upsample_trilinear3d": (lambda x: F.interpolate(x, 16, mode="trilinear"), VIDEO),
    "upsample_bicubic2d": (lambda x: F.interpolate(x, 16, mode="bicubic"), IMAGE),
    "_upsample_bicubic2d_aa": (
        lambda x: F.interpolate(x, 4, mode="bicubic", antialias=True),
        IMAGE,
    ),
}
# likewise, with an argument before the dtype
NORMS = {
    "norm.Scalar": (torch.norm, MATRIX),
    "norm.ScalarOpt_dim": (lambda x: ops.norm.ScalarOpt_dim(x, 2, [1]), MATRIX),
}
# likewise, but for a dtype that the call gives
FLOAT32_UNLESS_GIVEN = {
    "prod": (torch.prod, MATRIX),
    "prod.dim_int": (lambda x, **how: torch.prod(x, 1, **how), MATRIX),
    "softmax.int": (lambda x, **how: F.softmax(x, 1, **how), MATRIX),
    "log_softmax.int": (lambda x, **how: F.log_softmax(x, 1, **how), MATRIX),
    "cumprod": (lambda x, **how: torch.cumprod(x, 1, **how), MATRIX),
    "cumsum": (lambda x, **how: torch.cumsum(x, 1, **how), MATRIX),
    "linalg_vector_norm": (torch.linalg.vector_norm, MATRIX),
    "linalg_matrix_norm": (lambda x, **how: torch.linalg.matrix_norm(x, 1, **how), MATRIX),
    "linalg_matrix_norm.str_ord": (torch.linalg.matrix_norm, MATRIX),
    "sum": (torch.sum, MATRIX),
    "sum.dim_IntList": (lambda x, **how: x.sum(1, **how), MATRIX),
}
# in the wider of the tensors' types
WIDEST = {
    "addcdiv": (torch.addcdiv, MATRIX, MATRIX, MATRIX),
    "addcmul": (torch.addcmul, MATRIX, MATRIX, MATRIX),
    "atan2": (torch.atan2, MATRIX, MATRIX),
    "bilinear": (F.bilinear, MATRIX, MATRIX, (3, 8, 8)),
    "cross": (lambda x, y: torch.cross(x, y, dim=1), (8, 3), (8, 3)),
    "dot": (torch.dot, ROW, ROW),
    "vdot": (torch.vdot, ROW, ROW),
    "grid_sampler": (lambda x, at: F.grid_sample(x, at, align_corners=False), IMAGE, (2, 8, 8, 2)),
    "index_put": (
        lambda x, y: x.index_put((torch.zeros(1, dtype=torch.long, device=x.device),), y),
        MATRIX,
        ROW,
    ),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), MATRIX, MATRIX),
    "scatter_add": (
        lambda x, y: x.scatter_add(0, torch.zeros_like(x, dtype=torch.long), y),
        MATRIX,
        MATRIX,
    ),
}
# likewise without autocast
PROMOTED = {
    "cat": (lambda *xs: torch.cat(xs), MATRIX, MATRIX),
    "stack": (lambda *xs: torch.stack(xs), MATRIX, MATRIX),
    "add": (torch.add, MATRIX, MATRIX),
}


def casts(title):
    """Names of what this PyTorch casts so, but for named dimensions: its header has the lists."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    body = re.search(rf"define AT_FORALL_{title}\(_\)(.*?)\n\n", header.read_text(), re.S)[1]
    found = (".".join(re.findall(r"\w+", op)) for op in re.findall(r"_\(([^)]*)\)", body))
    return [name for name in found if "imname" not in name]


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *xs):
        return self.function(*xs)


def recorded(function, *xs, enabled=True):
    with standing_for(chips.HOPPER), cuda_autocast(LOW, enabled=enabled):
        return record(Net(function), xs, {})


def dtype_of(case, *dtypes, **options):
    """Of what a case's call returns, for tensors of these types."""
    function, *shapes = case
    dtypes = dtypes * len(shapes) if len(dtypes) == 1 else dtypes
    xs = [torch.randn(s, dtype=d) for s, d in zip(shapes, dtypes, strict=False)]
    return recorded(lambda *xs: function(*xs, **options), *xs).result.dtype


@pytest.mark.parametrize("name", sorted({*casts("LOWER_PRECISION_FP")} - NOT_RECORDED))
def test_products_are_in_the_lower_type(name):
    assert dtype_of(LOWER[name], WIDE) == LOW


@pytest.mark.parametrize("name", [*casts("FP32"), *NORMS])
def test_what_needs_range_is_in_float32(name):
    assert dtype_of((FLOAT32 | NORMS)[name], LOW) == WIDE


@pytest.mark.parametrize("name", casts("FP32_SET_OPT_DTYPE"))
def test_sums_are_in_float32_unless_a_dtype_is_given(name):
    case = FLOAT32_UNLESS_GIVEN[name]
    assert dtype_of(case, LOW) == WIDE and dtype_of(case, LOW, dtype=LOW) == LOW


@pytest.mark.parametrize("name", [*casts("PROMOTE"), *PROMOTED])
def test_what_reads_two_types_is_in_the_wider(name):
    case = (WIDEST | PROMOTED)[name]
    mixed = [LOW, WIDE, LOW][: len(case) - 1]
    assert dtype_of(case, LOW) == LOW and dtype_of(case, *mixed) == WIDE


def _asks(x):
    return x * 2.0 if torch.is_autocast_enabled("cuda") else x


def _not_within(x):
    with torch.autocast("cuda", enabled=False):
        return x @ x


def _within(x):
    """As a module does whose caller knows of no autocast."""
    with torch.autocast(x.device.type, torch.bfloat16):
        return x @ x


class _Widened(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy @ x.mT + x.mT @ dy


class _AsItIs(_Widened):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x


@pytest.mark.parametrize(
    ("function", "given", "on", "off"),
    [
        (lambda x: x @ x, WIDE, LOW, WIDE),
        (lambda x: (x @ x).softmax(1) @ x, WIDE, LOW, WIDE),
        (lambda x: F.dropout(x @ x) + x, WIDE, WIDE, WIDE),
        (_not_within, WIDE, WIDE, WIDE),
        (_not_within, LOW, LOW, LOW),
        (_within, WIDE, LOW, LOW),
        (lambda x: _Widened.apply(x), LOW, WIDE, LOW),
        (lambda x: _AsItIs.apply(x), WIDE, LOW, WIDE),
    ],
)
def test_what_a_module_does_under_autocast(function, given, on, off):
    x = torch.randn(MATRIX, dtype=given)
    assert recorded(function, x).result.dtype == on
    assert recorded(function, x, enabled=False).result.dtype == off


def test_a_module_may_ask_for_autocast():
    x = torch.randn(MATRIX)
    assert len(recorded(_asks, x).calls) == 1 and not recorded(_asks, x, enabled=False).calls


class _Other(torch.autograd.Function):
    """Whose gradient is not that of its forward, so that it is called as it is."""

    @staticmethod
    def forward(ctx, x):
        return x @ x, (x @ x).softmax(1)

    @staticmethod
    def backward(ctx, dy, dz):
        return dy


def test_a_function_of_the_modules_own_gives_the_host_the_types_of_a_gpu():
    """In a rehearsal, which calls it over the host's tensors."""
    x = torch.randn(MATRIX)
    (call,) = recorded(lambda x: _Other.apply(x), x).calls
    with standing_for(chips.HOPPER):
        made = call.target(x)
    assert [y.dtype for y in made] == [y.dtype for y in call.result] == [LOW, WIDE]


def _mask(x):
    """Of a window: made on the host, one piece after the other, and copied."""
    mask = torch.zeros(3, 4)
    mask[:2] = 2
    mask[2:, 1:] = mask[2:, :1].fill_(2.0)
    return x * mask.to(x.device, x.dtype)


@pytest.mark.parametrize(
    "function",
    [
        _mask,
        lambda x: x * (2 if x.device == GPU and x.is_cuda else 3),
        lambda x: x * (3 if x.is_cpu or x.get_device() else 2),
        lambda x: (x.cuda() + x.to("cuda") + x.to(x.device)) * 2.0 / 3.0,
        lambda x: x * torch.tensor([2.0] * 4, device=x.device),
        lambda x: x * torch.as_tensor(np.full(4, 2.0, np.float32), device="cuda"),
        lambda x: x * torch.asarray([2.0] * 4).to(x.device),
        lambda x: x * x.new_tensor([2.0] * 4),
        lambda x: x * torch.ones(4, device=str(x.device)) + x[..., [0, 1, 2, 3]],
        lambda x: x + x[torch.arange(len(x), device="cuda").flip(0).tolist()].flip(0),
        lambda x: x.mT.contiguous().mT.clone().copy_(x) * 2,
        lambda x: x + torch.zeros_like(x).index_put((x[:, 0].long(),), x),
    ],
)
@pytest.mark.parametrize("low", [False, True])
def test_a_plan_is_made_of_what_the_module_does_on_a_gpu(function, low):
    """By one that computes the same on the host as there, but for where it asks."""
    x = torch.arange(12.0).view(3, 4)
    x[:, 0] = torch.arange(3.0)
    with standing_for(chips.HOPPER), cuda_autocast(LOW, enabled=low):
        made = plan(Net(function), (x,))
    (y,) = evaluate(made, [x], [], None)[0]
    torch.testing.assert_close(y, 2 * x)


def seen(module, run):
    """Types of what each part returns, in a run of the module."""
    found = SimpleQueue()  # in which a recording leaves what a hook puts there
    hooks = [
        part.register_forward_hook(
            lambda _, args, y, name=name: found.put((name, getattr(y, "dtype", None))) or y
        )
        for name, part in module.named_modules()
    ]
    try:
        with standing_for(chips.HOPPER), cuda_autocast(LOW):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return [found.get() for _ in range(found.qsize())]


@pytest.mark.parametrize("name", ["ours: classes", "diffusers: as diffusers trains", "norms"])
def test_every_part_of_a_network_has_the_types_that_pytorch_gives_it(name):
    """PyTorch alone, over tensors that say that they are on a GPU, and nothing recorded."""
    if name == "norms":
        parts = nn.Linear(8, 8), nn.RMSNorm(8), nn.LayerNorm(8), nn.Softmax(1), nn.GELU()
        module, args, kwargs = nn.Sequential(*parts, nn.Linear(8, 8)), (torch.randn(4, 8),), {}
    else:
        module, args, kwargs = network(name)

    def alone():
        with FakeTensorMode(allow_non_fake_inputs=True), plain_layers(module):
            there = partial(torch.empty_like, device=GPU)
            states = {k: there(x) for k, x in states_of(module).items()}
            given = tree_map_only(torch.Tensor, there, (args, kwargs))
            torch.func.functional_call(module, states, *given)

    expected = seen(module, alone)
    assert {WIDE, LOW} <= {dtype for _, dtype in expected}
    assert seen(module, lambda: trace(module, args, kwargs)) == expected
