"""How a training step is cut into launches: groups of gradients of weights, what is held, and what
is made again."""

import inspect
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.schedule import schedule, streams
from diffusion.plan.schedule.moves import MAIN, SECOND, THIRD
from diffusion.plan.schedule.streams import rounded
from diffusion.plan.step import memory, network as network_module, order
from diffusion.plan.step.network import TrainingUNet
from tests.diffusion.test_fused_unet import MODELS, given, make
from triton_kernels.reference import fused as fused_reference


def planned(name="three_levels", size=(16, 16), **options):
    """A plan whose backward pass somebody listens to."""
    model = make(MODELS[name], size)
    flat, ready = FlatParameters(model, together=TOGETHER), lambda start: None
    network = TrainingUNet(model, flat, fused_reference, ready=ready, **options)
    return network.plan_of(torch.zeros(2, *size, 3).double())


def moves(made, *what):
    return [move for move in made.schedule.backward if move.what in what]


def images(node):
    return node.inputs["x"].shape[:3]


def taps(node):
    return tuple(node.out.shape[2:4]) or (1, 1)


@pytest.fixture
def waits(monkeypatch):
    """Activations are large enough for groups over several layers."""
    monkeypatch.setattr(order, "LITTLE", 0)


def test_weights_of_one_size_go_together(waits):
    groups = moves(planned(), "weights")
    assert max(len(move.nodes) for move in groups) == order.GROUP
    for move in groups:
        assert len(move.nodes) <= order.GROUP
        assert len({(images(node), taps(node)) for node in move.nodes}) == 1


def test_weights_of_small_activations_do_not_wait_for_other_layers():
    made = planned()
    assert all(len(layers(move, made)) == 1 for move in moves(made, "weights"))


def layers(move, made):
    names = [made.placed[node.out].name for node in move.nodes]
    return {order._LAYER.match(name).group() for name in names}


def test_large_groups_do_not_wait(waits, monkeypatch):
    monkeypatch.setattr(order, "GROUP_BYTES", 1)
    made = planned()
    assert all(len(layers(move, made)) == 1 for move in moves(made, "weights"))


def test_every_gradient_is_written_once():
    made = planned("guided_diffusion")
    written = [
        v for m in made.schedule.backward for n in (*m.before, *m.nodes) for v in n.outputs.values()
    ]
    assert len(written) == len(set(written))
    assert set(made.placed) <= set(written)


def test_the_last_block_has_all_multiprocessors(waits):
    made = planned()
    at = next(i for i, move in enumerate(made.schedule.backward) if move.what == "sums")
    parts = made.schedule.backward[:at], made.schedule.backward[at:]
    before, behind = ([move.share for move in part if move.what == "weights"] for part in parts)
    assert set(before) == {order.SHARE} and 1.0 in behind


@pytest.fixture(scope="module")
def order_of():
    """What there is to do in backward, of a model with three levels, and what stays: urgent or
    not."""
    return {urgent: ordered(urgent) for urgent in (False, True)}


def ordered(urgent):
    on_streams, set_lifetimes, seen = streams.on_streams, streams.set_lifetimes, []

    def noted(order, listens):
        seen.append(list(order))
        return on_streams(seen[0], listens)

    def noted_kept(moves, kept):
        seen.append(kept)
        set_lifetimes(moves, kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "on_streams", noted)
        patch.setattr(schedule, "set_lifetimes", noted_kept)
        planned(urgent=urgent)
    return seen


@pytest.fixture
def streamed(order_of):
    def make(urgent=False):
        order, kept = order_of[urgent]
        made = streams.on_streams(order, listens=True)
        streams.set_lifetimes(made, kept)
        return made

    return make


def held(made):
    return [move for move in made if move.stream == THIRD and move.nodes]


def launches(made):
    """All that moves launch, in words."""
    return [(m.what, [str(n) for n in m.all_nodes], m.share) for m in made if m.what != "ready"]


def on(made, stream):
    return [move for move in made if move.stream == stream]


