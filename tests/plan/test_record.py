"""Every call of a module is noted, once, without its numbers, and with its line."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion import accelerate
from diffusion.plan.graph import PlanError
from diffusion.plan.record.record import record


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.inner = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.unregistered = torch.arange(4.0)

    def forward(self, x):
        return self.function(self, x)


def calls(function, shape=(2, 3, 4)):
    """Names of what the function calls, and the recording."""
    found = record(Net(function), (torch.randn(shape),), {})
    return [str(call.target) for call in found.calls], found


WHOLE = {
    "a layer": (lambda net, x: net.inner(x), "aten.linear.default"),
    "linear": (lambda net, x: F.linear(x, weight=net.inner.weight), "aten.linear.default"),
    "a method": (lambda net, x: x.matmul(net.inner.weight), "aten.matmul.default"),
    "an operator": (lambda net, x: x @ net.inner.weight, "aten.matmul.default"),
    "attention": (
        lambda net, x: F.scaled_dot_product_attention(x, x, value=x, is_causal=True),
        "aten.scaled_dot_product_attention.default",
    ),
    "dropout": (lambda net, x: F.dropout(x, training=True), "aten.dropout.default"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_layers_are_one_call(case):
    function, name = WHOLE[case]
    names, found = calls(function)
    assert names == [name]
    assert found.calls[0].result.shape == (2, 3, 4)
    assert all(x.device.type == "meta" for x in found.calls[0].args if isinstance(x, torch.Tensor))


TAKEN_APART = {
    "conv1d": (lambda net, x: F.conv1d(x, x[..., :3], padding="same"), "convolution"),
    "conv2d": (lambda net, x: F.conv2d(x[None], x[None], padding="valid"), "convolution"),
    "group_norm": (lambda net, x: F.group_norm(x, 3), "native_group_norm"),
    "chunk": (lambda net, x: x.chunk(2, 1)[0], "split"),
    "flatten": (lambda net, x: x.flatten(1), "view"),
    "reshape": (lambda net, x: x.mT.reshape(6, 4), "_unsafe_view"),
    "movedim": (lambda net, x: x.movedim(0, 2), "permute"),
    "narrow": (lambda net, x: x.narrow(1, 0, 2), "slice"),
    "double": (lambda net, x: x.double(), "_to_copy"),
    "pad": (lambda net, x: F.pad(x, (1, 1)), "constant_pad_nd"),
    "concat": (lambda net, x: torch.concat((x, x)), "cat"),
    "outer": (lambda net, x: torch.outer(x[0, 0], x[0, 1]), "mul"),
    "an operator": (lambda net, x: net.count.long() & 1, "bitwise_and"),
    "in place": (lambda net, x: (x * 2).mul_(3), "mul"),
}


@pytest.mark.parametrize("case", TAKEN_APART)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_what_pytorch_takes_apart_is_in_parts(case, autocast, inference):
    """Also in inference mode, where its functions would arrive as they are, and write in place."""
    function, name = TAKEN_APART[case]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.inference_mode(inference):
        names, _ = calls(function)
    found = [part.split(".")[1] for part in names]
    assert found[-1] == name and case not in found and "mul_" not in found


def test_arguments_are_in_the_schemas_order():
    _, found = calls(lambda net, x: F.scaled_dot_product_attention(x, x, value=x, scale=2.0))
    q, k, v, *rest = found.calls[0].args
    assert q is k is v is found.inputs[0] and rest == [None, 0.0, False]
    assert found.calls[0].kwargs == {"scale": 2.0}
    _, found = calls(lambda net, x: F.dropout(x, 0.3, False))
    assert found.calls[0].args[1:] == (0.3, False)
    _, found = calls(lambda net, x: F.one_hot(x[0, 0].long(), num_classes=5))
    assert found.calls[-1].args[1] == 5 and found.calls[-1].result.shape == (4, 5)


def test_writing_in_place_is_making_another():
    def function(net, x):
        y = x * 2
        part = y[:, :1]
        part += 1
        return y.relu_() + part

    names, found = calls(function)
    assert not any(name.split(".")[1].endswith("_") for name in names)
    # what was written into a part is in the whole
    scatter = next(c for c in found.calls if "slice_scatter" in str(c.target))
    relu = next(c for c in found.calls if "relu" in str(c.target))
    assert relu.args[0] is scatter.result


def _views_of_linear(net, x):
    y = net.inner(x).transpose(1, 2)
    y += x.transpose(1, 2)
    return y.view(2, 2, 2, 3)


def _views_of_matmul(net, x):
    y = torch.matmul(x, net.inner.weight)
    y[..., :2].transpose(1, 2).mul_(2)
    return y


def _dropped_nothing(net, x):
    y = x * 2
    F.dropout(y, training=False).add_(1)
    return y


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("function", [_views_of_linear, _views_of_matmul, _dropped_nothing])
def test_writing_into_what_is_one_op(function, low):
    """As tokens to which an image is added behind attention: several ops of PyTorch make them."""
    torch.manual_seed(0)
    net, x = Net(function), torch.randn(2, 3, 4, requires_grad=True)
    fast = accelerate(net)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        ours, theirs = fast(x), net(x)
    near = {"atol": 4 * 2**-8 if low else 1e-5, "rtol": 4 * 2**-8 if low else 1e-5}
    torch.testing.assert_close(ours, theirs, **near)
    of = x, *net.parameters()
    every = [torch.autograd.grad(y.sin().sum(), of, allow_unused=True) for y in (ours, theirs)]
    for a, b in zip(*every, strict=True):
        torch.testing.assert_close(a, b, **near)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda net, x: x.add_(1), "its argument 0"),
        (lambda net, x: net.inner.weight.mul_(2) + x[0, :1], "inner.weight"),
    ],
)
def test_what_a_module_writes_to_is_named(function, what):
    lined = rf"changes {what} in its forward \(plan/test_record\.py:\d+\)"
    with pytest.raises(PlanError, match=lined):
        calls(function)


def test_a_buffer_that_is_written_to_has_another_value_behind_the_call():
    def function(net, x):
        with torch.no_grad():
            net.count.mul_(2).add_(x.mean())
        return x * net.count

    names, found = calls(function)
    assert found.written["count"] is found.calls[-1].args[1] and names[-1] == "aten.mul.Tensor"


@pytest.mark.parametrize(
    ("function", "called"),
    [
        (lambda net, x: x + x.sum().item(), "item"),
        (lambda net, x: x * float(x.mean()), "__float__"),
        (lambda net, x: x if (x > 0).all() else -x, "__bool__"),
        (lambda net, x: x[0, (x > 0).nonzero()], "nonzero"),
        (lambda net, x: x[x > 0], "__getitem__"),
        (lambda net, x: x * torch.rand(3, device=x.device)[0].item(), "item"),
        (lambda net, x: x if (net.count > 0).all() else -x, "__bool__"),
        (lambda net, x: x if torch.equal(x, net.count) else -x, "equal"),
        (lambda net, x: x[torch.where(x > 0)[0]], "where"),
        (lambda net, x: x.repeat_interleave(x[:, 0, 0].long(), 0), "repeat_interleave"),
        (lambda net, x: x[: len(x.detach()[0].tolist())], "tolist"),
        (lambda net, x: x * float(x.detach().numpy().sum()), "numpy"),
        (lambda net, x: x * float(np.asarray(x.detach()).sum()), "__array__"),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_numbers_are_not_known(function, called, autocast):
    words = rf"{called} of a tensor, whose numbers are not known .* \(plan/test_record\.py:\d+\)"
    with torch.autocast("cpu", enabled=autocast), pytest.raises(PlanError, match=words):
        calls(function)


def _left_out(net, x):
    mask = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    y = x if mask.any() else -x
    mask[0] = True
    return y if mask.any() else -y


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_left_out, -1.0),
        (lambda net, x: x * torch.linspace(0, 1, 5, device=x.device)[3].item(), 0.75),
        (lambda net, x: x * int(torch.ones_like(x).sum()), 12.0),
        (lambda net, x: x * torch.arange(4, device=x.device).flip(0).tolist()[1], 2.0),
        (lambda net, x: x * float(torch.arange(4, device=x.device).numpy()[3]), 3.0),
        (lambda net, x: x * float(np.asarray(torch.ones(3), np.float64).sum()), 3.0),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_numbers_that_depend_on_shapes_alone_are_known(function, expected, autocast):
    net, x = Net(function), torch.randn(3, 4)
    with torch.autocast("cpu", enabled=autocast):
        assert torch.equal(accelerate(net)(x), expected * x)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda net, x: net.inner(x[..., :3]), "Net cannot be traced: "),
        (lambda net, x: nn.CrossMapLRN2d(3)(x), "calls an autograd.Function"),
        (lambda net, x: x[net.nothing], "has no attribute 'nothing'"),
    ],
)
def test_what_fails_in_the_forward_has_its_line(function, why):
    with pytest.raises(PlanError, match=rf"{why}.*\(plan/test_record\.py:\d+"):
        calls(function)


def test_a_network_of_pytorchs_layers_names_the_layer_and_who_called():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(5, 4, 3))
    with pytest.raises(PlanError, match=r"\(plan/test_record\.py:\d+ of 1\)"):
        record(net, (torch.randn(1, 3, 8, 8),), {})


def test_tensors_that_are_neither_parameters_nor_buffers():
    net = Net(lambda net, x: x * net.unregistered + net.unregistered)
    found = record(net, (torch.randn(3, 4),), {})
    ((twin, constant),) = found.constants
    assert constant is net.unregistered and twin.device.type == "meta"
    assert found.calls[0].args[1] is found.calls[1].args[1] is twin


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
        lambda net, x: x * torch.as_tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
        lambda net, x: x * torch.asarray([1.0, 2.0, 3.0, 4.0], device=x.device),
        lambda net, x: x * x.new_tensor([1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_numbers_that_the_module_makes_tensors_of_are_seen(function):
    """Where the device of an argument says nothing of numbers."""
    _, found = calls(function)
    ((_, constant),) = found.constants
    assert constant.tolist() == [1, 2, 3, 4] and constant.dtype == torch.float32


def test_lines_and_modules():
    _, found = calls(lambda net, x: net.inner(x).abs())
    linear, absolute = found.calls
    assert linear.source.endswith(" of inner") and "plan/test_record.py:" in linear.source
    assert absolute.source.startswith("plan/test_record.py:") and " of " not in absolute.source
    assert absolute.function == "abs"


def test_nothing_is_computed_or_changed():
    """The module's own parameters are not touched, nor is a large one allocated."""
    huge = torch.empty(10**6, 10**6, device="meta")  # 4 TB
    net = Net(lambda net, x: x @ x)
    before = net.inner.weight.clone()
    assert record(net, (huge,), {}).result.shape == huge.shape
    assert net.inner.weight.equal(before) and net.inner.weight.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_by_device(dtype):
    net = Net(lambda net, x: net.inner(x) + 1)
    with torch.autocast("cpu", dtype=dtype):
        found = record(net, (torch.randn(2, 4),), {})
    linear, add = found.calls
    assert linear.args[0].dtype == torch.float32 and linear.result.dtype == dtype
    assert add.result.dtype == dtype


