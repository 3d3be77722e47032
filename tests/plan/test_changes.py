"""What changes around an accelerated module between calls: its layers, their attributes, hooks,
weights from elsewhere; and what a forward pass changes itself."""

import argparse
import copy
import functools
import importlib
import pickle
import random
import sys
import threading
from collections import OrderedDict, deque
from contextvars import ContextVar
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from diffusion import accelerate
from diffusion.plan import reads
from diffusion.plan.graph import PlanError
from diffusion.plan.record import files


class Scaled:
    """A part that is no module, as diffusers' processors."""

    def __init__(self):
        self.scale = 1.0

    def __call__(self, x):
        return x * self.scale


class Slotted:
    __slots__ = ("add",)

    def __init__(self):
        self.add = 0.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep, self.slotted = [[{"of": [0.0, [[1.0]]]}]], Slotted()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.act, self.drop, self.out = nn.SiLU(), nn.Dropout(0.5), nn.Conv2d(4, 3, 1)
        self.register_buffer("mean", torch.zeros(3, 1, 1, dtype=torch.float64))
        self.gain, self.sizes, self.given = 1.0, [2, 2], {"alpha": 1.0}
        inner = SimpleNamespace(of=SimpleNamespace(of=SimpleNamespace(of=[1.0])))
        self.config, self.scaled = SimpleNamespace(shift=0.0, of=inner), Scaled()
        self.method, self.times = Scaled().__call__, functools.partial(torch.mul, other=1.0)
        self.beside = (nn.PReLU(init=1.0).double().requires_grad_(False),)  # which is no part
        self.table, self.step = torch.ones(3, 1, 1, dtype=torch.float64), 0
        self.rows, self.array, self.high = deque([1.0]), np.ones(2), 1.0

    def forward(self, x):
        y = self.drop(self.act(self.norm(self.conv(x - self.mean))))
        y = y + F.avg_pool2d(y, self.sizes).amax((2, 3), keepdim=True)
        y = self.out(y) * self.gain * self.given["alpha"] + self.config.shift
        y = y * self.deep[0][0]["of"][1][0][0] + self.slotted.add
        y = y * self.__dict__.get("wide", 1.0) * vars(self)["high"]
        y = self.beside[0](self.times(self.method(y))) * self.config.of.of.of.of[0]
        return self.scaled(y) * self.table * self.rows[-1] * self.array.tolist()[0]


@pytest.fixture
def nets():
    """A module in evaluation and an accelerated copy, which has a plan; and an input."""
    torch.manual_seed(0)
    module, x = Net().double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    fast = accelerate(copy.deepcopy(module))
    fast(x)
    return module, fast, x


def _lora(net):
    """As adapters are put in, by another forward method."""
    before, added = net.conv.forward, nn.Conv2d(3, 4, 1).double()
    added.requires_grad_(False).weight.fill_(1)
    net.conv.forward = lambda x: before(x) + added(x)


