"""Views say where the elements are that PyTorch's views have."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import diffusion.plan.trace  # noqa: F401  which knows the lowerings
from diffusion.plan.execute import run
from diffusion.plan.graph import Graph
from diffusion.plan.lower.table import LOWERINGS, Lowering
from diffusion.plan.views import Views, whole

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


def step(draw, x):
    """One of PyTorch's views of x, as the name of an op and its arguments."""
    kind = draw(st.sampled_from(["permute", "unsqueeze", "view", "slice", "select", "expand"]))
    at = draw(st.integers(0, x.ndim - 1)) if x.ndim else 0
    if kind == "permute":
        return kind, (draw(st.permutations(range(x.ndim))),)
    if kind == "unsqueeze":
        return kind, (at,)
    if kind == "expand":
        return "expand", ([n if n != 1 else 3 for n in x.shape],)
    if kind == "view":
        shape, rest = [], x.numel()
        while rest > 1 and len(shape) < 3:
            n = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
            shape, rest = [*shape, n], rest // n
        return kind, ([*shape, rest],)
    if x.ndim == 0:
        return "unsqueeze", (0,)
    if kind == "select":
        return kind, (at, draw(st.integers(0, x.shape[at] - 1)))
    start = draw(st.integers(0, x.shape[at] - 1))
    return "slice", (at, start, draw(st.integers(start + 1, x.shape[at])))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SIZES, st.data())
def test_gather_of_any_chain_of_views(sizes, data):
    x = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    graph = Graph()
    value = graph.value("x", x.shape, x.dtype)
    low, view, y = Lowering(graph), whole(value), x
    for _ in range(data.draw(st.integers(1, 5))):
        name, args = step(data.draw, y)
        y = getattr(torch.ops.aten, "reshape" if name == "view" else name)(y, *args)
        low.name, low.meta = f"aten.{name}", y
        answered = name in ("view", "expand")  # by the result's shape
        view = LOWERINGS[name](low, view, *(() if answered else args))
        assert view.shape == y.shape
    if data.draw(st.booleans()):
        view = low.views.owned(view)
    result = low.gather(view)
    values = run(graph.nodes, {value: x})
    assert torch.equal(values[result], y)


def test_a_chain_that_comes_back_copies_nothing():
    graph = Graph()
    value = graph.value("x", (2, 3, 4, 6), torch.float32)
    low, view = Lowering(graph), whole(value)
    low.meta = torch.empty(2, 6, 12)
    nchw = LOWERINGS["permute"](low, view, [0, 3, 1, 2])
    tokens = LOWERINGS["view"](low, nchw)
    back = LOWERINGS["transpose"](low, tokens, 1, 2)
    assert low.views.rows(back) is value
    assert not graph.nodes


@pytest.mark.parametrize(
    ("start", "stop", "step", "is_view"),
    [(0, 4, 1, True), (4, 12, 1, True), (5, 8, 2, True), (2, 6, 1, False), (0, 12, 2, False)],
)
def test_parts_of_an_axis_that_two_make(start, stop, step, is_view):
    """Of one step of the outer, or of whole ones, they are a view."""
    x = torch.arange(2.0 * 3 * 5 * 4).view(2, 3, 5, 4)
    graph = Graph()
    view = whole(graph.value("x", x.shape, x.dtype)).permute((0, 2, 1, 3)).reshape((2, 5, 12))
    part = view.narrow(2, start, stop, step)
    assert (part is not None) == is_view
    if is_view:
        y = Views(graph).gather(part)
        found = run(graph.nodes, {view.value: x})[y]
        assert torch.equal(found, x.transpose(1, 2).reshape(2, 5, 12)[..., start:stop:step])
