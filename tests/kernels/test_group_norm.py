"""group_norm against the reference in float64: the output and every gradient."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.activations import ACTIVATIONS
from triton_kernels.norm import cluster as group_norm_cluster
from triton_kernels.norm import group_norm as group_norm_op
from triton_kernels.norm import pass_grid
from triton_kernels.norm import resident as group_norm_resident
from triton_kernels.norm import stream as group_norm_stream
from triton_kernels.norm.group_norm import group_norm

from .poison import poison_outputs

NAMES = ("y", "dx", "d_weight", "d_bias", "d_scale", "d_shift")

# exp of the interpreter's NumPy warns where infinity is the right value
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs and workspaces start as NaN, so an element that no program writes cannot pass."""
    poison_outputs(monkeypatch, group_norm_stream, group_norm_resident, group_norm_cluster)


def _force(path, monkeypatch):
    """Take small images through "stream", or make sure that they are "resident" or a "cluster"."""

    def is_resident(xs, num_groups):
        assert path != "resident" or group_norm_resident.is_resident(xs, num_groups)
        return path == "resident"

    def can_cluster(xs, num_groups):
        assert path != "cluster" or group_norm_cluster.can_cluster(xs, num_groups)
        return path == "cluster"

    monkeypatch.setattr(group_norm_op, "is_resident", is_resident)
    monkeypatch.setattr(group_norm_op, "can_cluster", can_cluster)
    monkeypatch.setattr(group_norm_op, "_LARGE", 0)


@pytest.fixture(params=["stream", "resident"])
def path(request, monkeypatch):
    """The test runs twice, once by each way through group_norm."""
    _force(request.param, monkeypatch)
    return request.param


def _case(shape, *, affine=True, modulated=True, offset=0.0, dtype=torch.float32, device="cpu"):
    """x, weight, bias, scale, shift and dy; parameters stay float32 and scale, shift follow x."""
    torch.manual_seed(0)
    n, _, _, c = shape
    x = (torch.randn(shape, device=device) + offset).to(dtype)
    dy = torch.randn(shape, device=device).to(dtype)
    params = [torch.randn(c, device=device) if affine else None for _ in range(2)]
    params += [torch.randn(n, c, device=device).to(dtype) if modulated else None for _ in range(2)]
    return x, params, dy


def _run(function, x, params, dy, groups, act, dtype=None):
    """Output and gradients; every tensor first converted to `dtype`, if one is given."""
    leaves = [
        None if t is None else t.to(dtype or t.dtype).detach().requires_grad_()
        for t in (x, *params)
    ]
    x, weight, bias, scale, shift = leaves
    y = function(x, groups, weight, bias, activation=act, scale=scale, shift=shift)
    present = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad(y, present, dy.to(y.dtype)))
    return [y.detach()] + [None if t is None else next(grads) for t in leaves]


def _error(got, exact):
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def _of_two(function, c1):
    """`function` of x in two halves, the first of c1 channels; gradients are of the whole x."""

    def halves(x, *args, **kwargs):
        x1, x2 = x[..., :c1].contiguous(), x[..., c1:].contiguous()
        return function(x1, *args, x2=x2, **kwargs)

    return halves


def _check(x, params, dy, groups, act, floor=2e-6, c1=None):
    """Each result has its tensor's dtype and is at most twice as far from float64 as PyTorch at the
    same precision is; the floor is a few float32 roundings. With c1 x is handed over in halves."""
    ours = group_norm if c1 is None else _of_two(group_norm, c1)
    theirs = reference.group_norm if c1 is None else _of_two(reference.group_norm, c1)
    exact = _run(theirs, x, params, dy, groups, act, torch.float64)
    low = _run(theirs, x, params, dy, groups, act)
    got = _run(ours, x, params, dy, groups, act)
    for name, a, b, c in zip(NAMES, got, low, exact, strict=True):
        if c is None:
            continue
        assert a.dtype == b.dtype, name
        error, budget = _error(a, c), 2 * _error(b, c) + floor
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations(act, path, device):
    _check(*_case((2, 5, 7, 24), device=device), 4, act)