CHANGES = {
    "a number": lambda net: setattr(net, "gain", 2.0),
    "a layer's number": lambda net: setattr(net.norm, "eps", 0.5),
    "in a list": lambda net: net.sizes.__setitem__(0, 4),
    "in a dict": lambda net: net.given.update(alpha=3.0),
    "in a deque": lambda net: net.rows.append(2.0),
    "in an array": lambda net: net.array.__imul__(2),
    "in a configuration": lambda net: setattr(net.config, "shift", 1.0),
    "deep in a list": lambda net: net.deep[0][0]["of"].__setitem__(1, [[2.0]]),
    "deep in a configuration": lambda net: net.config.of.of.of.of.__setitem__(0, 2.0),
    "in a method's object": lambda net: setattr(net.method.__self__, "scale", 0.5),
    "what is asked of vars": lambda net: setattr(net, "high", 2.0),
    "what __dict__ has not": lambda net: net.__dict__.update(wide=2.0),
    "in a partial function": lambda net: net.times.keywords.update(other=2.0),
    "another parameter of no part": lambda net: setattr(
        net.beside[0], "weight", nn.Parameter(net.beside[0].weight * 2, requires_grad=False)
    ),
    "the data of a parameter of no part": lambda net: setattr(
        net.beside[0].weight, "data", net.beside[0].weight * 2
    ),
    "the data of a tensor": lambda net: setattr(net.table, "data", net.table * 2),
    "in slots": lambda net: setattr(net.slotted, "add", 1.0),
    "in an object that is called": lambda net: setattr(net.scaled, "scale", 0.5),
    "a tensor that is no buffer": lambda net: net.table.mul_(2),
    "another tensor": lambda net: setattr(net, "table", torch.full_like(net.table, 3)),
    "another layer": lambda net: setattr(net, "act", nn.ReLU()),
    "a layer of another width": lambda net: setattr(net, "out", nn.Conv2d(4, 1, 1).double()),
    "a hook": lambda net: net.out.register_forward_hook(lambda part, given, y: y * 2),
    "a hook before": lambda net: net.out.register_forward_pre_hook(lambda part, x: (x[0] + 1,)),
    "a method": _lora,
    "a buffer": lambda net: net.mean.add_(1),
    "another buffer": lambda net: setattr(net, "mean", torch.ones_like(net.mean)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_between_calls_counts(nets, what):
    module, fast, x = nets
    before = module(x)
    for net in (module, fast.module):
        torch.manual_seed(1)
        CHANGES[what](net)
    y = module(x)
    assert y.shape != before.shape or (y - before).abs().max() > 1e-3
    torch.testing.assert_close(fast(x), y)
    loss = sum(net(x).square().sum() for net in (module, fast))
    loss.backward()
    for a, b in zip(module.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


OF_CLASSES = {
    "a number": lambda net: setattr(type(net), "gain", 3.0),
    "a method": lambda net: setattr(type(net), "forward", lambda self, x: self.conv(x) + 1),
    "the class of a layer": lambda net: setattr(net.conv, "__class__", Doubled),
    "of an object": lambda net: setattr(type(net.config), "shift", 1.0),
    "a method's": lambda net: setattr(type(net.config), "slope", 2.0),
    "a layer that is no part": lambda net: setattr(net.beside[0], "negative_slope", 0.5),
}


@pytest.mark.parametrize("what", OF_CLASSES)
def test_what_changes_in_classes_counts(what):
    """As tools do that put their own methods into another's network."""

    class Config:
        shift, slope = 0.0, 1.0

        @classmethod
        def times(cls, x):
            return x * cls.slope

    class Small(nn.Module):
        gain = 2.0

        def __init__(self):
            super().__init__()
            self.conv, self.beside = nn.Conv2d(3, 4, 1), [nn.LeakyReLU(0.1)]
            self.config, self.times = Config(), Config.times

        def forward(self, x):
            return self.times(self.beside[0](self.conv(x)) * self.gain) + self.config.shift

    module, x = Small(), torch.randn(2, 3, 4, 4)
    fast = accelerate(module)
    before = fast(x)
    OF_CLASSES[what](module)
    assert (module(x) - before).abs().max() > 1e-3
    torch.testing.assert_close(fast(x), module(x))


GAIN, OPTIONS, CONFIG, TABLE = 2.0, {"gain": [2.0]}, SimpleNamespace(gain=2.0), torch.ones(3, 1, 1)

CONTEXT = ContextVar("context", default=2.0)


class Settings:
    gain = 2.0


SETTINGS = Settings()


def _gain():
    return GAIN


OF_FILES = {
    "a number": (lambda y: y * GAIN, lambda file: file.update(GAIN=3.0)),
    "what another function reads": (lambda y: y * _gain(), lambda file: file.update(GAIN=3.0)),
    "a function": (lambda y: y * _gain(), lambda file: file.update(_gain=lambda: 3.0)),
    "in a dict": (lambda y: y * OPTIONS["gain"][0], lambda file: OPTIONS.update(gain=[3.0])),
    "what a dict has not": (lambda y: y * len(OPTIONS), lambda file: OPTIONS.update(more=0)),
    "in an object": (lambda y: y * CONFIG.gain, lambda file: setattr(CONFIG, "gain", 3.0)),
    "an object": (
        lambda y: y * CONFIG.gain,
        lambda file: file.update(CONFIG=SimpleNamespace(gain=3.0)),
    ),
    "in a class": (lambda y: y * Settings.gain, lambda file: setattr(Settings, "gain", 3.0)),
    "in the class of an object": (
        lambda y: y * SETTINGS.gain,
        lambda file: setattr(Settings, "gain", 3.0),
    ),
    "in a context": (lambda y: y * CONTEXT.get(), lambda file: CONTEXT.set(3.0)),
    "in another file": (lambda y: y * np.gain, lambda file: setattr(np, "gain", 3.0)),
    "a tensor": (lambda y: y * TABLE, lambda file: file.update(TABLE=TABLE * 2)),
    "in a tensor": (lambda y: y * TABLE, lambda file: TABLE.mul_(2)),
}


@pytest.mark.parametrize("what", OF_FILES)
def test_what_changes_in_files_counts(what, monkeypatch):
    """As flags that choose an implementation, and settings that a file keeps for all networks."""
    for name, x in (("GAIN", 2.0), ("_gain", _gain), ("TABLE", torch.ones(3, 1, 1))):
        monkeypatch.setitem(globals(), name, x)
    monkeypatch.setitem(globals(), "CONFIG", SimpleNamespace(gain=2.0))
    monkeypatch.setattr(Settings, "gain", 2.0)
    monkeypatch.setattr(np, "gain", 2.0, raising=False)
    monkeypatch.setitem(globals(), "OPTIONS", {"gain": [2.0]})
    forward, change = OF_FILES[what]
    module, x = Does(lambda net, y, given: forward(y)), torch.randn(1, 3, 4, 4)
    fast = accelerate(module)
    before, plan = fast(x, None), fast.plan_of((x, None), {})[0]
    assert fast.plan_of((x, None), {})[0] is plan
    change(globals())
    assert (module(x, None) - before).abs().max() > 1e-3
    torch.testing.assert_close(fast(x, None), module(x, None))


def _twice(f):
    return lambda *args: f(*args) * 2


PATCHES = {
    "of an instance": lambda net, f: setattr(net, "forward", functools.partial(f, net)),
    "a method of an instance": lambda net, f: setattr(net, "forward", MethodType(f, net)),
    "of a class": lambda net, f: setattr(net, "__class__", type("_", (Does,), {"forward": f})),
    "decorated": lambda net, f: setattr(net, "forward", MethodType(_twice(f), net)),
}


@pytest.mark.parametrize("what", ["a number", "in an object", "an object"])
@pytest.mark.parametrize("patch", PATCHES)
def test_what_changes_in_closures_counts(patch, what):
    """As tools do that patch attention, and are told later how much to do."""
    gain, config = 1.0, SimpleNamespace(gain=1.0)

    def forward(net, x, given):
        return net.layer(x) * gain * config.gain

    module, x = Does(None), torch.randn(1, 3, 4, 4)
    PATCHES[patch](module, forward)
    fast = accelerate(module)
    before, plan = fast(x, None), fast.plan_of((x, None), {})[0]
    assert fast.plan_of((x, None), {})[0] is plan
    if what == "a number":
        gain = 3.0
    elif what == "in an object":
        config.gain = 3.0
    else:
        config = SimpleNamespace(gain=3.0)
    assert (module(x, None) - before).abs().max() > 1e-3
    torch.testing.assert_close(fast(x, None), module(x, None))


class Controller:
    """As tools that steer a network have one, whose method is a hook of it."""

    gain, shift = 1.0, 0.0

    def hook(self, part, given, y):
        return y * self.gain

    def __call__(self, y):
        return y * self.gain


def _with_a_closure(controller):
    return lambda y: y * controller.gain


GIVEN = {
    "a closure": _with_a_closure,
    "a method": lambda controller: functools.partial(controller.hook, None, None),
    "an object that is called": lambda controller: controller,
}


@pytest.mark.parametrize("what", GIVEN)
@pytest.mark.parametrize("of_class", [False, True])
def test_what_changes_in_arguments_counts(what, of_class, monkeypatch):
    """Functions that a call is given, such as those of a guidance."""
    net, x, controller = Does(lambda net, y, f: f(y)), torch.randn(1, 3, 4, 4), Controller()
    fast, function = accelerate(net), GIVEN[what](controller)
    before, plan = fast(x, function), fast.plan_of((x, function), {})[0]
    assert fast.plan_of((x, function), {})[0] is plan
    monkeypatch.setattr(Controller if of_class else controller, "gain", 3.0)
    assert (net(x, function) - before).abs().max() > 1e-3
    torch.testing.assert_close(fast(x, function), net(x, function))


HOOKS = {
    "a method": lambda controller: controller.hook,
    "a closure": lambda controller: lambda part, given, y: y * controller.gain,
    "a partial function": lambda controller: functools.partial(Controller.hook, controller),
}


@pytest.mark.parametrize("what", HOOKS)
def test_what_changes_in_hooks_counts(what):
    """What they know of an object that says how much to do, as those that steer a network."""
    net, x, controller = Does(lambda net, y, given: y), torch.randn(1, 3, 4, 4), Controller()
    net.layer.register_forward_hook(HOOKS[what](controller))
    fast = accelerate(net)
    before, plan = fast(x, None), fast.plan_of((x, None), {})[0]
    assert fast.plan_of((x, None), {})[0] is plan
    controller.gain = 3.0
    assert (net(x, None) - before).abs().max() > 1e-3
    torch.testing.assert_close(fast(x, None), net(x, None))


def test_variables_that_are_called_as_attributes_need_no_other_plan(monkeypatch):
    """As those of a script's steps are, in the file in which its network is; or what else is in an
    object, such as its step."""
    monkeypatch.setitem(globals(), "CONFIG", argparse.Namespace(gain=2.0))
    module = Does(lambda net, y, given: y.abs() + net.count * CONFIG.gain)
    x = torch.randn(1, 3, 4, 4)
    fast, plans = accelerate(module), []
    for step in range(2):
        monkeypatch.setitem(globals(), "abs", step), monkeypatch.setitem(globals(), "count", step)
        CONFIG.step = step
        plans.append(fast.plan_of((x, None), {})[0])
    assert plans[0] is plans[1]


def test_what_the_forward_leaves_in_a_file_needs_no_other_plan(monkeypatch):
    """Such as a count of its calls, which nothing depends on, while another copy counts, too."""
    monkeypatch.setitem(globals(), "OPTIONS", {"calls": 0})

    def counts(net, y, given):
        OPTIONS["calls"] += 1
        return y

    module, x = Does(counts), torch.randn(1, 3, 4, 4)
    fast = accelerate(module)
    plans = [fast.plan_of((x, None), {})[0] for _ in range(2) if module(x, None) is not None]
    assert plans[0] is plans[1]


def test_what_a_forward_asks_of_pytorch_counts():
    """Whether gradients are recorded, also where nothing has one; hooks of every module; and the
    type of new tensors."""
    module = Does(lambda net, y, given: y * (2 if torch.is_grad_enabled() else 1))
    fast, x = accelerate(module.requires_grad_(False)), torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(fast(x, None), module(x, None))
    with torch.no_grad():
        torch.testing.assert_close(fast(x, None), module(x, None))
    of_every = nn.modules.module.register_module_forward_hook
    handle = of_every(lambda part, given, y: y + 1 if isinstance(part, nn.Conv2d) else y)
    try:
        torch.testing.assert_close(fast(x, None), module(x, None))
    finally:
        handle.remove()
    module = Does(lambda net, y, given: y * torch.ones(1))
    fast = accelerate(module)
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert fast(x, None).dtype is module(x, None).dtype is dtype
        finally:
            torch.set_default_dtype(torch.float32)


def test_tf32_as_newer_pytorch_is_told():
    """Whose older flags cannot be asked then."""
    matmul, x = torch.backends.cuda.matmul, torch.randn(1, 3, 4, 4)
    fast, before = accelerate(Does(lambda net, y, given: y)), matmul.allow_tf32
    plan = fast.plan_of((x, None), {})[0]
    try:
        matmul.fp32_precision = "ieee" if before else "tf32"
        assert fast.plan_of((x, None), {})[0] is not plan
    finally:
        matmul.allow_tf32 = before
    assert fast.plan_of((x, None), {})[0] is plan


@pytest.mark.parametrize(
    "draw", [random.random, lambda: random.randint(0, 9), lambda: np.random.rand()]
)
def test_draws_of_the_host_are_refused(draw):
    """By this thread, though not those that another makes meanwhile."""
    x = torch.randn(1, 3, 4, 4)
    with pytest.raises(
        PlanError, match=r"random.* once for all calls.*before the call.*changes.py:\d+"
    ):
        accelerate(Does(lambda net, y, given: y * draw()))(x, None)

    def beside(net, y, given):
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        return y

    net = Does(beside)
    torch.testing.assert_close(accelerate(net)(x, None), net(x, None))


def test_what_the_forward_does_not_read_needs_no_other_plan(nets):
    """Such as a count of steps, or a mode that is as it was."""
    _, fast, x = nets
    plans = []
    for step in range(3):
        fast.step = step
        fast.train().eval()
        plans.append(fast.plan_of((x,), {})[0])
    assert fast.module.step == 2 and plans[0] is plans[1] is plans[2]


def test_nothing_in_pythons_modules_is_compared():
    """A network that knows its backend would have every call compare thousands of names."""
    layer = nn.Linear(2, 2)
    layer.backend = {"ops": torch}
    found = reads.Reads({(id(layer), "backend"): layer})
    assert found.hold() and not found.inner
    layer.backend = {"ops": nn}
    assert not found.hold()


def test_what_layers_share_is_looked_into_once(monkeypatch):
    """Such as einops' patterns, of which a policy's UNet has three in forty layers."""
    layers = [nn.Linear(2, 2) for _ in range(5)]
    pattern = SimpleNamespace(axes=[0, 1])
    for layer in layers:
        layer.patterns = {2: pattern}
    found = reads.Reads({(id(layer), "patterns"): layer for layer in layers})
    asked, state_of = [], reads.state_of
    monkeypatch.setattr(reads, "state_of", lambda x: asked.append(x) or state_of(x))
    assert found.hold() and len(asked) == 1
    pattern.axes.append(2)
    assert not found.hold()


def test_a_switch_has_two_plans(nets):
    _, fast, x = nets
    plans = []
    for gain in (1.0, 2.0, 1.0, 2.0):
        fast.module.gain = gain
        plans.append(fast.plan_of((x,), {})[0])
    assert plans[0] is plans[2] and plans[1] is plans[3] and plans[0] is not plans[1]


def test_attributes_are_set_where_the_module_has_them(nets):
    module, fast, x = nets
    fast.gain, fast.act, fast.mean, fast.mine = 2.0, nn.ReLU(), torch.ones_like(fast.mean), 3
    module.gain, module.act, module.mean = 2.0, nn.ReLU(), torch.ones_like(module.mean)
    torch.testing.assert_close(fast(x), module(x))
    assert fast.module.gain == 2.0 and not hasattr(fast.module, "mine")
    twice = accelerate(fast)
    twice.gain = 3.0
    assert fast.module.gain == 3.0


def test_weights_have_the_modules_names(nets):
    """So that those of either are loaded into the other, also where it is a part."""
    module, fast, x = nets
    assert list(fast.state_dict()) == list(module.state_dict())
    for named in ("named_parameters", "named_buffers"):
        names = [name for name, _ in getattr(module, named)()]
        assert [name for name, _ in getattr(fast, named)()] == names
        inside = [name for name, _ in getattr(nn.ModuleDict({"net": fast}), named)()]
        assert inside == [f"net.{name}" for name in names]
    torch.manual_seed(2)
    other = Net().double().eval()
    fast.load_state_dict(other.state_dict())
    torch.testing.assert_close(fast(x), other(x))
    module.load_state_dict(fast.state_dict())
    torch.testing.assert_close(module(x), other(x))
    whole, plain = (nn.ModuleDict({"net": net}) for net in (fast, Net().double()))
    plain.load_state_dict(whole.state_dict())
    with torch.no_grad():
        plain["net"].out.bias.add_(1)
    whole.load_state_dict(plain.state_dict())
    torch.testing.assert_close(fast(x), other(x) + 1)
    less = {k: v for k, v in other.state_dict().items() if k != "conv.bias"}
    for net in (module, fast):
        with pytest.raises(RuntimeError, match=r'Missing key.*: "conv\.bias"'):
            net.load_state_dict(less)
        found = net.load_state_dict(less | {"other": x}, strict=False)
        assert found.missing_keys == ["conv.bias"] and found.unexpected_keys == ["other"]


def test_a_copy_by_pickle(nets):
    _, fast, x = nets
    torch.testing.assert_close(
        pickle.loads(pickle.dumps(accelerate(fast.module.conv)))(x), fast.conv(x)
    )


def test_an_average_that_knows_parameters_by_name():
    """As latent-diffusion's, which is made before parts of the model are accelerated, one of them a
    layer with parameters of its own; then the whole is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 3, 1), nn.SiLU())).double()
    names, x = [name for name, _ in model.named_parameters()], torch.randn(1, 3, 4, 4).double()
    y = model(x)
    grads = torch.autograd.grad(y.square().sum(), [*model.parameters()])
    model[0], model[1] = accelerate(model[0]), accelerate(model[1])
    for net in (model, accelerate(model)):
        found = dict(net.named_parameters())
        assert [*found] == names == [*net.state_dict()]
        ours = net(x)
        torch.testing.assert_close(ours, y)
        ours = torch.autograd.grad(ours.square().sum(), [*found.values()])
        torch.testing.assert_close(ours, grads)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(nets, reentrant):
    module, fast, x = nets
    grads = []
    for net in (module, fast):
        given = x.clone().requires_grad_()
        checkpoint(net, given, use_reentrant=reentrant).square().sum().backward()
        grads.append([given.grad, *(p.grad for p in net.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_parts_that_are_checkpointed(reentrant):
    """A plan keeps what it needs; gradients are those of the parts as they are."""
    net = Does(lambda net, y, w: checkpoint(net.more, y, use_reentrant=reentrant) * y)
    net.more, x = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.SiLU()), torch.randn(2, 3, 4, 4)
    grads = []
    for run in (net, accelerate(net)):
        net.zero_grad()
        y = run(x, None)
        y.square().sum().backward()
        grads.append((y, *(p.grad for p in net.parameters())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_layers_are_frozen_and_trained_again(nets):
    for net in nets[:2]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            net.requires_grad_(step != 2)
            net.conv.requires_grad_(step != 1)
            net.out.requires_grad_(True)
            optimizer.zero_grad()
            net(nets[2] * (step + 1)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Does(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Conv2d(3, 3, 1)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.zeros(8))

    def forward(self, x, given):
        return self.function(self, self.layer(x), given)


def _count(net, y, given):
    net.count = net.count + 1
    return y


def _append(net, y, given):
    given.append(y)
    return y


def _pop(net, y, given):
    return y + given.pop()


@pytest.mark.parametrize(
    ("function", "why"),
    [(_count, "sets count in its forward"), (_append, "changes a list"), (_pop, "changes a list")],
)
def test_what_a_forward_does_besides_is_refused(function, why):
    x = torch.randn(1, 3, 4, 4)
    with pytest.raises(PlanError, match=why):
        accelerate(Does(function))(x, [x])


def test_a_hook_that_keeps_what_it_gets_is_refused(nets):
    _, fast, x = nets
    kept = []
    handle = fast.module.conv.register_forward_hook(lambda part, given, y: kept.append(y))
    with pytest.raises(PlanError, match=r"hook that returns nothing has no place .*\(conv\)"):
        fast(x)
    handle.remove()
    kept.clear()
    fast.register_forward_hook(lambda part, given, y: kept.append(y))
    assert fast(x) is kept[0]


def test_a_hook_before_that_does_nothing_to_a_call_is_refused(nets):
    """Not one that sets or writes to what the call reads, as an older spectral norm does."""
    module, fast, x = nets
    handle = fast.module.conv.register_forward_pre_hook(lambda part, given: print(given[0].shape))
    with pytest.raises(PlanError, match=r"hook that returns nothing has no place .*\(conv\)"):
        fast(x)
    handle.remove()
    torch.manual_seed(1)
    for net in (module, fast.module):
        nn.utils.weight_norm(net.out)
        net.norm.register_forward_pre_hook(_halves)
        torch.manual_seed(1)
        nn.utils.spectral_norm(net.conv)
    for train in (True, True, False):
        for net in (module, fast):
            net.conv.train(train)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), module(x))
    torch.testing.assert_close(fast.module.norm.bias, module.norm.bias)


@torch.no_grad()
def _halves(part, given):
    part.bias.mul_(0.5)


class Kept(nn.Module):
    """Which keeps tables by size, and what it has computed."""

    def __init__(self):
        super().__init__()
        self.layer, self.tables, self.log = nn.Conv2d(3, 3, 1), {"of": {}}, [1]

    def forward(self, x):
        n, tables = x.shape[-1], self.tables["of"]
        if n not in tables:
            tables[n] = torch.arange(n, device=x.device, dtype=x.dtype)
        self.log.append(x)
        return self.layer(x) * tables[n]


def test_what_a_module_keeps_in_dicts_and_lists_is_not_the_recordings():
    module = Kept()
    fast, x = accelerate(module), torch.randn(2, 3, 4, 4)
    y = fast(x)
    assert module.tables == {"of": {}} and module.log == [1]
    torch.testing.assert_close(y, module(x))
    torch.testing.assert_close(fast(x[:1]), y[:1])


def _by_calls(net, y, given):
    net.calls += 1
    return y * min(net.calls, 5)


def _by_calls_in_a_tensor(net, y, given):
    net.calls += 1
    return y * torch.tensor(float(net.calls))


def _recurrent(net, y, given):
    y = y if net.last is None else y + net.last
    net.last = y.detach()
    return y


def _by_its_first_arguments(net, y, given):
    """As ActNorm begins, which its next call does not do again."""
    if not net.calls:
        with torch.no_grad():
            net.count.copy_(y.mean())
        net.calls = True
    return y - net.count


def _recurrent_in_a_dict(net, y, given):
    y = y + net.kept["last"] if "last" in net.kept else y
    net.kept["last"] = y.detach()
    return y


def _recurrent_in_a_list(net, y, given):
    y = y + net.kept["all"][-1] if net.kept["all"] else y
    net.kept["all"].append(y.detach())
    return y


def _gives_its_first_result(net, y, given):
    """As a network that keeps what it makes of a text."""
    if net.last is None:
        net.last = (y.detach(),)
        return y
    return net.last[0]


def _noise_of_its_first_call(net, y, given):
    if not net.kept["all"]:
        net.kept["all"].append(torch.randn(4, device=y.device))
    return y + net.kept["all"][0]


def _by_calls_in_a_dict(net, y, given):
    net.kept["calls"] = net.kept.get("calls", 0) + 1
    return y * net.kept["calls"]


def _by_a_word(net, y, given):
    first, net.last = net.last is None, "called"
    return y * 2 if first else y


def _by_calls_in_an_object(net, y, given):
    net.told.calls += 1
    return y * net.told.calls


def _kept_by_a_thread(net, y, given):
    """As F5-TTS keeps a text's embedding."""
    if not hasattr(net.local, "last"):
        net.local.last = y.mean()
    return y * net.local.last


def _by_a_set(net, y, given):
    first = "called" not in net.seen
    net.seen.add("called")
    return y * 2 if first else y


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (_by_calls_in_an_object, "something else in its next call, for it changes told"),
        (_by_a_set, "something else in its next call, for it changes seen"),
        (_kept_by_a_thread, "Does reads local, in which it has left what it made"),
        (_recurrent_in_a_dict, "Does reads kept, in which it has left what it made"),
        (_recurrent_in_a_list, "Does reads kept, in which it has left what it made"),
        (_gives_its_first_result, "Does reads last, in which it has left what it made"),
        (_noise_of_its_first_call, "Does reads kept, in which it has left what it .* has drawn"),
        (_by_calls_in_a_dict, "something else in its next call, for it changes kept"),
        (_by_a_word, "something else in its next call, for it changes last"),
        (_by_its_first_arguments, "something else in its next call, for it changes calls"),
        (_by_calls, "something else in its next call, for it changes calls"),
        (_by_calls_in_a_tensor, "something else in its next call, for it changes calls"),
        (_recurrent, "reads last, in which it has left what it made"),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_what_the_next_call_would_read_is_refused(function, why, autocast):
    net = Does(function)
    net.calls, net.last, net.kept = False, None, {"all": []}
    net.told, net.seen, net.local = SimpleNamespace(calls=0), set(), threading.local()
    with pytest.raises(PlanError, match=why), torch.autocast("cpu", enabled=autocast):
        accelerate(net)(torch.ones(1, 3, 4, 4), None)
    assert net.calls == 0 and net.last is None and net.kept == {"all": []}
    assert not vars(net.local)


def _counts(net, y, given):
    net.calls += 1
    return y


def _shows(net, y, given):
    net.last = y.mean()
    return y + net.last


def _table(net, y, given):
    """By a length that is known, as rotary embeddings keep theirs."""
    if y.shape[-1] > net.calls:
        net.calls, net.last = y.shape[-1], torch.arange(y.shape[-1], device=y.device).cos()
    return y * net.last[: y.shape[-1]]


def _table_in_a_buffer(net, y, given):
    """Which is there before, as rotary-embedding-torch has it."""
    n = y.shape[-1]
    if n > net.calls:
        net.table[:n], net.calls = torch.arange(n, device=y.device).cos(), n
        return y * torch.arange(n, device=y.device).cos()
    return y * net.table[:n].detach()


def _table_of_a_shape(net, y, given):
    """In a list, with the shape, which each call says anew."""
    if net.last != tuple(y.shape):
        net.kept["all"] = [torch.arange(y.shape[-1], device=y.device).cos()]
    net.last = tuple(y.shape)
    return y * net.kept["all"][0]


def _moved_table(net, y, given):
    """With numbers before the first call, of which a part is taken at once, as of rotary embeddings
    that are moved to where the image is."""
    net.angles = net.angles.to(y.device)
    return y * net.angles[: y.shape[-1]].cos().view(1, 1, 1, -1)


def _counts_layers(net, y, given):
    """Each call from the beginning, in a dict that parts share, with what each has made."""
    net.layer.kept = net.kept
    net.kept["layer"] = 0
    for _ in range(2):
        net.kept["layer"] += 1
        y = y * net.layer.kept["layer"]
        net.layer.kept["all"].append(y)
    return y


FORGOTTEN = [_counts, _shows, _table, _table_in_a_buffer, _table_of_a_shape, _counts_layers]
FORGOTTEN += [_moved_table]


@pytest.mark.parametrize("function", FORGOTTEN)
def test_what_no_call_would_read_is_forgotten(function):
    net, x = Does(function), torch.randn(1, 3, 4, 4)
    net.calls, net.last, net.kept = 0, None, {"all": []}
    net.angles = torch.arange(9.0)
    fast, other = accelerate(net), copy.deepcopy(net)
    for given in (x, x[..., :3], x):
        torch.testing.assert_close(fast(given, None), other(given, None))
    assert net.calls == 0 and net.last is None and net.kept == {"all": []}


class _Beside:
    """What computes attention for a module, and keeps it."""


@pytest.mark.parametrize("kept", [_Beside(), [], {}, ContextVar("kept", default=None)])
def test_what_is_kept_outside_of_the_module_is_refused(kept):
    def keep(net, y, given):
        if isinstance(kept, _Beside):
            kept.last = y.mean()
        elif isinstance(kept, ContextVar):
            kept.set(y)
        elif isinstance(kept, list):
            kept.append(y)
        else:
            kept["table"] = y.sum()
        return y

    with pytest.raises(
        PlanError, match=r"outside of the module's attributes.*test_changes\.py:\d+"
    ):
        accelerate(Does(keep))(torch.ones(1, 3, 4, 4), None)
    assert not isinstance(kept, ContextVar) or kept.get() is None


_TABLES, _PARTS, _ROWS, _RING = {}, {"of": {}}, [None, "other"], None


class OfASize(Does):
    """Whose class keeps tables, too."""

    rings = {}

    @staticmethod
    def made(n, device):
        return torch.arange(n, device=device).cos()

    @functools.lru_cache  # noqa: B019  as people write it
    def cached(self, n, device):
        return self.made(n, device)


def _in_a_dict(net, y, given):
    n = y.shape[-1]
    if n not in _TABLES:
        _TABLES[n] = net.made(n, y.device)
        _TABLES["made"] = "lazily"
    return y * _TABLES[n]


def _in_a_dict_of_a_dict(net, y, given):
    """Several, of which the dicts are made with them."""
    n, kept = y.shape[-1], _PARTS["of"]
    if y.device not in kept:
        kept[y.device] = {n: net.made(2 * n, y.device).chunk(2)}
    elif n not in kept[y.device]:
        kept[y.device][n] = net.made(2 * n, y.device).chunk(2)
    a, b = kept[y.device][n]
    return y * a + b


def _in_a_list(net, y, given):
    if _ROWS[0] is None or len(_ROWS[0]) != y.shape[-1]:
        _ROWS[0] = net.made(y.shape[-1], y.device)
        _ROWS.append(_ROWS[0] * 2)
        _ROWS.append("lazily")
    return y * _ROWS[0] + _ROWS[-2]


def _in_a_variable(net, y, given):
    global _RING
    if _RING is None or len(_RING) != y.shape[-1]:
        _RING = net.made(y.shape[-1], y.device)
    return y * _RING


def _in_a_class(net, y, given):
    n = y.shape[-1]
    return y * net.rings.setdefault(n, net.made(n, y.device)) + net.cached(n, y.device)


def _in_what_it_imports(net, y, given):
    n, kept = y.shape[-1], importlib.import_module(given)
    if n not in kept.tables:
        kept.tables[n] = net.made(n, y.device)
    return y * kept.tables[n]


class Lazily(OrderedDict):
    """That imports what it is asked of, as transformers' tables of its models do."""

    def _never(self, *args):
        raise ImportError("what it is asked of is not installed")

    __iter__ = __len__ = __getitem__ = keys = values = items = _never


class Unreadable(list):
    __iter__ = __len__ = __getitem__ = Lazily._never


_LAZY = {"models": Lazily(), "rows": Unreadable()}


def _beside_what_cannot_be_read(net, y, given):
    """Which keeps tables itself."""
    n = y.shape[-1]
    table = dict.setdefault(_LAZY["models"], n, net.made(n, y.device))
    list.append(_LAZY["rows"], "lazily")
    return y * table


_KEEPING = [
    _in_a_dict,
    _beside_what_cannot_be_read,
    _in_a_dict_of_a_dict,
    _in_a_list,
    _in_a_variable,
    _in_a_class,
    _in_what_it_imports,
]


@pytest.fixture
def nothing_kept(tmp_path, monkeypatch):
    """Files keep what they did before a test."""
    for at in (_TABLES, _PARTS["of"], OfASize.rings, _LAZY["models"], _LAZY["rows"]):
        at.clear()
    _ROWS[:] = [None, "other"]
    globals()["_RING"] = None
    (tmp_path / "imported_tables.py").write_text("tables = {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_tables", raising=False)


def _kept():
    return _TABLES, _PARTS, _ROWS, _RING, OfASize.rings


@pytest.mark.parametrize("function", _KEEPING)
def test_tables_that_a_file_keeps(function, nothing_kept):
    """In the first call, after which the file has what it had, and the module's own makes them."""
    net, x = OfASize(function), torch.randn(1, 3, 4, 4)
    fast = accelerate(net)
    for given in (x, x[..., :3], x):
        y = fast(given, "imported_tables")
        kept = repr(_kept())
        assert "tensor" not in kept, kept
    assert not _TABLES and _PARTS == {"of": {}} and _RING is None and not OfASize.rings
    assert _ROWS == [None, "other"] and not list.__len__(_LAZY["rows"])
    for _ in range(2):  # and has them in the second
        torch.testing.assert_close(y, net(x, "imported_tables"))
        torch.testing.assert_close(fast(x[:, :, :2], "imported_tables"), y[:, :, :2])


def test_which_files_may_keep_tables(tmp_path, monkeypatch):
    """Of an installed package, all if one of them has something of PyTorch's; the user's do."""
    monkeypatch.setattr(files, "_INSTALLED", (str(tmp_path / "installed"),))
    for at in ("installed/lines_of_text", "installed/layers_of_it", "users_tables"):
        (tmp_path / at).mkdir(parents=True)
        (tmp_path / at / "__init__.py").write_text("tables = {}\n")
    (tmp_path / "installed/layers_of_it/norms.py").write_text("from torch import rsqrt\n")
    for at in (tmp_path, tmp_path / "installed"):
        monkeypatch.syspath_prepend(at)
    packages = {
        name: __import__(name) for name in ("lines_of_text", "layers_of_it", "users_tables")
    }

    def watched():
        return sorted(packages.keys() & files.keeping_files().keys())

    try:
        assert watched() == ["users_tables"]
        importlib.import_module("layers_of_it.norms")
        assert watched() == ["layers_of_it", "users_tables"]
    finally:
        for name in (*packages, "layers_of_it.norms"):
            sys.modules.pop(name, None)
            files._known.pop(name, None)


OF_A_CALL = {
    "an argument": lambda net, y: y.sum(),
    "an argument itself": lambda net, y: y,
    "a parameter": lambda net, y: net.layer.bias.exp(),
    "a buffer": lambda net, y: net.table + 1,
    "a draw": lambda net, y: torch.rand(3) * torch.ones(3),
    "several, with a table": lambda net, y: (torch.arange(3), y.chunk(2)),
    "what is written to": lambda net, y: torch.zeros(3).add_(y.mean()),
}


@pytest.mark.parametrize("what", OF_A_CALL)
def test_what_a_file_keeps_of_a_call_is_refused(what, nothing_kept):
    """And nothing of it stays there; nor where the forward pass raises for another reason."""

    def keep(net, y, given):
        _TABLES[what], _ROWS[0] = OF_A_CALL[what](net, y), torch.arange(3)
        return y.item() if given else y

    net, x = Does(keep), torch.randn(1, 3, 4, 4)
    for given, why in ((None, r"outside of the module's.*test_changes\.py:\d+"), (1, "item of a")):
        with pytest.raises(PlanError, match=why):
            accelerate(net)(x, given)
        assert not _TABLES and _ROWS == [None, "other"]


def test_a_part_of_what_it_has_computed_is_refused():
    """One of several that a call returns."""
    kept = _Beside()

    def keep(net, y, given):
        kept.last = y.chunk(3, 1)[1]
        return y

    with pytest.raises(PlanError, match="outside of the module's attributes"):
        accelerate(Does(keep))(torch.ones(1, 3, 4, 4), None)


def test_parametrizations_are_not_taken_from_a_cache():
    """In which the module itself has left their weights, which others would be given later."""
    module = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    fast, x = accelerate(module.requires_grad_(False)), torch.randn(1, 3, 4, 4)
    with nn.utils.parametrize.cached():
        torch.testing.assert_close(fast(x), module(x))
        torch.testing.assert_close(fast(torch.cat([x, x]))[:1], module(x))
    module.parametrizations.weight.original0.mul_(2)
    torch.testing.assert_close(fast(x), module(x))


def test_a_module_without_shapes_is_refused_until_it_is_called():
    net, x = nn.Sequential(nn.LazyConv2d(4, 1), nn.SiLU()), torch.randn(2, 3, 4, 4)
    fast = accelerate(net)
    for _ in range(2):
        with pytest.raises(
            PlanError, match=r"0\.weight has no shape .*; call the module once before"
        ):
            fast(x)
    torch.testing.assert_close(net(x), fast(x))


def test_a_module_of_torchscript_is_refused():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), torch.jit.script(nn.Conv2d(4, 3, 3)))
    with pytest.raises(PlanError, match=r"a module of TorchScript.*\(1\)"):
        accelerate(net)(torch.ones(1, 3, 4, 4))


def test_two_results_of_one_tensor():
    """Of which one has a gradient, and the other not."""
    net = Does(lambda net, y, w: (net.layer.bias, net.layer.bias.detach(), y))
    x = torch.randn(1, 3, 4, 4)
    first, second, _ = accelerate(net)(x, None)
    assert first.requires_grad and not second.requires_grad
    (grad,) = torch.autograd.grad((first * second).sum(), net.layer.bias)
    assert torch.equal(grad, second)


def test_torch_compile_around_compiles_no_planning(nets):
    module, fast, x = nets
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(lambda x: fast(x * 2).square().mean(), backend="eager")
    x = torch.cat([x, x])
    torch.testing.assert_close(step(x), module(x * 2).square().mean())
    assert torch._dynamo.utils.counters["frames"]["total"] < 10


def test_what_a_module_has_compiled_is_planned_as_it_was_written():
    """A function of its forward, a part, and the whole; no recording is compiled."""
    halve = torch.compile(lambda y: F.gelu(y[:, :2]) * y[:, 2:], backend="eager")
    net = Does(lambda net, y, w: net.last(halve(net.more(y))))
    net.more, net.last = nn.Conv2d(3, 4, 1), torch.compile(nn.Conv2d(2, 3, 1), backend="eager")
    x = torch.randn(2, 3, 4, 4)
    for module in (net, torch.compile(net, backend="eager")):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        y = accelerate(module)(x, None)
        assert not torch._dynamo.utils.counters["frames"]
        torch.testing.assert_close(y, net(x, None))


@pytest.mark.parametrize(
    "around",
    [
        nn.DataParallel,
        lambda net: nn.parallel.DistributedDataParallel.__new__(
            nn.parallel.DistributedDataParallel
        ),
    ],
)
def test_what_hands_a_call_on_goes_around_the_accelerated_module(around):
    with pytest.raises(PlanError, match="Parallel.*around the accelerated module"):
        accelerate(around(nn.Conv2d(3, 3, 1)))


class OfTheBatch(nn.Module):
    """Batch norms and a spectral norm in training, one of them twice, and a count of calls."""

    def __init__(self):
        super().__init__()
        self.conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3, padding=1))
        self.norm, self.plain = nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False, momentum=0.3)
        self.out, self.last = nn.Conv2d(4, 3, 1), nn.BatchNorm1d(3, track_running_stats=False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(4, 1, 1))

    def forward(self, x):
        self.calls += 1
        y = F.relu(self.norm(self.conv(x)))
        y = self.plain(y) + F.silu(self.norm(y))
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0).mean((1, 2), keepdim=True), alpha=0.1)
        return self.last(self.out(y + self.average / self.calls).mean((2, 3)))


