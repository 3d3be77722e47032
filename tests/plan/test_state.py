"""Every way in which a forward pass may keep something for its next call: a plan computes what the
module does in each of three calls, or is refused with the place, and the module is as it was."""

import functools
import importlib
import itertools
import random
import re
import sys
from array import array
from collections import OrderedDict, deque
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn

from diffusion import accelerate
from diffusion.plan.graph import PlanError
from diffusion.plan.record import files as known_files


class Told:
    """An object that is no module, as diffusers' processors."""

    step = 0

    def __init__(self):
        self.calls, self.inner = 0, []

    def count(self):
        self.calls += 1
        return self.calls


class Slotted:
    __slots__ = ("calls",)


class Net(nn.Module):
    """Whose forward pass is a function of it, between two layers."""

    steps, seen = 0, []

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.conv = function, nn.Conv2d(3, 3, 1)
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.calls, self.last, self.kept, self.all = 0, None, {"n": 0}, []
        self.set, self.rows, self.told = set(), deque([1, 2], maxlen=2), Told()
        self.slotted, self.deep = Slotted(), [{"of": SimpleNamespace(told=Told())}]
        self.slotted.calls, self.array, self.word = 0, np.ones(2), "once"
        self.ordered = OrderedDict(a=1.0, b=2.0)
        self.numbers, self.count = (n for n in range(1, 99)), itertools.count(1)
        self.listed, self.next_of = iter([1, 2, 3, 4, 5, 6, 7]), itertools.count(1).__next__
        self.host, self.rng = random.Random(0), np.random.default_rng(0)
        self.state = np.random.RandomState(0)
        self.adds = functools.partial(_added, {"n": 0})
        self.method = Told().count

    def forward(self, x):
        return self.function(self, self.conv(x))


def _added(kept, n):
    kept["n"] += n
    return kept["n"]


# ways that change what the next call computes

STEP, COUNTED, LIST, ROWS, NUMBERS, OBJECT = 0, {"of": [0]}, [], deque(), np.ones(2), Told()
BESIDE, BYTES, WEAK = nn.Identity(), array("i", [0]), WeakKeyDictionary()
NEXT, EVERY = itertools.count(1), (n for n in range(1, 99))


class Config:
    """Of no part."""

    step = 0


def _attribute(net, y):
    net.calls += 1
    return y * net.calls


def _by_its_dict(net, y):
    net.__dict__["calls"] += 1
    return y * net.__dict__["calls"]


def _dict(net, y):
    net.kept["n"] += 1
    return y * net.kept["n"]


def _list(net, y):
    net.all.append(1)
    return y * len(net.all)


def _set(net, y):
    net.set.add(len(net.set))
    return y * len(net.set)


def _order_of_a_dict(net, y):
    net.ordered.move_to_end("a" if next(iter(net.ordered)) == "a" else "b")
    return y * next(iter(net.ordered.values()))


def _deque(net, y):
    net.rows.append(net.rows[-1] + 1)
    return y * net.rows[0]


def _object(net, y):
    return y * net.told.count()


def _list_in_an_object(net, y):
    net.told.inner.append(1)
    return y * len(net.told.inner)


def _object_in_an_object(net, y):
    return y * net.deep[0]["of"].told.count()


def _slot(net, y):
    net.slotted.calls += 1
    return y * net.slotted.calls


def _array(net, y):
    net.array += 1
    return y * float(net.array[0])


def _array_as_a_tensor(net, y):
    net.array[1] += 1
    return y * torch.tensor(net.array.tolist()).to(y).sum()


def _word(net, y):
    first, net.word = net.word == "once", "again"
    return y * 2 if first else y


def _deleted(net, y):
    first = hasattr(net, "last")
    if first:
        del net.last
    return y * 2 if first else y


def _swapped(net, y):
    net.a, net.b = net.b, net.a
    return net.a(y)


def _new_part(net, y):
    first = not hasattr(net, "new")
    if first:
        net.new = nn.ReLU()
    return y if first else net.new(y)


def _deleted_part(net, y):
    if hasattr(net, "b"):
        del net.b
        return net.a(y)
    return y


def _registered(net, y):
    y = y * net.kept_buffer if hasattr(net, "kept_buffer") else y
    if not hasattr(net, "kept_buffer"):
        net.register_buffer("kept_buffer", y.detach().mean())
    return y


def _tensor(net, y):
    y = y if net.last is None else y + net.last
    net.last = y.detach()
    return y


def _first_without_a_table(net, y):
    if net.last is None:
        net.last = torch.arange(4.0, device=y.device)
        return y * 2
    return y * net.last