def test_what_is_held_is_released_at_the_smallest_images(streamed, monkeypatch):
    """Beside the chain's launches of these, on the third stream, if it is large."""
    assert not held(streamed())
    monkeypatch.setattr(streams, "LARGE", 0)
    made = streamed()
    at = [made.index(move) for move in held(made)]
    assert len(at) > 2 and at == list(range(at[0], at[-1] + 1))
    sizes = [pixels(m) for m in made[at[-1] :] if m.stream == MAIN and pixels(m)]
    assert sizes[0] == min(sizes) == 4 * 4
    before = [pixels(m) for m in made[: at[0]] if m.stream == MAIN and pixels(m)]
    assert min(before) > 4 * 4


@pytest.mark.parametrize("large", [0, streams.LARGE], ids=["held", "not held"])
def test_others_that_wait_change_no_launch(streamed, monkeypatch, large):
    """They are told more often how much is complete, and that is all."""
    monkeypatch.setattr(streams, "LARGE", large)
    launched, told = [], []
    for urgent in (False, True):
        made = streamed(urgent=urgent)
        launched.append([launches(on(made, stream)) for stream in (MAIN, SECOND, THIRD)])
        told.append([move.start for move in made if move.what == "ready"])
    assert launched[0] == launched[1]
    assert set(told[0]) <= set(told[1]) and len(told[1]) > len(told[0]) > 0


def pixels(move):
    dys = [n.inputs[role] for n in move.nodes for role in ("dy", "dz", "da") if role in n.inputs]
    return dys[0].shape[1] * dys[0].shape[2] if dys and len(dys[0].shape) == 4 else None


def test_no_more_is_held_than_there_is_room_for(streamed, monkeypatch):
    monkeypatch.setattr(streams, "LARGE", 0)
    everything = held(streamed())
    monkeypatch.setattr(streams, "HELD_BUDGET", sum(v.bytes for v in everything[0].reads))
    assert 1 <= len(held(streamed())) < len(everything)


def test_pieces_see_what_was_there_when_they_were_given_and_are_launched_later(streamed):
    """Behind the next launch of the chain, most of them, so that the graph's first successor of
    what they wait for is the chain's."""
    made, found = streamed(), 0
    for i, move in enumerate(made):
        if move.stream != SECOND:
            continue
        before = move.waits[0]
        at = made.index(before)
        assert before.stream == MAIN and before.is_awaited and at < i
        later = {v for other in made[at + 1 :] if other.stream == MAIN for v in other.made}
        assert not set(move.reads) & later
        found += any(other.stream == MAIN for other in made[at + 1 : i])
    assert found > 3


def test_the_chain_waits_once_too_much_is_kept(streamed, monkeypatch):
    """For the oldest piece, and lets go of what it alone has read; never for the last."""
    assert all(move.what != "wait" for move in streamed())
    monkeypatch.setattr(streams, "BUDGET", 0)
    made = streamed()
    waits = [move for move in made if move.what == "wait"]
    assert len(waits) > 5 and any(move.dying for move in waits)
    awaited = [piece for move in waits for piece in move.waits]
    pieces = on(made, SECOND)
    assert awaited == pieces[: len(awaited)] and pieces[-1] not in awaited


def test_what_other_streams_read_is_there_until_the_chain_has_waited(streamed, monkeypatch):
    """It is not let go of, and no dx is written over it."""
    monkeypatch.setattr(streams, "BUDGET", 2**18)
    reading, busy_once = set(), False
    for move in streamed():
        reading = {(m, v) for m, v in reading if move.what != "wait" or m not in move.waits}
        reading |= {(move, v) for v in move.reads} if move.stream != MAIN else set()
        busy = {v for _, v in reading}
        over = {n.inputs[n.attrs["over"]] for n in move.nodes if "over" in n.attrs}
        assert not busy & (over | set(move.dying))
        busy_once |= bool(busy)
    assert busy_once


def test_the_two_streams_wait_for_each_other_where_they_meet(streamed, monkeypatch):
    monkeypatch.setattr(streams, "LARGE", 0)
    made = streamed()
    at = {move: i for i, move in enumerate(made)}
    pairs = [(m, other) for m in made for other in m.waits]
    across = [(m, other) for m, other in pairs if MAIN not in (m.stream, other.stream)]
    assert {(m.stream, other.stream) for m, other in across} == {(SECOND, THIRD), (THIRD, SECOND)}
    sums = next(at[move] for move in made if move.what == "sums")
    assert all(at[other] < at[m] and at[other] < sums for m, other in across)


