"""What libraries and users set on an accelerated module, as on the module itself."""

import copy
import functools
import types

import pytest
import torch
from torch import nn

from diffusion import accelerate
from diffusion.plan.graph import PlanError


class Net(nn.Module):
    """Which asks for names that it may not have."""

    gain = 1.0

    def __init__(self):
        super().__init__()
        self.conv, self.shift = nn.Conv2d(3, 3, 3, padding=1), 0.5

    @property
    def slope(self):
        return self.shift * 2

    @slope.setter
    def slope(self, value):
        self.shift = value / 2

    def forward(self, x):
        y = self.conv(x) * self.gain + self.shift
        y = y * getattr(self, "factor", 1.0)
        return self.head(y) if hasattr(self, "head") else y


@pytest.fixture
def nets():
    """A module, an accelerated copy, and an input."""
    torch.manual_seed(0)
    module = Net()
    return module, accelerate(copy.deepcopy(module)), torch.randn(2, 3, 4, 4)


def _deleted_and_set(net):
    net.note, net.shift = 1, 3.0
    del net.shift, net.note
    net.shift = 2.0


SET = {
    "a number of the class": lambda net: setattr(net, "gain", 2.0),
    "a property": lambda net: setattr(net, "slope", 4.0),
    "a name that forward asks for": lambda net: setattr(net, "factor", 2.0),
    "a part": lambda net: setattr(net, "head", nn.Conv2d(3, 2, 1)),
    "a part without parameters": lambda net: setattr(net, "head", nn.ReLU()),
    "an added part": lambda net: net.add_module("head", nn.Conv2d(3, 2, 1)),
    "a parameter": lambda net: setattr(net, "factor", nn.Parameter(torch.full((1,), 3.0))),
    "a registered parameter": lambda net: net.register_parameter(
        "factor", nn.Parameter(torch.full((1,), 3.0))
    ),
    "a buffer": lambda net: net.register_buffer("factor", torch.full((1,), 3.0)),
    "deleted and set": _deleted_and_set,
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("what", SET)
def test_what_is_set_counts(nets, what, called):
    """Before the first call, or behind it: results, gradients, states and their names."""
    module, fast, x = nets
    before = module(x)
    if called:
        fast(x)
    for net in (module, fast):
        torch.manual_seed(1)
        SET[what](net)
    y = module(x)
    assert y.shape != before.shape or (y - before).abs().max() > 1e-2
    torch.testing.assert_close(fast(x), y)
    for net in (module, fast):
        net(x).square().sum().backward()
    assert list(fast.state_dict()) == list(module.state_dict())
    theirs = dict(module.named_parameters())
    ours = dict(fast.named_parameters())
    assert [*ours] == [*theirs]
    for name, p in theirs.items():
        torch.testing.assert_close(ours[name].grad, p.grad, msg=name)


def test_a_name_set_again_is_set_where_it_is(nets):
    _, fast, x = nets
    y = fast(x)
    for factor in (2.0, 3.0):
        fast.factor = factor
        torch.testing.assert_close(fast(x), y * factor)
    del fast.factor
    torch.testing.assert_close(fast(x), y)
    with pytest.raises(AttributeError, match="no attribute 'factor'"):
        del fast.factor


@pytest.mark.parametrize(
    "name", ["_device", "_launch", "_plans", "_states", "run", "_call", "_key"]
)
def test_names_of_a_library_are_its_own(nets, name):
    """As Lightning's Fabric notes a `_device` on every part."""
    module, fast, x = nets
    setattr(fast, name, torch.device("cpu"))
    torch.testing.assert_close(fast(x), module(x))
    assert getattr(fast, name) == torch.device("cpu") and not hasattr(fast.module, name)


def test_a_tool_that_puts_another_part_in_the_place_of_each():
    """Such as PyTorch's conversion of batch norms, which the module had itself as a part after."""
    module, x = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval(), torch.randn(2, 3, 4, 4)
    fast = nn.SyncBatchNorm.convert_sync_batchnorm(accelerate(copy.deepcopy(module)))
    assert type(fast.module[1]) is nn.SyncBatchNorm and len(list(fast.modules())) == 4
    torch.testing.assert_close(fast(x), module(x))


def test_a_forward_around_one_that_was_replaced(nets):
    """As mixed precision is put around a module that another library has changed."""
    module, fast, x = nets
    for net in (module, fast.module):
        net.forward = functools.partial(lambda forward, x: forward(x) * 2, net.forward)
    torch.testing.assert_close(fast(x), module(x))
    for net in (module, fast):
        net.forward = functools.partial(lambda forward, x: forward(x) + 1, net.forward)
    torch.testing.assert_close(fast(x), module(x))
    assert "forward" in vars(fast)
    fast.forward = types.MethodType(Net.forward, fast.module)  # the module's own again
    torch.testing.assert_close(fast(x), Net.forward(module, x))
    assert "forward" not in vars(fast)


def _hook(net, factor):
    """As a library does that moves a module's arguments: it keeps the forward that was there."""
    if hasattr(net, "_hook"):
        _unhook(net)
    net._hook, net._old = factor, net.forward
    net.forward = functools.partial(lambda net, x: net._old(x) * net._hook, net)


def _unhook(net):
    del net._hook
    net.forward = net._old
    del net._old


def test_a_library_takes_off_what_it_has_put_on_before(nets):
    module, fast, x = nets
    _hook(module, 2.0)
    _hook(fast.module, 2.0)
    torch.testing.assert_close(fast(x), module(x))
    for change in (_unhook, lambda net: _hook(net, 3.0), lambda net: _hook(net, 4.0), _unhook):
        for net in (module, fast):
            change(net)
        torch.testing.assert_close(fast(x), module(x))
    fast.module.conv.register_full_backward_hook(lambda *given: None)
    with pytest.raises(PlanError, match="backward hook"):  # for it is planned
        fast(x)