def _tensor_in_an_object(net, y):
    last, net.told.last = getattr(net.told, "last", None), y.detach()
    return y if last is None else y + last


def _generator(net, y):
    return y * next(net.numbers)


def _count(net, y):
    return y * next(net.count)


def _list_iterator(net, y):
    return y * next(net.listed)


def _next_of_a_count(net, y):
    return y * net.next_of()


def _zipped(net, y):
    return y * next(zip(net.count, net.listed, strict=False))[1]


def _random(net, y):
    return y * net.host.random()


def _numpy_generator(net, y):
    return y * net.rng.random()


def _numpy_state(net, y):
    return y * net.state.rand()


def _partial(net, y):
    return y * net.adds(1)


def _method(net, y):
    return y * net.method()


def _result(net, y):
    net.calls += 1
    return y, net.calls


def _wiring(net, y):
    """The same calls, of other tensors."""
    net.calls += 1
    z = y.sin()
    return (y if net.calls % 2 else z) * 3


def _raises(net, y):
    """In its second call, to a recording."""
    net.calls += 1
    return y if net.calls == 1 else y * y.amax().item()


def _global(net, y):
    global STEP
    STEP += 1
    return y * STEP


def _global_dict(net, y):
    COUNTED["of"][0] += 1
    return y * COUNTED["of"][0]


def _global_list(net, y):
    LIST.append(1)
    return y * len(LIST)


def _global_deque(net, y):
    ROWS.append(1)
    return y * len(ROWS)


def _global_array(net, y):
    NUMBERS[0] += 1
    return y * float(NUMBERS[0])


def _global_object(net, y):
    return y * OBJECT.count()


def _global_module(net, y):
    """Which is no part."""
    BESIDE.calls += 1
    return y * BESIDE.calls


def _global_bytes(net, y):
    BYTES[0] += 1
    return y * BYTES[0]


def _weak(net, y):
    WEAK[net] = WEAK.get(net, 0) + 1
    return y * WEAK[net]


def _global_count(net, y):
    return y * next(NEXT)


def _global_generator(net, y):
    return y * next(EVERY)


def _global_tensor(net, y):
    if LIST:
        return y + LIST[0]
    LIST.append(y.detach())
    return y


def _of_another_file(net, y):
    import state_of_a_file

    return y * state_of_a_file.counted()


def _class(net, y):
    type(net).steps += 1
    return y * net.steps


def _class_list(net, y):
    net.seen.append(1)
    return y * len(net.seen)


def _class_of_no_part(net, y):
    Config.step += 1
    return y * Config.step


def _class_of_an_object(net, y):
    type(net.told).step += 1
    return y * net.told.step


def _function_attribute(net, y):
    _function_attribute.calls += 1
    return y * _function_attribute.calls


def _default(net, y, kept=[]):  # noqa: B006  which is what is tested
    kept.append(1)
    return y * len(kept)


def _named_default(net, y, *, kept={"n": 0}):  # noqa: B006
    kept["n"] += 1
    return y * kept["n"]


def _cell():
    n = 0

    def forward(net, y):
        nonlocal n
        n += 1
        return y * n

    return forward


def _cell_behind_a_decorator():
    def counted(function):
        calls = [0]

        @functools.wraps(function)
        def call(net, y):
            calls[0] += 1
            return function(net, y) * calls[0]

        return call

    @counted
    def forward(net, y):
        return y

    return forward


def _cell_of_an_iterator():
    numbers = itertools.count(1)
    return lambda net, y: y * next(numbers)