@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        pytest.param((2, 3, 5, 64), 32, id="two-channels-a-group"),
        pytest.param((1, 3, 3, 192), 32, id="six-channels-a-group-three-blocks"),
        pytest.param((1, 2, 3, 320), 32, id="ten-channels-a-group-straddling-a-block"),
        pytest.param((2, 3, 3, 7), 7, id="odd-channels-each-a-group"),
        pytest.param((2, 3, 3, 7), 1, id="layer-norm-over-the-image"),
        pytest.param((3, 1, 1, 10), 2, id="one-pixel"),
        pytest.param((1, 5, 1, 3), 3, id="one-column"),
        pytest.param((1, 1, 1, 136), 1, id="one-pixel-masked-second-block"),
        pytest.param((2, 37, 41, 3), 1, id="several-chunks-ragged"),
        pytest.param((1, 2, 2, 520), 1, id="partials-longer-than-a-finalize-tile"),
        pytest.param((0, 4, 4, 8), 2, id="empty-batch"),
    ],
)
def test_shapes(shape, groups, path, device):
    _check(*_case(shape, device=device), groups, "silu")


@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("affine", [False, True], ids=["no-affine", "affine"])
def test_optional_arguments(affine, modulated, path, device):
    case = _case((2, 4, 3, 12), affine=affine, modulated=modulated, device=device)
    _check(*case, 3, "mish")


@pytest.mark.parametrize("present", range(4), ids=["weight", "bias", "scale", "shift"])
def test_one_argument_alone(present, path, device):
    x, params, dy = _case((2, 4, 3, 12), device=device)
    params = [p if i == present else None for i, p in enumerate(params)]
    _check(x, params, dy, 3, "gelu_tanh")