def test_buffers_that_a_forward_writes_to():
    """Parameters and buffers are those of the module, step by step, and in evaluation."""
    torch.manual_seed(0)
    module = OfTheBatch().double()
    fast = accelerate(copy.deepcopy(module))
    for net in (module, fast):
        generator = torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(4, 3, 6, 6, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            net(x).sin().square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            net(x)
    assert module.calls == 4 and module.norm.num_batches_tracked == 8
    for name, value in module.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[name], value, msg=name)
    torch.testing.assert_close(fast.eval()(x), module.eval()(x))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        accelerate(nn.BatchNorm1d(3))(torch.ones(1, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True])
def test_buffers_on_a_gpu(low):
    """Behind two steps they are no further from float64 than a few times what the module's are."""
    torch.manual_seed(0)
    exact = OfTheBatch().double().cuda()
    module = copy.deepcopy(exact).float()
    fast = accelerate(copy.deepcopy(module))
    x = torch.randn(8, 3, 12, 12, device="cuda")
    for net in (exact, module, fast):
        for scale in (1, 2):
            with torch.autocast("cuda", torch.bfloat16, enabled=low and net is not exact):
                y = net(x.to(net.average.dtype) * scale)
            y.double().sin().square().sum().backward()
    states = (net.state_dict() for net in (exact, module, fast))
    for (name, c), b, a in zip(next(states).items(), *(s.values() for s in states), strict=True):
        budget = 2 * (b - c).double().norm() + (1e-2 if low else 1e-5) * c.double().norm()
        assert (a - c).double().norm() <= budget, name