REFUSED = {
    _attribute: "calls of Net",
    _by_its_dict: "calls of Net",
    _dict: "kept of Net",
    _list: "all of Net",
    _set: "set of Net",
    _order_of_a_dict: "ordered of Net",
    _deque: "rows of Net",
    _object: "told of Net",
    _list_in_an_object: "told of Net",
    _object_in_an_object: "deep of Net",
    _slot: "slotted of Net",
    _array: "array of Net",
    _array_as_a_tensor: "array of Net",
    _word: "word of Net",
    _deleted: "last of Net",
    _swapped: "a of Net and b of Net",
    _new_part: "new of Net",
    _deleted_part: "b of Net|sets b",
    _registered: "Net reads kept_buffer",
    _tensor: "Net reads last",
    _first_without_a_table: "last of Net",
    _tensor_in_an_object: "Net reads told",
    _generator: "numbers of Net",
    _count: "count of Net",
    _list_iterator: "listed of Net",
    _next_of_a_count: "next_of of Net",
    _zipped: "(count|listed) of Net",
    _random: "host of Net",
    _numpy_generator: "rng of Net",
    _numpy_state: "state of Net",
    _partial: "adds of Net",
    _method: "method of Net",
    _result: "calls of Net",
    _wiring: "calls of Net",
    _raises: "calls of Net",
    _global: r"STEP of .*test_state\.py",
    _global_dict: r"COUNTED of .*test_state\.py",
    _global_list: r"LIST of .*test_state\.py",
    _global_deque: r"ROWS of .*test_state\.py",
    _global_array: r"NUMBERS of .*test_state\.py",
    _global_object: r"OBJECT of .*test_state\.py",
    _global_module: r"BESIDE of .*test_state\.py",
    _global_bytes: r"BYTES of .*test_state\.py",
    _weak: r"WEAK of .*test_state\.py",
    _global_count: r"NEXT of .*test_state\.py",
    _global_generator: r"EVERY of .*test_state\.py",
    _global_tensor: r"test_state\.py",
    _of_another_file: r"CALLS of .*state_of_a_file\.py",
    _class: "steps of the class Net",
    _class_list: "seen of the class Net",
    _class_of_no_part: "step of the class Config",
    _class_of_an_object: "step of the class Told",
    _function_attribute: "calls of _function_attribute",
    _default: "kept of _default",
    _named_default: "kept of _named_default",
    _cell: "n of _cell",
    _cell_behind_a_decorator: "calls of _cell_behind",
    _cell_of_an_iterator: "numbers of _cell_of_an_iterator",
}

# ways that no call's result depends on

TABLE, READY, ARRAY, LOG, math2 = None, False, None, {"lines": 0}, None
WARNED: set = set()


def _unread_count(net, y):
    net.calls += 1
    net.told.count()
    net.rows.append(1)
    net.array += 1
    return y


def _unread_global(net, y):
    global STEP
    STEP += 1
    LOG["lines"] += 1
    type(net).steps += 1
    return y


def _flag(net, y):
    global READY
    if not READY:
        assert y.ndim == 4
        READY = True
    return y


def _warns_once(net, y):
    if "it" not in WARNED:
        WARNED.add("it")
    return y


def _checks_once(net, y):
    """By calls of which nothing is read."""
    global READY
    if not READY:
        torch.isfinite(y).all()
        READY = True
    return y


def _table_and_unread_count(net, y):
    global TABLE
    net.calls += 1
    if TABLE is None:
        TABLE = torch.arange(y.shape[-1], device=y.device).cos()
    return y * TABLE


def _lazy_import(net, y):
    global math2
    if math2 is None:
        import math as math2
    return y * math2.pi


def _lazy_table(net, y):
    global TABLE
    if TABLE is None:
        TABLE = torch.arange(y.shape[-1], device=y.device).cos()
    return y * TABLE


def _lazy_table_and_flag(net, y):
    global TABLE, READY
    if not READY:
        TABLE, READY = torch.arange(y.shape[-1], device=y.device).cos(), True
    return y * TABLE


def _lazy_numbers(net, y):
    global ARRAY
    if ARRAY is None:
        ARRAY = np.linspace(0, 1, y.shape[-1])
    return y * torch.tensor(ARRAY.tolist()).to(y)


def _lazy_buffer(net, y):
    """As lucidrains keeps masks."""
    if not hasattr(net, "mask"):
        net.register_buffer("mask", torch.ones(y.shape[-1], device=y.device), persistent=False)
    return y * net.mask


def _lazy_table_in_an_object(net, y):
    if net.told.calls < y.shape[-1]:
        net.told.calls = y.shape[-1]
        net.told.table = torch.arange(y.shape[-1], device=y.device).cos()
    return y * net.told.table


def _table_of_a_cell():
    table, n = None, 0

    def forward(net, y):
        nonlocal table, n
        if n < y.shape[-1]:
            table, n = torch.arange(y.shape[-1], device=y.device).cos(), y.shape[-1]
        return y * table

    return forward


def _memo():
    kept = {}

    def forward(net, y):
        n = y.shape[-1]
        if n not in kept:
            kept[n] = torch.arange(n, device=y.device).cos()
        return y * kept[n]

    return forward


@functools.lru_cache
def _cosines(n, device):
    return torch.arange(n, device=device).cos()


def _cached(net, y):
    return y * _cosines(y.shape[-1], y.device)


def _own_iterator(net, y):
    """Which each call makes anew."""
    numbers = itertools.count(1)
    return y * next(numbers) * next(numbers)


def _lazy_iterator(net, y):
    net.last = iter([1, 2])
    return y * next(net.last) * next(net.last)