@pytest.mark.parametrize("ops", [group_norm, reference.group_norm], ids=["triton", "reference"])
def test_a_group_of_a_single_number(ops, device):
    """Its deviation is 0, so what is left is the bias; F.group_norm refuses it. PyTorch computes
    x rstd - mean rstd with rstd = 316, each rounded."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 1, 3, device=device, requires_grad=True)
    weight, bias = torch.randn(2, 3, device=device, requires_grad=True)
    y = ops(x, 3, weight, bias)
    torch.testing.assert_close(y.flatten(), bias, rtol=0, atol=1e-4)
    dx, d_weight, d_bias = torch.autograd.grad(y.sum(), (x, weight, bias))
    assert dx.abs().max() < 1e-3 and d_weight.abs().max() < 1e-4
    assert torch.equal(d_bias, torch.ones_like(bias))


def test_fp16_with_float32_parameters(path, device):
    _check(*_case((2, 9, 5, 40), dtype=torch.float16, device=device), 8, "silu")


# --- two tensors as one --------------------------------------------------------------------------


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_of_two(act, path, device):
    """Groups of six: the third has four channels in the first half and two in the second."""
    _check(*_case((2, 5, 7, 24), device=device), 4, act, c1=16)


@pytest.mark.parametrize(
    ("shape", "groups", "c1"),
    [
        pytest.param((2, 3, 5, 20), 2, 4, id="the-first-group-has-all-of-x1"),
        pytest.param((1, 3, 3, 320), 32, 192, id="ten-channels-a-group-straddling"),
        pytest.param((2, 3, 3, 7), 1, 4, id="one-group-odd-channels"),
        pytest.param((2, 3, 3, 7), 7, 6, id="a-half-of-one-channel"),
        pytest.param((3, 1, 1, 10), 2, 3, id="one-pixel"),
        pytest.param((2, 37, 41, 5), 1, 2, id="several-chunks-ragged"),
        pytest.param((1, 2, 2, 264), 1, 8, id="several-blocks-in-x2"),
        pytest.param((0, 4, 4, 8), 2, 6, id="empty-batch"),
    ],
)
def test_shapes_of_two(shape, groups, c1, path, device):
    _check(*_case(shape, device=device), groups, "silu", c1=c1)


def test_two_of_a_mean_of_1e3(path, device):
    """And of -1e3 in the second half, so that a group across the border has a deviation of 1e3."""
    x, params, dy = _case((2, 20, 19, 12), offset=1e3, modulated=False, device=device)
    x[..., 6:] -= 2e3
    exact = _run(reference.group_norm, x, params, dy, 3, "identity", torch.float64)
    got = _run(_of_two(group_norm, 6), x, params, dy, 3, "identity")
    for name, a, c in zip(NAMES[:4], got, exact, strict=False):
        assert _error(a, c) < 1e-4, name


def test_two_in_fp16_in_chunks_of_several_tiles(device, monkeypatch):
    _several_tiles(monkeypatch)
    case = _case((2, 13, 11, 40), dtype=torch.float16, device=device)
    _check(*case, 4, "silu", c1=24)


@pytest.mark.parametrize("frozen", ["x", "x2", "both"])
def test_two_of_which_one_is_frozen(frozen, path, device):
    (x1, (weight, *_), _), (x2, _, _) = (
        _case((2, 3, 3, c), device=device, modulated=False) for c in (6, 10)
    )
    leaves = [x1.requires_grad_(), x2.requires_grad_(), torch.ones(16, device=device)]
    leaves[2].requires_grad_()
    dy = torch.randn(2, 3, 3, 16, device=device)
    full = torch.autograd.grad(group_norm(x1, 4, leaves[2], x2=x2, activation="silu"), leaves, dy)
    kept = [i for i, name in enumerate(("x", "x2", "weight")) if name != frozen]
    kept = [2] if frozen == "both" else kept
    a, b, w = (t if i in kept else t.detach() for i, t in enumerate(leaves))
    y = group_norm(a, 4, w, x2=b, activation="silu")
    got = torch.autograd.grad(y, [leaves[i] for i in kept], dy)
    assert all(torch.equal(g, full[i]) for g, i in zip(got, kept, strict=True))


_CONFIG_LISTS = ("_STATS_CONFIGS", "_APPLY_CONFIGS", "_SUMS_CONFIGS", "_DX_CONFIGS")


def _choose_in(list_name, config, monkeypatch):
    """Make the launcher that chooses from this list take `config`."""
    tested = getattr(group_norm_stream, list_name)

    def choose(op, key, configs, default, run):
        return config if configs() is tested else default()

    monkeypatch.setattr(group_norm_stream, "choose", choose)


def _several_tiles(monkeypatch):
    _force("stream", monkeypatch)
    monkeypatch.setattr(pass_grid, "_MIN_PROGRAMS", 1)
    several = pass_grid.PassConfig(256, 4, 4)
    monkeypatch.setattr(group_norm_stream, "choose", lambda *_: several)


def test_chunks_of_several_tiles(device, monkeypatch):
    """What large batches get: the launchers cut chunks down while there are too few programs."""
    _several_tiles(monkeypatch)
    _check(*_case((2, 13, 11, 24), device=device), 4, "silu")


@pytest.mark.parametrize("way", ["stream", "several-tiles", "resident"])
def test_large_mean(way, device, monkeypatch):
    """Mean 1e3, deviation 1: float32 holds the mean to 3e-5 of a deviation; no more is lost.

    A first pixel far off the rest must not matter either, as it would for sums shifted by it.
    """
    if way == "several-tiles":
        _several_tiles(monkeypatch)
    else:
        _force(way, monkeypatch)
    x, params, dy = _case((2, 20, 19, 12), offset=1e3, modulated=False, device=device)
    x[:, 0, 0] = 0
    exact = _run(reference.group_norm, x, params, dy, 3, "identity", torch.float64)
    got = _run(group_norm, x, params, dy, 3, "identity")
    for name, a, c in zip(NAMES[:4], got, exact, strict=False):
        assert _error(a, c) < 1e-4, name


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the mean of nothing
def test_no_pixels(device):
    x = torch.empty(2, 0, 3, 8, device=device, requires_grad=True)
    weight = torch.ones(8, device=device, requires_grad=True)
    y = group_norm(x, 2, weight)
    y.backward(torch.empty_like(y))
    assert y.shape == x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_constant_input_gives_the_offset(path, device):
    """Variance 0: rstd is 1 / sqrt(eps), xhat is 0."""
    x = torch.full((2, 3, 3, 8), 1234.5, device=device)
    bias = torch.arange(8.0, device=device)
    assert torch.equal(group_norm(x, 2, None, bias), bias.expand(x.shape))


def test_scale_and_shift_as_halves_of_an_embedding(path, device):
    """`chunk` leaves rows 2C apart; no copy is needed."""
    x, (weight, bias, _, _), dy = _case((3, 2, 2, 8), device=device)
    embedding = torch.randn(3, 16, device=device)
    results = []
    for function, dtype in ((group_norm, torch.float32), (reference.group_norm, torch.float64)):
        leaf = embedding.to(dtype).requires_grad_()
        scale, shift = leaf.chunk(2, dim=1)
        y = function(x.to(dtype), 2, weight.to(dtype), bias.to(dtype), scale=scale, shift=shift)
        results.append((y, *torch.autograd.grad(y, leaf, dy.to(dtype))))
    for a, c in zip(*results, strict=True):
        assert _error(a.detach(), c.detach()) < 2e-6


def test_expanded_gradient(device):
    """`sum` hands back a gradient with zero strides."""
    x, _, _ = _case((2, 3, 3, 8), device=device)
    leaf, exact = x.requires_grad_(), x.detach().double().requires_grad_()
    (dx,) = torch.autograd.grad(group_norm(leaf, 2, activation="silu").sum(), leaf)
    (want,) = torch.autograd.grad(reference.group_norm(exact, 2, activation="silu").sum(), exact)
    assert _error(dx, want) < 1e-5


def test_frozen_input_or_parameters(path, device):
    """Only what needs a gradient gets one."""
    x, (weight, bias, scale, shift), dy = _case((2, 3, 3, 8), device=device)
    full = _run(group_norm, x, (weight, bias, scale, shift), dy, 2, "silu")
    leaf = weight.requires_grad_()
    y = group_norm(x, 2, leaf, bias, activation="silu", scale=scale, shift=shift)
    assert torch.equal(torch.autograd.grad(y, leaf, dy)[0], full[2])
    leaf = x.requires_grad_()
    y = group_norm(leaf, 2, weight.detach(), bias, activation="silu", scale=scale, shift=shift)
    assert torch.equal(torch.autograd.grad(y, leaf, dy)[0], full[1])


@pytest.mark.parametrize("trained", [0, 1], ids=["weight", "bias"])
def test_reference_of_a_frozen_input(trained):
    """PyTorch's backward would end the process."""
    x, (weight, bias, _, _), dy = _case((2, 3, 3, 8))
    leaf = (weight, bias)[trained].requires_grad_()
    (got,) = torch.autograd.grad(reference.group_norm(x, 2, weight, bias), leaf, dy)
    xhat = reference.group_norm(x, 2)
    assert _error(got, (dy * (xhat if trained == 0 else 1)).sum((0, 1, 2))) < 1e-6


