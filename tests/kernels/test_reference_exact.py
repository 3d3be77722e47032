"""The reference ops, which are the specification, against float64 at inputs that are hard on
float32: large means, tiny deviations, one pixel, one channel a group, one sample, none."""

import math

import pytest
import torch

from triton_kernels import GroupNorm, reference
from triton_kernels.runtime import layout

NAMES = ("y", "dx", "d_weight", "d_bias", "d_scale", "d_shift")

# a few roundings to 24 bits, in norms over everything
ROUNDINGS = 2e-6


def relative_error(got, exact, size=None):
    """The norm of the difference over that of `exact`, or over a size that its terms have."""
    size = exact.norm() if size is None else size
    return ((got.double() - exact).norm() / size.clamp_min(1e-30)).item()


# --- group_norm -----------------------------------------------------------------------------------


def two_pass_norm(x, groups, weight, bias, *, eps=1e-5, act="identity", scale, shift, fixed=False):
    """The definition, mean first: [N, H, W, C]. If statistics are `fixed` no gradient is theirs."""
    n, h, w, c = x.shape
    grouped = x.view(n, h * w, groups, c // groups)
    mean = grouped.mean((1, 3), keepdim=True)
    variance = (grouped - mean).square().mean((1, 3), keepdim=True)
    if fixed:
        mean, variance = mean.detach(), variance.detach()
    z = ((grouped - mean) / (variance + eps).sqrt()).view(x.shape) * weight + bias
    return reference.ACTIVATION_FUNCTIONS[act](z * (1 + scale) + shift)


def exact_norm(case, groups, **options):
    """Output and gradients in float64, and the sizes of the terms that each of them is a sum of."""
    x, weight, bias, scale, shift, dy = (t.double() for t in case)
    params = weight, bias, scale[:, None, None], shift[:, None, None]
    # a leaf of its own a pixel, so that gradients come as terms
    leaves = [t.expand(x.shape).clone().requires_grad_() for t in (x, *params)]
    film = {"scale": leaves[3], "shift": leaves[4]}
    y, still = (
        two_pass_norm(leaves[0], groups, *leaves[1:3], **film, fixed=fixed, **options)
        for fixed in (False, True)
    )
    terms = torch.autograd.grad(still, leaves, dy)
    (dx,) = torch.autograd.grad(y, leaves[0], dy)
    shapes = [t.shape for t in (x, *params)]
    sums = [t.sum_to_size(s) for t, s in zip(terms, shapes, strict=True)]
    sizes = [t.abs().sum_to_size(s).norm() for t, s in zip(terms, shapes, strict=True)]
    exact = [y.detach(), dx, *(s.view(t.shape) for s, t in zip(sums[1:], case[1:5], strict=True))]
    return list(zip(exact, [y.detach().norm(), *sizes], strict=True))


def norm_results(function, case, groups, activation="identity", eps=1e-5):
    """Output and gradients of `function`."""
    leaves = [t.detach().requires_grad_() for t in case[:5]]
    x, weight, bias, scale, shift = leaves
    options = {"scale": scale, "shift": shift, "activation": activation, "eps": eps}
    y = function(x, groups, weight, bias, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, case[5].to(y.dtype))]


def norm_case(shape, mean=0.0, deviation=1.0, seed=0):
    """x, weight, bias, scale, shift and dy."""
    draw = torch.Generator().manual_seed(seed)
    n, _, _, c = shape
    x = torch.randn(shape, generator=draw) * deviation + mean
    shapes = (c,), (c,), (n, c), (n, c), shape
    return x, *(torch.randn(s, generator=draw) for s in shapes)


def check_norm(case, groups, act="identity", eps=1e-5, function=reference.group_norm, floors=None):
    """Each result is right but for a few roundings, and for a floor of its own by name."""
    exact = exact_norm(case, groups, act=act, eps=eps)
    got = norm_results(function, case, groups, act, eps)
    for name, a, (c, size) in zip(NAMES, got, exact, strict=True):
        assert relative_error(a, c, size) < ROUNDINGS + (floors or {}).get(name, 0), name


