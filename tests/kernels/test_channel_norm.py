"""The norm over the channels of each pixel against float64: outputs and every gradient, of odd and
tiny images and of several tiles, on poisoned outputs, at inputs that are hard on float32."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from triton_kernels import channel_norm, fused_ops, reference
from triton_kernels.activations import ACTIVATIONS
from triton_kernels.norm import channel_norm as launchers
from triton_kernels.norm.channel_norm import CHANNEL_NORM, CHANNEL_NORM_GRAD
from triton_kernels.reference import fused
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.spec import MOST_CHANNELS, ChannelNormSpec, dtype_name
from triton_kernels.runtime.device import Device, describe

from .taken import take

# exp of the interpreter's NumPy warns where infinity is the right value
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")

NAMES = ("y", "dx", "d_weight", "d_bias", "d_scale", "d_shift")
HOW = {
    "RMSNorm": {},
    "LayerNorm": {"centred": True},
    "F.normalize": {"eps_in": "max", "eps": 1e-12},
    "eps beside the root": {"eps_in": "sum", "eps": 1e-4},
}
every_norm = pytest.mark.parametrize("how", HOW.values(), ids=HOW)
ROUNDINGS = 2e-6  # a few of 24 bits


@pytest.fixture(params=["one program a multiprocessor", "many"])
def programs(request, monkeypatch):
    """Few programs go through several tiles each."""
    if request.param != "many":
        monkeypatch.setattr(Device, "busy", 3)


def make_case(
    shape, *, affine=True, film=True, mean=0.0, deviation=1.0, dtype=torch.float32, device="cpu"
):
    """x, weight, bias, scale, shift and dy; parameters are float32, scale and shift follow x."""
    draw = torch.Generator().manual_seed(0)
    n, c = shape[0], shape[-1]

    def randn(*size):
        return torch.randn(size, generator=draw)

    params = [randn(c) if affine else None for _ in range(2)]
    params += [randn(n, c).to(dtype) if film else None for _ in range(2)]
    case = (randn(*shape) * deviation + mean).to(dtype), *params, randn(*shape).to(dtype)
    return [None if t is None else t.to(device) for t in case]


def results(function, case, dtype=None, **how):
    """Output and gradients; every tensor first converted to `dtype`, if one is given."""
    *inputs, dy = [None if t is None else t.to(dtype or t.dtype) for t in case]
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    x, weight, bias, scale, shift = leaves
    y = function(x, weight, bias, scale=scale, shift=shift, **how)
    grads = iter(torch.autograd.grad(y, [t for t in leaves if t is not None], dy.to(y.dtype)))
    return [y.detach(), *(None if t is None else next(grads) for t in leaves)]


def relative_error(got, exact, size=None):
    """The norm of the difference over that of `exact`, or over a size that its terms have."""
    size = exact.norm() if size is None else size
    return ((got.double() - exact).norm() / size.clamp_min(1e-30)).item()


def size_of_dx(case, *, eps=1e-5, centred=False, eps_in="root", activation="identity"):
    """Of its first term, which the others may cancel: of one channel they leave next to nothing."""
    x, weight, _, scale, _, dy = (None if t is None else t.double() for t in case)
    x = x - x.mean(-1, keepdim=True) if centred else x
    root = x.square().mean(-1, keepdim=True).sqrt()
    over = {"root": (root**2 + eps).sqrt(), "max": root.clamp_min(eps), "sum": root + eps}[eps_in]
    gain = 1 if weight is None else weight
    return (dy * gain * (1 if scale is None else 1 + scale[:, None, None]) / over).norm()


def check(case, floor=ROUNDINGS, function=channel_norm, **how):
    """Each result has its tensor's dtype and is at most twice as far from float64 as the reference
    at the same precision is; the floor is a few float32 roundings."""
    exact = results(reference.channel_norm, case, torch.float64, **how)
    low = results(reference.channel_norm, case, **how)
    got = results(function, case, **how)
    for name, a, b, c in zip(NAMES, got, low, exact, strict=True):
        if c is None:
            continue
        assert a.dtype == b.dtype, name
        size = size_of_dx(case, **how) if name == "dx" else None
        error, budget = relative_error(a, c, size), 2 * relative_error(b, c, size) + floor
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


# --- against the reference ------------------------------------------------------------------------


@every_norm
@pytest.mark.parametrize(
    "shape",
    [(2, 5, 7, 24), (1, 1, 1, 1), (3, 1, 1, 6), (1, 3, 41, 64), (2, 2, 3, 130), (2, 1, 2, 2049)],
    ids=str,
)
def test_outputs_and_gradients(shape, how, programs, device):
    check(make_case(shape, device=device), activation="silu", **how)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, device):
    check(make_case((2, 3, 5, 20), device=device), activation=activation)


@pytest.mark.parametrize(("affine", "film"), [(True, False), (False, True), (False, False)])
def test_without_parameters(affine, film, programs, device):
    """Without FiLM all pixels are those of one image."""
    check(make_case((3, 4, 5, 12), affine=affine, film=film, device=device), centred=True)


@every_norm
def test_of_16_bits(how, programs, device):
    check(make_case((2, 5, 7, 24), dtype=torch.float16, device=device), activation="silu", **how)


@pytest.mark.parametrize("alone", range(5), ids=NAMES[1:])
def test_one_gradient(alone, device):
    """Of one leaf that asks for one; the others are as they are."""
    *inputs, dy = make_case((2, 3, 5, 12), device=device)
    leaf = inputs[alone].requires_grad_()
    made = []
    for function in (channel_norm, reference.channel_norm):
        y = function(*inputs[:3], scale=inputs[3], shift=inputs[4], activation="gelu")
        made += torch.autograd.grad(y, leaf, dy)
    assert relative_error(made[0], made[1].double()) < ROUNDINGS


def test_rows_of_scale_that_are_strided(device):
    case = make_case((2, 3, 5, 12), device=device)
    film = torch.randn(2, 24, device=device)
    case[3:5] = film.chunk(2, 1)
    check(case, activation="silu")


@pytest.mark.parametrize("shape", [(0, 4, 4, 8), (2, 0, 3, 8)], ids=["no-samples", "no-pixels"])
def test_of_nothing(shape, device):
    y, dx, *grads = results(channel_norm, make_case(shape, device=device))
    assert y.shape == dx.shape == shape
    assert not any(grad.any() for grad in grads)


def test_pixels_of_zeros(device):
    """Their length is 0, at which PyTorch's has the gradient 0."""
    x = torch.zeros(1, 2, 3, 8, device=device)
    x[0, 0] = 1
    for eps_in in ("root", "max", "sum"):
        case = [x, *(None,) * 4, torch.ones_like(x)]
        check(case, eps_in=eps_in, eps=1e-3)