def test_a_buffer_that_backward_reads_and_the_forward_changes():
    """The gradient is that of the value that was read; PyTorch's raises here."""
    net = Does(lambda net, y, gain: (y * gain * net.count.add_(1), net.count.mul_(2))[0])
    x = torch.randn(1, 3, 4, 4)
    accelerate(net)(x, 1.0).sum().backward()
    assert net.count == 2
    torch.testing.assert_close(net.layer.bias.grad, torch.full((3,), 16.0))


class OfForcedNorm(nn.Module):
    """A convolution of EDM2 (Karras et al. 2024): in training its filters are written over by
    filters of norm 1, whose gradient is that of the parameter. Another is written to twice, and
    read before and behind."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3))
        self.shift = nn.Parameter(torch.randn(6, 1, 1))

    def _normed(self, w):
        return w / (torch.linalg.vector_norm(w, dim=(1, 2, 3), keepdim=True) + 1e-4)

    @torch.no_grad()
    def _halve(self):
        if self.training:
            self.shift.mul_(0.5)

    def forward(self, x):
        first = (self.shift * 3).sin()
        self._halve()
        if self.training:
            with torch.no_grad():
                self.weight.copy_(self._normed(self.weight))
        y = F.conv2d(x, self._normed(self.weight), padding=1) * first + self.shift
        self._halve()
        return y * y.sin() + self.shift


def test_parameters_that_a_forward_writes_to():
    """Step by step, and in evaluation; where gradients are recorded, they are refused."""
    torch.manual_seed(0)
    module = OfForcedNorm().double()
    fast = accelerate(copy.deepcopy(module))
    for net in (module, fast):
        generator = torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(2, 4, 6, 6, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            net(x).sin().sum().backward()
            optimizer.step()
        with torch.no_grad():
            net(x)
    for p, q in zip(module.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(q, p)
        torch.testing.assert_close(q.grad, p.grad)
    torch.testing.assert_close(fast.eval()(x), module.eval()(x))
    net = Does(lambda net, y, w: y * net.layer.bias.mul_(2)[:, None, None])
    with pytest.raises(PlanError, match="changes layer.bias in its forward"):
        accelerate(net)(torch.ones(1, 3, 4, 4), None)


class Crops(nn.Module):
    """As an encoder of camera pictures begins in training: where it cuts is drawn and read."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU())

    def forward(self, x):
        left = int(torch.randint(0, 3, ()))
        return self.encoder(x[..., left : left + 4])


def test_parts_of_what_is_refused_are_accelerated():
    net, x = Crops(), torch.randn(2, 3, 6, 6)
    with pytest.raises(PlanError, match="__int__ of a tensor.*or accelerate parts that do not ask"):
        accelerate(net)(x)
    torch.manual_seed(1)
    y = net(x)
    net.encoder = accelerate(net.encoder)
    torch.manual_seed(1)
    torch.testing.assert_close(net(x), y)