@pytest.mark.parametrize(
    ("mean", "deviation"),
    [(0, 1), (1e3, 1), (-1e5, 1), (1, 1e-4), (0, 1e-4), (1e-20, 1e-20)],
    ids=str,
)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        pytest.param((2, 16, 17, 64), 32, id="two-channels-a-group"),
        pytest.param((2, 16, 16, 24), 3, id="eight-channels-a-group"),
        pytest.param((3, 5, 7, 6), 6, id="one-channel-a-group"),
        pytest.param((2, 5, 3, 7), 1, id="one-group"),
        pytest.param((1, 1, 1, 64), 8, id="one-pixel-of-one-sample"),
        pytest.param((4, 1, 1, 64), 2, id="one-pixel"),
        pytest.param((1, 31, 1, 10), 5, id="one-column"),
    ],
)
def test_norm(shape, groups, mean, deviation):
    check_norm(norm_case(shape, mean, deviation), groups, "silu")


def test_norm_of_groups_of_their_own_mean_and_of_two_tensors():
    """Means of 1e3 and -1e3, and groups across the border that have both."""
    x, *rest = norm_case((2, 9, 7, 24))
    x += torch.tensor([1e3, -1e3]).repeat_interleave(12)

    def of_two(x, *args, **options):
        halves = x[..., :16].contiguous(), x[..., 16:].contiguous()
        return reference.group_norm(halves[0], *args, x2=halves[1], **options)

    for groups in (2, 3):
        for function in (reference.group_norm, of_two):
            check_norm((x, *rest), groups, "mish", function=function)


@pytest.mark.parametrize("trained", ["x", "weight"])
def test_norm_of_a_large_mean_with_one_leaf(trained):
    """If x is frozen PyTorch's backward is gone round."""
    case = norm_case((2, 9, 7, 24), 1e3)
    x, weight, bias, scale, shift, dy = case
    leaf = {"x": x, "weight": weight}[trained].requires_grad_()
    y = reference.group_norm(x, 4, weight, bias, scale=scale, shift=shift)
    got = y.detach(), torch.autograd.grad(y, leaf, dy)[0]
    results = exact_norm([t.detach() for t in case], 4)
    for a, (c, size) in zip(got, (results[0], results[1 if trained == "x" else 2]), strict=True):
        assert relative_error(a, c, size) < ROUNDINGS


def test_norm_of_groups_of_a_single_number():
    """Variance 0: what is left is the bias, and gradients of x and weight are 0."""
    x, weight, bias, *_ = norm_case((1, 1, 1, 64), 1e3)
    leaves = [t.requires_grad_() for t in (x, weight)]
    y = reference.group_norm(x, 64, weight, bias)
    assert torch.equal(y.flatten(), bias)
    dx, d_weight = torch.autograd.grad(y.sum(), leaves)
    assert dx.abs().max() < 1e-4 and not d_weight.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norm_of_a_low_precision(dtype):
    """x and dy are rounded on the way in, which is no error of the op, and y and dx on the way out,
    by half a unit in the last place."""
    x, *params, dy = norm_case((2, 9, 7, 24), 100)
    case = (x.to(dtype), *params, dy.to(dtype))
    half_unit = torch.finfo(dtype).eps / 2
    got = norm_results(reference.group_norm, case, 4, "silu")
    assert got[0].dtype == got[1].dtype == dtype
    for name, a, (c, size) in zip(NAMES, got, exact_norm(case, 4, act="silu"), strict=True):
        rounding = half_unit if a.dtype == dtype else 0
        assert relative_error(a, c, size) < ROUNDINGS + rounding, name


@pytest.mark.parametrize("shape", [(0, 4, 4, 8), (2, 0, 3, 8)], ids=["no-samples", "no-pixels"])
def test_norm_of_nothing(shape):
    y, dx, *grads = norm_results(reference.group_norm, norm_case(shape), 2)
    assert y.shape == dx.shape == shape
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("pixels", [(9, 7), (1, 1)], ids=str)
def test_module_on_a_cpu_of_a_large_mean(memory, pixels, monkeypatch):
    """Where there are no kernels the module is the reference, for tensors of either layout."""
    monkeypatch.setattr(layout, "_INTERPRETED", False)
    x, weight, bias, scale, shift, dy = norm_case((2, *pixels, 24), 1e3)
    case = x, weight, bias, torch.zeros_like(scale), torch.zeros_like(shift), dy
    norm = GroupNorm(4, 24)
    norm.load_state_dict({"weight": weight, "bias": bias})
    leaf = x.permute(0, 3, 1, 2).contiguous(memory_format=memory).requires_grad_()
    y = norm(leaf)
    grads = torch.autograd.grad(y, (leaf, norm.weight, norm.bias), dy.permute(0, 3, 1, 2))
    for a, (c, size) in zip((y.detach(), *grads), exact_norm(case, 4), strict=False):
        a = a.permute(0, 2, 3, 1) if a.ndim == 4 else a
        assert relative_error(a, c, size) < ROUNDINGS