# --- what hard inputs make of it ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "deviation"), [(1e3, 1), (-1e5, 1), (1, 1e-4), (0, 1e-4), (1e-20, 1e-20)], ids=str
)
@every_norm
@pytest.mark.parametrize("shape", [(2, 5, 3, 32), (1, 1, 1, 64), (2, 3, 3, 1)], ids=str)
def test_hard_inputs(shape, how, mean, deviation, device):
    """Both against float64. What a float32 mean is off, and what is left of a number less it, count
    by how much larger they are than what is divided by."""
    eps = how.get("eps", 1e-5)
    centred = how.get("centred", False)
    floor = 4 * 2**-24 * abs(mean) / (deviation**2 + eps) ** 0.5 if centred else ROUNDINGS
    case = make_case(shape, mean=mean, deviation=deviation, device=device)
    exact = results(reference.channel_norm, case, torch.float64, **how)
    sizes = sizes_of(case, how)
    for function in (reference.channel_norm, channel_norm):
        got = results(function, case, **how)
        for name, a, c in zip(NAMES, got, exact, strict=True):
            error = (a.double() - c).norm() / sizes[name].clamp_min(1e-30)
            assert error < 2 * ROUNDINGS + floor, (name, function)


def sizes_of(case, how):
    """Of the terms that each result is a sum of."""
    x, weight, bias, scale, shift, dy = (t.double() for t in case)
    y = reference.channel_norm(x, weight, bias, scale=scale, shift=shift, **how)
    dz = (dy * (1 + scale)[:, None, None]).abs().sum((0, 1, 2)).norm()
    return {
        "y": y.norm(),
        "dx": size_of_dx(case, **how),
        "d_weight": dz,
        "d_bias": dz,
        "d_scale": (dy.abs() * (weight.abs() + bias.abs())).sum((1, 2)).norm(),
        "d_shift": dy.abs().sum((1, 2)).norm(),
    }