def test_same_bits_again(path, device):
    case = _case((2, 37, 41, 3), device=device)
    first, second = (_run(group_norm, *case, 1, "silu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_sample_does_not_depend_on_its_batch(path, device):
    """Bit for bit, when the images are cut alike."""
    x, (weight, bias, _, _), _ = _case((3, 6, 5, 16), device=device)
    batch = group_norm(x, 4, weight, bias)
    assert torch.equal(batch[1:2], group_norm(x[1:2], 4, weight, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"num_groups": 5}, "num_groups is 5; expected a divisor of the 8", id="groups"
        ),
        pytest.param({"num_groups": 0}, "num_groups is 0", id="no-groups"),
        pytest.param({"activation": "swish"}, "'swish'; expected one of identity", id="activation"),
        pytest.param({"weight": torch.ones(4)}, r"weight has shape \(4,\)", id="weight"),
        pytest.param({"scale": torch.ones(1, 8)}, r"scale has shape \(1, 8\)", id="scale"),
        pytest.param({"bias": torch.ones(8).double()}, "bias is torch.float64", id="dtype"),
        pytest.param({"shift": torch.ones(8, 2).T}, "shift has strides", id="strides"),
        pytest.param({"x": torch.ones(2, 8, 4, 4).permute(0, 2, 3, 1)}, "NHWC", id="layout"),
        pytest.param({"x2": torch.ones(2, 4, 3, 8)}, r"x2 has shape \(2, 4, 3, 8\)", id="x2"),
        pytest.param({"x2": torch.ones(2, 4, 4, 1)}, "divisor of the 9", id="groups-of-two"),
        pytest.param({"x2": torch.ones(2, 4, 4, 2).half()}, "x2 is torch.float16", id="x2-dtype"),
    ],
)
def test_errors(change, message, device):
    arguments = {"x": torch.ones(2, 4, 4, 8), "num_groups": 2} | change
    arguments = {k: v.to(device) if torch.is_tensor(v) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        group_norm(**arguments)


# --- on the GPU: bf16, the model's shapes, every entry of the config lists -----------------------

_MODEL_SHAPES = [
    (32, 64, 64, 64),
    (8, 64, 64, 192),
    (32, 32, 32, 128),
    (8, 32, 32, 320),
    (32, 16, 16, 192),
    (8, 16, 16, 448),
    (32, 8, 8, 256),
    (8, 8, 8, 512),
    (1, 256, 256, 64),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", _MODEL_SHAPES, ids=str)
def test_model_shapes(shape, dtype, device):
    case = _case(shape, modulated=shape[0] == 8, dtype=dtype, device=device)
    _check(*case, 32, "silu")
    first, second = (_run(group_norm, *case, 32, "silu") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a is None or torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_in_bf16(act, path, device):
    _check(*_case((2, 13, 11, 40), dtype=torch.bfloat16, device=device), 8, act)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 64, 64, 64), (3, 33, 31, 192)], ids=str)