# --- layers without statistics --------------------------------------------------------------------


def results(function, tensors, dtype=None):
    """Output and gradients under a random dy, which is the same in every precision."""
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(tensors[0].dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def check_layer(function, tensors, floor=ROUNDINGS):
    """Each result is its exact value, rounded to the dtype of its tensor, but for `floor`."""
    got = results(function, tensors)
    rounding = 0 if got[0].dtype == torch.float32 else torch.finfo(got[0].dtype).eps / 2
    for i, (a, c) in enumerate(zip(got, results(function, tensors, torch.float64), strict=True)):
        assert a.shape == c.shape and a.dtype == tensors[0].dtype
        assert relative_error(a, c) < floor + rounding, i


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize(("mean", "deviation"), [(0, 1), (300, 1), (1, 1e-3)], ids=str)
@pytest.mark.parametrize(
    ("shape", "co", "size", "stride"),
    [
        pytest.param((2, 9, 7, 24), 16, 3, 1, id="3x3"),
        pytest.param((2, 8, 8, 16), 8, 3, 2, id="stride-2"),
        pytest.param((3, 1, 1, 64), 32, 1, 1, id="one-pixel"),
        pytest.param((1, 1, 1, 1), 1, 1, 1, id="one-number"),
        pytest.param((0, 4, 4, 8), 4, 3, 1, id="no-samples"),
        pytest.param((16, 32, 32, 8), 8, 3, 1, id="many-pixels"),
    ],
)
def test_conv2d(shape, co, size, stride, mean, deviation, dtype):
    """A sum of 16,384 products is rounded as often, hence 4e-6."""
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=draw) * deviation + mean).to(dtype)
    weight = torch.randn(co, size, size, shape[3], generator=draw) / 10
    bias = torch.randn(co, generator=draw).to(dtype)
    check_layer(
        lambda x, w, b: reference.conv2d(x, w, b, stride=stride),
        (x, weight.permute(0, 3, 1, 2).to(dtype), bias),
        floor=4e-6,
    )


@DTYPES
@pytest.mark.parametrize("order", ["qkv_heads", "heads_qkv"])
@pytest.mark.parametrize(
    ("n", "positions", "heads", "width"),
    [
        pytest.param(2, 64, 4, 32, id="64-positions"),
        pytest.param(1, 300, 1, 8, id="one-sample"),
        pytest.param(3, 1, 2, 16, id="one-position"),
        pytest.param(2, 5, 8, 1, id="one-channel-a-head"),
        pytest.param(0, 16, 2, 8, id="no-samples"),
    ],
)
def test_attention(n, positions, heads, width, order, dtype):
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(n, positions, 3 * heads * width, generator=draw).to(dtype)
    check_layer(lambda qkv: reference.attention(qkv, heads, order=order), (qkv,))


MASKS = {
    "all keys": lambda n, keys: None,
    "a length each": lambda n, keys: torch.arange(keys) < torch.tensor([[2], [keys], [1]]),
    "holes": lambda n, keys: torch.arange(n * keys).view(n, keys) % 3 != 0,
    "a sample has none": lambda n, keys: (torch.arange(n) != 1)[:, None].expand(n, keys),
}


def plain_attention(q, kv, heads, mask):
    """The definition, of one head after the other."""
    c, parts = q.shape[2], []
    d = c // heads
    for head in range(heads):
        part = slice(head * d, (head + 1) * d)
        k, v = kv[..., :c][..., part], kv[..., c:][..., part]
        weights = (q[..., part] @ k.mT / math.sqrt(d)).exp()  # [N, T, L]
        if mask is not None:
            weights = weights * mask[:, None]
        total = weights.sum(-1, keepdim=True)
        parts.append(weights @ v / torch.where(total > 0, total, 1))
    return torch.cat(parts, -1)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_cross_attention(mask):
    draw = torch.Generator().manual_seed(0)
    n, t, keys, heads, d = 3, 7, 5, 2, 3
    q = torch.randn(n, t, heads * d, generator=draw).double().requires_grad_()
    kv = torch.randn(n, keys, 2 * heads * d, generator=draw).double().requires_grad_()
    do, seen = torch.randn(n, t, heads * d, generator=draw).double(), mask(n, keys)
    found = reference.cross_attention(q, kv, heads, mask=seen)
    expected = plain_attention(q, kv, heads, seen)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(o, (q, kv), do) for o in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 64, 77, 4, 16), (1, 9, 3, 1, 8), (0, 4, 3, 2, 8)], ids=str)