# --- as PyTorch has them --------------------------------------------------------------------------


@pytest.mark.parametrize("function", [channel_norm, reference.channel_norm])
def test_pytorch_has_the_same(function, device):
    x = torch.randn(2, 3, 5, 24, device=device)
    weight, bias = torch.randn(2, 24, device=device)
    for ours, theirs in (
        (function(x, weight, bias, centred=True), F.layer_norm(x, (24,), weight, bias)),
        (function(x, weight, eps=1e-3), F.rms_norm(x, (24,), weight, 1e-3)),
        (function(x, eps=1e-12 * 24**-0.5, eps_in="max"), F.normalize(x, dim=-1) * 24**0.5),
    ):
        assert relative_error(ours, theirs.double()) < ROUNDINGS


def test_errors(device):
    x = torch.randn(2, 3, 3, 8, device=device)
    with pytest.raises(ValueError, match="eps_in is 'root of it'; expected one of root, max, sum"):
        channel_norm(x, eps_in="root of it")
    with pytest.raises(ValueError, match=r"weight has shape \(7,\); expected \(8,\)"):
        channel_norm(x, x.new_ones(7))
    with pytest.raises(ValueError, match="has 8193 channels; expected at most 8192"):
        channel_norm(x.new_ones(1, 1, 1, MOST_CHANNELS + 1))


# --- as a plan launches it ------------------------------------------------------------------------

FACTORED = {"eps": 1e-3, "factor": 0.3, "activation": "silu"}


def test_launched_by_a_plan(programs, device):
    """Another dtype of the result, a factor, what is added to it and to dx, and rows of dx."""
    x, *params, dy = make_case((2, 3, 5, 24), dtype=torch.float16, device=device)
    add, dy = torch.randn_like(x), dy.float()
    wide = [t.double() for t in (x, *params)]
    options = FACTORED | {"add": add.double(), "rows": True}
    options32 = {"residual": dy, "dtype": torch.float32}
    y = fused_ops.channel_norm_forward(x, params, **options32, **FACTORED)
    exact = fused.channel_norm_forward(wide[0], wide[1:], residual=dy.double(), **FACTORED)
    assert y.dtype == torch.float32 and relative_error(y, exact) < ROUNDINGS
    exact = fused.channel_norm_backward(dy.double(), wide[0], wide[1:], **options)
    got = fused_ops.channel_norm_backward(dy, x, params, **options | {"add": add})
    for a, b in zip(got[:5], exact[:5], strict=True):
        assert relative_error(a, b) < (1e-3 if a.dtype == torch.float16 else ROUNDINGS)
    assert relative_error(got.rows.sum(0), exact[5].sum(0)) < ROUNDINGS


@pytest.mark.parametrize("bias", [True, False])
def test_sums_whose_sums_are_the_parameters_gradients(bias, programs, device):
    """Of bias and weight, also where there is no bias."""
    x, *params, dy = make_case((2, 3, 5, 24), film=False, device=device)
    params[1] = params[1] if bias else None
    wide = [None if t is None else t.double() for t in params]
    alone = (True, False, False, False, False)
    got = fused_ops.channel_norm_backward(dy, x, params, alone, sums=True, **FACTORED)
    exact = fused.channel_norm_backward(dy.double(), x.double(), wide, alone, sums=True, **FACTORED)
    _, weight, *_ = fused.channel_norm_backward(dy.double(), x.double(), wide, **FACTORED)
    assert got.weight is None and torch.equal(exact[6][0, 24:], weight)
    assert relative_error(got.sums.sum(0), exact[6].sum(0)) < ROUNDINGS
    assert relative_error(got.dx, exact[0]) < ROUNDINGS


@pytest.mark.parametrize("kernels", [fused_ops, fused])
def test_without_what_nobody_wants(kernels, device):
    x, weight, bias, scale, shift, dy = make_case((2, 3, 5, 24), device=device)
    params, needed = (weight, None, scale, None), (False, True, True, False, True)
    dx, *grads, rows, sums = kernels.channel_norm_backward(dy, x, params, needed, eps=1e-5)
    assert dx is None and rows is None and sums is None
    assert [g is not None for g in grads] == [True, False, False, False]