def test_a_module_under_an_autocast_of_its_own():
    def function(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = net.inner(x)
        return y.float() + net.inner(x)

    names, found = calls(function)
    first, cast, second, _ = found.calls
    assert (first.result.dtype, second.result.dtype) == (torch.bfloat16, torch.float32)
    assert names[1] == "aten._to_copy.default" and cast.result.dtype == torch.float32


def test_what_a_module_keeps_is_forgotten():
    """As a table that its first call makes."""

    def function(net, x):
        if not hasattr(net, "table"):
            net.table = torch.arange(4, device=x.device) + net.count
        net.seen = x
        return x * net.table

    net = Net(function)
    net.seen = before = torch.ones(3)
    record(net, (torch.randn(2, 4),), {})
    assert net.seen is before and not hasattr(net, "table")
    assert net(torch.ones(2, 4))[1].tolist() == [0, 1, 2, 3]


@functools.lru_cache
def _kept_mask(n, device):
    return torch.arange(n, device=device) % 2 == 0


@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_cache_keeps_is_forgotten(autocast):
    """As k-diffusion keeps the masks of its windows."""
    net = Net(lambda net, x: x * _kept_mask(x.shape[-1], x.device))
    fast, x = accelerate(net), torch.randn(3, 4)
    _kept_mask.cache_clear()
    with torch.autocast("cpu", enabled=autocast):
        for given in (x, x[:2]):
            assert torch.equal(fast(given), net(given))


def _under_autocast_there(net, x):
    with torch.autocast(x.device.type, enabled=False):
        return net.inner(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: x * (2 if x.device.type == "cpu" else 3),
        lambda net, x: x * (2 if (x + 1).device == torch.device("cpu") else 3),
        lambda net, x: x * (2 if next(net.parameters()).is_cpu else 3),
        lambda net, x: x * (2 if x.is_cuda or x.is_meta else x.get_device()),
        lambda net, x: net.inner(x.cpu()) * torch.arange(4, device="cpu"),
        lambda net, x: x * torch.arange(4).to(x.device) + torch.ones(4, device=str(x.device)),
        lambda net, x: x * {x.device: 2}[net.count.device],
        _under_autocast_there,
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_tensors_are_where_the_module_has_them(function, autocast):
    net, x = Net(function), torch.arange(12.0).view(3, 4)
    torch.nn.init.ones_(net.inner.weight)  # of whole numbers, which bfloat16 has
    torch.nn.init.zeros_(net.inner.bias)
    with torch.autocast("cpu", enabled=autocast):
        ours, theirs = accelerate(net)(x), net(x)
    torch.testing.assert_close(ours, theirs)


def test_tensors_on_several_devices():
    found = record(
        Net(lambda net, x: (x.device, net.count.device)), (torch.ones(4, device="meta"),), {}
    )
    assert [device.type for device in found.result] == ["meta", "cpu"]


def test_a_result_that_is_an_argument():
    names, found = calls(lambda net, x: {"x": x, "weight": net.inner.weight, "number": 3})
    assert not names and found.result["number"] == 3
    assert found.result["x"] is found.inputs[0]
    assert found.result["weight"] is found.parameters["inner.weight"]