class Held(TorchDispatchMode):
    """Bytes of memory that PyTorch has made within the block and that is still there."""

    def __init__(self):
        super().__init__()
        self.bytes, self._known = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            memory = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if memory is None or memory.data_ptr() in self._known or not memory.nbytes():
                continue
            given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
            if any(a.untyped_storage().data_ptr() == memory.data_ptr() for a in given):
                continue
            self._known.add(memory.data_ptr())
            self.bytes += rounded(memory.nbytes())
            weakref.finalize(memory, self._gone, memory.data_ptr(), rounded(memory.nbytes()))
        return result

    def _gone(self, at, size):
        self._known.discard(at)
        self.bytes -= size


def in_own_memory(kernel):
    """A kernel of the reference whose results are no views of others, as those of Triton's are."""

    def launch(*args, **options):
        out = options.get("out")
        kept = () if out is None else (out.data_ptr(),)
        made = kernel(*args, **options)
        return tree_map_only(torch.Tensor, lambda x: x if x.data_ptr() in kept else x.clone(), made)

    return launch


@pytest.mark.parametrize(
    ("name", "recompute"), [("three_levels", True), ("guided_diffusion", False)]
)
def test_memory_is_what_was_said(name, recompute, monkeypatch):
    """Behind every launch of a step, within 2 % of the peak."""
    monkeypatch.setattr(streams, "BUDGET", 2**18)
    model = make(MODELS[name], (16, 16))
    flat = FlatParameters(model, together=TOGETHER)
    kernels = {
        name: in_own_memory(f) if inspect.isfunction(f) else f
        for name, f in vars(fused_reference).items()
    }
    network = TrainingUNet(model, flat, SimpleNamespace(**kernels), recompute)
    x, t = torch.randn(2, 16, 16, 3).double(), torch.tensor([3, 700])
    made, found, level = network.plan_of(x), [], [0]
    with Held() as held:
        run = network_module._Call._run

        def running(call, moves):
            level.append(held.bytes - level[0])  # what the caller has made meanwhile
            run(call, moves)
            level[0] = held.bytes - level.pop()

        monkeypatch.setattr(network_module._Call, "_run", running)
        network.watch = lambda move, values: found.append(held.bytes - level[1])
        y = network(x, t, given(model), rng=torch.tensor([5, 11]))
        y.backward(torch.randn_like(y))
    said = made.schedule.alive()
    assert len(found) == len(said) and abs(max(found) - max(said)) <= 0.02 * max(found)
    for move, there, expected in zip(made.schedule.moves, found, said, strict=True):
        assert abs(there - expected) <= 0.02 * max(found), move


def test_filters_are_complete_from_the_last_to_the_first():
    made = planned(urgent=True)
    starts = [move.start for move in moves(made, "ready")]
    assert starts == sorted(starts, reverse=True) and len(set(starts)) == len(starts) > 5


def made_again(made):
    again = ("upsample", "norm_apply", "avg_pool")
    return sum(n.op in again for m in made.schedule.backward for n in (*m.before, *m.nodes))


def test_what_is_made_again(monkeypatch):
    assert made_again(planned()) == 0
    # the activations behind both norms of a block, and what was upsampled
    assert made_again(planned(recompute=True)) > 10
    monkeypatch.setattr(memory, "MUCH", 0)
    made = planned(size=(8, 12))
    assert made_again(made) == 1, "of two images, that whose products are not made on the small one"
    assert any(n.op == "sum_pool" for m in moves(made, "weight") for n in m.before)


def test_dx_is_written_over_what_nobody_else_reads():
    made = planned()
    nodes = [node for move in made.schedule.backward for node in move.nodes]
    for node in nodes:
        if "over" in node.attrs:
            value = node.inputs[node.attrs["over"]]
            assert sum(value in other.inputs.values() for other in nodes) == 1
    assert any("over" in node.attrs for node in nodes)


def test_another_first_sample_needs_no_other_plan():
    model = make(MODELS["dropout"])
    network = TrainingUNet(model, FlatParameters(model, together=TOGETHER), fused_reference)
    x, t, rng = torch.randn(2, 8, 12, 3).double(), torch.tensor([3, 700]), torch.tensor([5, 11])
    for first in (0, 4):
        y = network(x, t, rng=rng, first=first)
        torch.testing.assert_close(y, model.forward_nhwc(x, t, rng=rng, first=first))
    assert len(network.plans) == 1