def test_float32_is_rounded_to_tf32(device):
    x, *_, dy = make_case((1, 3, 5, 24), device=device)
    y = fused_ops.channel_norm_forward(x, eps=1e-5, tf32=True)
    dx = fused_ops.channel_norm_backward(dy, x, eps=1e-5, tf32=True).dx
    for t in (y, dx):
        assert not (t.view(torch.int32) & 0x1FFF).any()
    assert relative_error(y, fused.channel_norm_forward(x.double(), eps=1e-5)) < 2**-11


def test_what_the_registry_says_of_it():
    """One kernel, whose predicted time follows from what it moves; none has rows too long."""
    gpu = CHIPS["h100"].gpu
    for op, grad in ((CHANNEL_NORM, False), (CHANNEL_NORM_GRAD, True)):
        (kernel,) = op.kernels
        specs = [ChannelNormSpec(1, "bf16", 64**2, c, grad=grad) for c in (64, 128)]
        times = [kernel.predict(s, gpu, kernel.configs(s, gpu)[0]) for s in specs]
        assert times[0] < times[1]
        spec = ChannelNormSpec(1, "bf16", 4, MOST_CHANNELS + 1, grad=grad)
        assert "at most 8192" in op.refuse(spec, gpu)


@pytest.mark.parametrize(
    ("channels", "columns", "in_a_warp"),
    [(1, 1, True), (64, 64, True), (72, 80, True), (320, 320, True), (640, 640, True)]
    + [(768, 768, False), (1280, 1280, False), (2049, 2560, False), (MOST_CHANNELS, 8192, False)],
)
def test_rows_are_in_blocks(channels, columns, in_a_warp):
    """Few columns are not there, and a lane has no more numbers than it has registers for."""
    spec = ChannelNormSpec(1, "bf16", 64**2, channels, grad=True)
    first, *rest = CHANNEL_NORM_GRAD.kernels[0].configs(spec, CHIPS["h100"].gpu)
    blocks = -(-channels // first.block_c)
    assert blocks * first.block_c == columns and (first.block_c <= 128) == in_a_warp
    for block_c, block_p, num_warps in (first, *rest):
        assert block_p * block_c * -(-channels // block_c) // (32 * num_warps) <= 20


@pytest.mark.parametrize(
    ("tile", "across"),
    [((128, 4, 4), False), ((256, 2, 4), True), ((256, 4, 4), False), ((256, 4, 8), True)]
    + [((512, 1, 4), True), ((512, 4, 4), True), ((64, 32, 4), False), ((16, 32, 4), False)],
)
def test_rows_across_warps(tile, across):
    """Tiles whose code for sm_90 has barriers within its loop, and those that have none."""
    assert launchers.WholeRows(*tile).across == across


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [1, 48, 64, 320, 512, 1280, 4096, MOST_CHANNELS])
@every_norm
def test_on_a_gpu(channels, how, dtype, monkeypatch):
    """Every configuration, three times each. For results in bfloat16 silu' is of tanh.approx, wrong
    by up to 2^-12 of dy in each pixel (`test_activations`): independent errors beside a sum that
    grows with the pixels."""
    floor = ROUNDINGS + (2**-12 / (4 * 9 * 33) ** 0.5 if dtype == torch.bfloat16 else 0)
    case = make_case((4, 9, 33, channels), dtype=dtype, device="cuda", mean=1.0)
    gpu = describe(torch.device("cuda"))
    for op, grad in ((CHANNEL_NORM, False), (CHANNEL_NORM_GRAD, True)):
        spec = ChannelNormSpec(4, dtype_name(dtype), 297, channels, grad=grad)
        for config in op.kernels[0].configs(spec, gpu):
            take(monkeypatch, **{op.name: config})
            for _ in range(3):
                check(case, floor, activation="silu", **how)


def test_module_of_pytorch(device):
    """nn.RMSNorm's gradients by those of the kernel."""
    norm = nn.RMSNorm(24, eps=1e-5).to(device)
    x, dy = torch.randn(2, 2, 3, 5, 24, device=device)
    x.requires_grad_()
    theirs, ours = (
        torch.autograd.grad(y, [x, norm.weight], dy)
        for y in (norm(x), channel_norm(x, norm.weight))
    )
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b.double()) < ROUNDINGS