def test_cross_attention_in_low_precision(shape, dtype):
    n, t, keys, heads, d = shape
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(n, t, heads * d, generator=draw).to(dtype)
    kv = torch.randn(n, keys, 2 * heads * d, generator=draw).to(dtype)
    mask = torch.arange(keys) < keys - keys // 2 * torch.arange(n)[:, None]
    check_layer(lambda q, kv: reference.cross_attention(q, kv, heads, mask=mask), (q, kv))


def test_keys_that_are_not_seen_change_nothing():
    q, kv = torch.randn(2, 4, 6), torch.randn(2, 5, 12)
    mask = torch.tensor([[True, False, True, True, False], [False, True, False, False, False]])
    other = torch.where(mask[..., None], kv, kv + 100)
    found = [reference.cross_attention(q, x, 2, mask=mask) for x in (kv, other)]
    assert torch.equal(*found)


def test_attention_of_a_large_mean():
    """The weights add up to one, so the mean of v comes back; scores of 90 sqrt(32) hold 24 bits
    of themselves."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 64, 32, generator=draw).unbind()
    qkv = torch.cat((q + 3, k + 3, v + 1e3), dim=2)
    exact = reference.attention(qkv.double(), 1)
    assert relative_error(reference.attention(qkv, 1), exact) < ROUNDINGS
    assert relative_error(reference.attention(qkv, 1) - 1e3, exact - 1e3) < 2e-3


@DTYPES
@pytest.mark.parametrize("shape", [(2, 8, 6, 5), (1, 2, 2, 1), (1, 3, 7, 4), (0, 4, 4, 3)], ids=str)
def test_resampling(shape, dtype):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 300).to(dtype)
    check_layer(reference.avg_pool2d, (x,))
    check_layer(reference.upsample_nearest2d, (x,))


@DTYPES
@pytest.mark.parametrize("p", [0.0, 0.1, 0.9])
def test_dropout(p, dtype):
    x = (torch.randn(2, 5, 3, 7, generator=torch.Generator().manual_seed(0)) + 300).to(dtype)
    rng = torch.tensor([3, 4])
    check_layer(lambda x: reference.dropout(x, p, rng, layer=2), (x,))


# --- diffusion and optimizer ----------------------------------------------------------------------


def test_normal():
    """The transform of Box and Muller of the same words."""
    rng = torch.tensor([3, 4])
    words = reference.random_words(rng, 3, 30_000, reference.NOISE).double()
    u, v = (words[:, ::2] // 256 + 1) * 2.0**-24, words[:, 1::2] // 256 * 2.0**-24
    r, angle = (-2 * u.log()).sqrt(), 2 * math.pi * v
    exact = torch.stack((r * angle.cos(), r * angle.sin()), dim=2).flatten(1)
    got = reference.normal((3, 30_000), rng)
    assert relative_error(got, exact) < ROUNDINGS
    assert (got - exact).abs().max() < 4e-6  # an angle of 6 has 2^-22 of rounding, r is up to 6


def diffusion_case(mean, n=4, channels=3, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(n, 9, 7, 3, generator=draw) * 2 - 1 + mean
    output = (torch.randn(n, 9, 7, channels, generator=draw) + mean).to(dtype)
    alpha_bar = torch.linspace(0.9999, 1e-4, 10, dtype=torch.float64)
    table = torch.stack((alpha_bar.sqrt(), (1 - alpha_bar).sqrt()), dim=1).float()
    t = torch.randint(10, (n,), generator=draw)
    a, s = table.double()[t].view(n, 2, 1, 1, 1).unbind(1)
    noise = reference.normal(images.shape, torch.tensor([3, 4])).double()
    return images, output, t, table, (a, s, noise)


@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("mean", [0, 1e3])
def test_q_sample(mean, n):
    images, _, t, table, (a, s, noise) = diffusion_case(mean, n)
    exact = a * images.double() + s * noise
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        got = reference.q_sample(images, t, table, torch.tensor([3, 4]), dtype=dtype)
        assert got.dtype == dtype
        assert relative_error(got, exact) < ROUNDINGS + (torch.finfo(dtype).eps / 2)


def test_images_of_bytes():
    images = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1)
    exact = images.double() / 127.5 - 1
    assert (reference.gather_images(images) - exact).abs().max() <= 2**-24


@DTYPES
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("channels", [3, 6])
@pytest.mark.parametrize("mean", [0, 300])
def test_denoise_loss(mean, channels, prediction, dtype):
    images, output, t, table, (a, s, noise) = diffusion_case(mean, 4, channels, dtype)
    x0 = images.double()
    target = {"epsilon": noise, "sample": x0, "v_prediction": a * noise - s * x0}[prediction]
    delta = output[..., :3].double() - target
    leaf = output.requires_grad_()
    options = {"rng": torch.tensor([3, 4]), "prediction": prediction}
    loss = reference.denoise_loss(leaf, images, t, table, **options)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    assert relative_error(loss.detach(), delta.square().mean((1, 2, 3))) < ROUNDINGS
    assert relative_error(grad[..., :3], 2 * delta / delta[0].numel()) < ROUNDINGS + rounding
    assert not grad[..., 3:].any()


@pytest.mark.parametrize("memory", [False, True], ids=["", "memory"])
@pytest.mark.parametrize("channels", [3, 6])
@pytest.mark.parametrize("mean", [0, 1e3])
def test_denoise_step(mean, channels, memory):
    """The first step of many: a and b are as large as they get, and x and output cancel in x0."""
    x, output, *_ = diffusion_case(mean, 4, channels)
    output[..., 3:] -= mean  # a share of two variances
    row = torch.tensor([1])
    table = torch.tensor([[0.0] * 8, [150.0, -149.9, 0.3, 0.7, -0.2, 0.1, -9.0, -4.0]])
    results = []
    for dtype in (torch.float32, torch.float64):
        kept = torch.full_like(x, 0.5, dtype=dtype) if memory else None
        args = x.to(dtype), output.to(dtype), table.to(dtype), row, torch.tensor([3, 4])
        results.append(reference.denoise_step(*args, clip=None, memory=kept))
    terms = 150 * (x.double().norm() + output[..., :3].double().norm())
    assert relative_error(*results, terms) < ROUNDINGS


@pytest.mark.parametrize(
    "grad",
    [
        pytest.param(torch.full((2**24,), 1e-3), id="sixteen-million-alike"),
        pytest.param(torch.linspace(-1e3, 1e3, 12345), id="a-ramp"),
        pytest.param(torch.tensor([-3.0]), id="one-number"),
        pytest.param(torch.zeros(5), id="zeros"),
    ],
)
def test_grad_norm(grad):
    """`Tensor.norm` is 2 % off for the first on a CPU."""
    exact = grad.double().norm()
    assert abs(reference.grad_norm(grad).item() - exact) <= 2e-7 * exact


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize(
    ("size", "scale"), [(1.0, 1.0), (1e3, 1e-6), (1e-4, 1e3), (1.0, 1e-15), (0.0, 1.0)], ids=str
)
def test_adamw_step(size, scale, max_norm):
    """Five steps of parameters and gradients of these sizes."""
    states = []
    for dtype in (torch.float32, torch.float64):
        draw = torch.Generator().manual_seed(0)
        param = (torch.randn(1000, generator=draw) * size).to(dtype)
        state = [param, *torch.zeros(2, 1000, dtype=dtype), param.clone()]
        for k in range(1, 6):
            grad = (torch.randn(1000, generator=draw) * scale).to(dtype)
            hyper = (1e-3, 0.9, 0.999, 1e-8, 0.01, 1 - 0.9**k, 1 - 0.999**k, 0.999, max_norm)
            reference.adamw_step(
                state[0], grad, *state[1:], reference.grad_norm(grad),
                torch.tensor(hyper, dtype=torch.float64), torch.zeros(1, dtype=torch.int32),
            )  # fmt: skip
        states.append(state)
    for a, c in zip(*states, strict=True):
        assert relative_error(a, c) < ROUNDINGS