@pytest.mark.parametrize("list_name", _CONFIG_LISTS)
def test_every_config(list_name, shape, device, monkeypatch):
    _force("stream", monkeypatch)
    monkeypatch.setattr(pass_grid, "_MIN_PROGRAMS", 1)
    case = _case(shape, dtype=torch.bfloat16, device=device)
    for config in getattr(group_norm_stream, list_name):
        _choose_in(list_name, config, monkeypatch)
        for _ in range(3):
            _check(*case, 32, "silu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 16, 16, 192), (3, 7, 9, 320)], ids=str)
def test_every_resident_config(shape, device, monkeypatch):
    _force("resident", monkeypatch)
    case = _case(shape, dtype=torch.bfloat16, device=device)
    configs = group_norm_resident._candidates((case[0], None), 32)
    assert len(configs) >= 5
    for config in configs:
        monkeypatch.setattr(group_norm_resident, "choose", lambda *_, config=config: config)
        for _ in range(3):
            _check(*case, 32, "silu")


@pytest.mark.parametrize(("hw", "c"), [(4096, 64), (4096, 192), (1024, 128), (256, 320)], ids=str)
@pytest.mark.parametrize("tensors", [1, 2], ids=["forward", "backward"])
def test_clusters_have_whole_groups_and_tiles(tensors, hw, c):
    configs = group_norm_cluster._candidates(hw, c, 32, tensors)
    assert configs
    for config in configs:
        channels = config.parts * config.block_c
        pixels = config.ctas * config.num_warps * 256 // config.block_c
        assert c % channels == 0 and channels % (c // 32) == 0 and hw % pixels == 0


def test_what_no_cluster_can_hold(device):
    assert not group_norm_cluster._candidates(256 * 256, 64, 32, 1)  # 8 MiB
    assert not group_norm_cluster._candidates(4096, 65, 5, 1)  # tiles are of 32 channels or more
    assert not group_norm_cluster._candidates(37 * 41, 64, 32, 1)  # odd pixels
    assert not group_norm_cluster.can_cluster((torch.ones(2, 64, 64, 64, device=device), None), 32)


_CLUSTER_SHAPES = [(5, 64, 64, 64), (3, 64, 64, 192), (5, 16, 32, 128), (5, 16, 16, 320)]


@pytest.mark.gpu
@pytest.mark.parametrize("tensors", [1, 2], ids=["forward", "backward"])
@pytest.mark.parametrize("shape", _CLUSTER_SHAPES, ids=str)
def test_every_cluster_config(shape, tensors, device, monkeypatch):
    """Also with so many rounds, which batches as small as this one do not get."""
    _force("cluster", monkeypatch)
    monkeypatch.setattr(
        group_norm_cluster, "_clusters", lambda tasks, config, _: -(-tasks // config.rounds)
    )
    case = _case(shape, dtype=torch.bfloat16, device=device)
    tested = group_norm_cluster._candidates(shape[1] * shape[2], shape[3], 32, tensors)
    for config in tested:

        def choose(op, key, configs, default, run, config=config):
            return config if configs() is tested else default()

        monkeypatch.setattr(group_norm_cluster, "choose", choose)
        for _ in range(2):
            _check(*case, 32, "silu")


def test_a_way_that_was_chosen_may_not_be_open(monkeypatch):
    """What was measured for a shape is no way for a tensor of it that is not aligned."""
    monkeypatch.setattr(group_norm_op, "choose", lambda *_: group_norm_op._CLUSTER)
    xs = (torch.ones(1, 8, 8, 64, dtype=torch.bfloat16), None)
    for clusters, can in ((True, False), (False, True)):
        monkeypatch.setattr(group_norm_op, "can_cluster", lambda *_, can=can: can)
        way = group_norm_op._way("group_norm", xs, 32, True, lambda _: xs[0], clusters)
        assert way == group_norm_op._RESIDENT


@pytest.mark.gpu
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_activations_in_a_cluster(act, dtype, device, monkeypatch):
    _force("cluster", monkeypatch)
    affine = act != "mish"
    case = _case((2, 16, 32, 96), affine=affine, modulated=affine, dtype=dtype, device=device)
    _check(*case, 16, act)


@pytest.mark.gpu
def test_statistics_of_a_large_mean_in_a_cluster(device):
    """As in `test_large_mean`; a float16 about 1e3 is right to half a deviation, as it is given."""
    x, _, _ = _case((2, 64, 64, 64), offset=1e3, dtype=torch.float16, device=device)
    x[:, 0, 0] = 0
    params = (None,) * 4
    _, stats = group_norm_cluster.cluster_fwd((x, None), 32, 1e-5, params, "identity")
    groups = x.double().view(2, 4096, 32, 2)
    var, mean = torch.var_mean(groups, (1, 3), correction=0)
    assert _error(stats[0], mean) < 1e-6 and _error(stats[1], (var + 1e-5).rsqrt()) < 1e-5


@pytest.mark.gpu
def test_clusters_beside_other_work(device, monkeypatch):
    """Thread blocks of a cluster wait for each other; kernels in other streams take places."""
    _force("cluster", monkeypatch)
    case = _case((64, 64, 64, 64), dtype=torch.bfloat16, device=device)
    expected = _run(group_norm, *case, 32, "silu")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(_run(group_norm, *case, 32, "silu"))
    torch.cuda.synchronize()
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device):
    """More than 2^31 elements: the last sample equals the same sample alone."""
    x = torch.randn(2, 1, 1, 64, device=device, dtype=torch.float16).expand(2, 4100, 4200, 64)
    x = x.contiguous()
    x[1, -1, -1] += 3
    weight, bias = torch.randn(2, 64, device=device)
    y = group_norm(x, 32, weight, bias, activation="silu")
    assert torch.equal(y[1:], group_norm(x[1:], 32, weight, bias, activation="silu"))


@pytest.mark.gpu
def test_captured_in_a_graph(device):
    x, params, dy = _case((4, 16, 16, 64), dtype=torch.bfloat16, device=device)
    want = _run(group_norm, x, params, dy, 32, "silu")
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run(group_norm, x, params, dy, 32, "silu")
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        got = _run(group_norm, x, params, dy, 32, "silu")
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


_DECODER_SHAPES = [(8, 64, 64, 64, 128), (8, 32, 32, 128, 192), (8, 16, 16, 192, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [*_DECODER_SHAPES, (8, 8, 8, 256, 256), (3, 33, 31, 130, 30)], ids=str
)
def test_model_shapes_of_two(shape, dtype, path, device, monkeypatch):
    *shape, c1, c2 = shape
    x, params, dy = _case((*shape, c1 + c2), dtype=dtype, device=device)
    if path == "resident" and shape[1] > 16:
        pytest.skip("too large for one launch")
    _check(x, params, dy, 32, "silu", c1=c1)
    first, second = (_run(_of_two(group_norm, c1), x, params, dy, 32, "silu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_two_are_never_one_in_memory(device):
    """Forward needs y and little else."""
    x1, x2 = (torch.randn(8, 64, 64, c, device=device, dtype=torch.bfloat16) for c in (64, 128))
    y = group_norm(x1, 32, x2=x2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = group_norm(x1, 32, x2=x2)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.2 * y.numel() * y.element_size()


@pytest.mark.gpu
@pytest.mark.parametrize("list_name", _CONFIG_LISTS)
def test_every_config_of_two(list_name, device, monkeypatch):
    _force("stream", monkeypatch)
    monkeypatch.setattr(pass_grid, "_MIN_PROGRAMS", 1)
    case = _case((3, 33, 31, 320), dtype=torch.bfloat16, device=device)
    for config in getattr(group_norm_stream, list_name):
        _choose_in(list_name, config, monkeypatch)
        for _ in range(3):
            _check(*case, 32, "silu", c1=192)