def _deletes_what_it_sets(net, y):
    net.scratch = y * 2
    y = net.scratch + y
    del net.scratch
    return y


PLANNED = [
    _unread_count,
    _unread_global,
    _flag,
    _warns_once,
    _checks_once,
    _table_and_unread_count,
    _lazy_import,
    _lazy_table,
    _lazy_table_and_flag,
    _lazy_numbers,
    _lazy_buffer,
    _lazy_table_in_an_object,
    _table_of_a_cell,
    _memo,
    _cached,
    _own_iterator,
    _lazy_iterator,
    _deletes_what_it_sets,
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Another file, and this one as it is before a call."""
    text = "CALLS = 0\n\n\ndef counted():\n    global CALLS\n    CALLS += 1\n    return CALLS\n"
    (tmp_path / "state_of_a_file.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "state_of_a_file", raising=False)
    here = globals()
    yield lambda: here.update(state_of_a_file=importlib.import_module("state_of_a_file"))
    sys.modules.pop("state_of_a_file", None)
    here.pop("state_of_a_file", None)


def _made(way, files):
    """The module, before its first call, whatever others have done."""
    sys.modules.pop("state_of_a_file", None)
    files()
    here, before = globals(), [0, {"of": [0]}, [], deque(), np.ones(2), Told()]
    here.update(zip("STEP COUNTED LIST ROWS NUMBERS OBJECT".split(), before, strict=True))
    here.update(NEXT=itertools.count(1), EVERY=(n for n in range(1, 99)))
    here.update(TABLE=None, READY=False, ARRAY=None, math2=None)
    LOG["lines"], Config.step, Told.step, Net.steps = 0, 0, 0, 0
    WARNED.clear(), Net.seen.clear(), _cosines.cache_clear()
    _function_attribute.calls = BESIDE.calls = BYTES[0] = 0
    _default.__defaults__[0].clear(), _named_default.__kwdefaults__["kept"].update(n=0)
    return Net(way if way.__code__.co_argcount else way())


def _called(net, train, calls=3):
    """Results and gradients of each call."""
    net.train(train)
    found = []
    for i in range(calls):
        x = torch.linspace(-1, 1, 2 * 3 * 4).reshape(1, 3, 2, 4) + i
        y = net(x.requires_grad_())
        first = y[0] if isinstance(y, tuple) else y
        grads = torch.autograd.grad(
            first.sin().sum(), [x, *net.parameters()], allow_unused=True, materialize_grads=True
        )
        found.append((y, *grads[:3]))
    return found


@pytest.mark.parametrize("known", [False, True])
def test_a_file_that_python_does_not_know_by_its_name(known, tmp_path, monkeypatch):
    """Since it was loaded by its path, without an entry in sys.modules, or into another since."""
    path = tmp_path / "net_by_path.py"
    path.write_text(
        "CALLS = 0\n\n\ndef add(net, y):\n    global CALLS\n    CALLS += 1\n    return y + CALLS\n"
    )
    spec = importlib.util.spec_from_file_location("net_by_path", path)
    file, other = (importlib.util.module_from_spec(spec) for _ in range(2))
    spec.loader.exec_module(file)
    if known:
        monkeypatch.setitem(sys.modules, "net_by_path", other)
    with pytest.raises(PlanError, match="changes CALLS of .*net_by_path"):
        accelerate(Net(file.add))(torch.ones(1, 3, 2, 2))
    assert file.CALLS == 0


def test_objects_of_libraries_without_tensors_are_not_looked_into(tmp_path, monkeypatch):
    """Such as a notebook's shell, of which other threads write the history."""
    monkeypatch.setattr(known_files, "_INSTALLED", (str(tmp_path),))
    (tmp_path / "shell_of_lines.py").write_text("class Shell:\n    lines = 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        shell = importlib.import_module("shell_of_lines").Shell()

        def written(net, y):
            shell.lines += 1
            return y

        accelerate(Net(written))(torch.ones(1, 3, 2, 2))
        assert shell.lines == 1
    finally:
        sys.modules.pop("shell_of_lines"), known_files._known.pop("shell_of_lines")


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("way", [*REFUSED, *PLANNED], ids=lambda f: f.__name__[1:])
def test_a_way_to_keep_state(way, train, files):
    theirs = _called(_made(way, files), train)
    net = _made(way, files)
    try:
        ours = _called(accelerate(net), train)
    except PlanError as error:
        assert way in REFUSED, error
        assert re.search(REFUSED[way], str(error)), error
        ours = _called(net, train)  # which is what it was
    else:
        assert way in PLANNED, [y[0] for y in ours]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
