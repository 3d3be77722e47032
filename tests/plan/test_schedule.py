"""Order, lifetimes and memory: what is said beforehand is what happens."""

import pytest
import torch

from diffusion.plan.build import plan
from diffusion.plan.graph import Node, Value
from diffusion.plan.launch.table import launch_reference
from diffusion.plan.ops import WEIGHT_GRADS
from diffusion.plan.schedule import streams
from diffusion.plan.schedule.moves import MAIN, SECOND, Move, nodes_of
from diffusion.plan.schedule.order import GROUP, SMALL
from diffusion.plan.schedule.streams import alive, rounded
from tests.plan.networks import network
from tests.plan.test_races import races

NETWORKS = [
    "diffusers: film, residual blocks resample",
    "ours: unet.cu's",
    "policy: film",
]


@pytest.fixture(params=NETWORKS, scope="module")
def made(request):
    module, args, kwargs = network(request.param)
    return module, args, plan(module, args, kwargs, trains=True)


def test_nodes_follow_what_they_read(made):
    _, _, p = made
    p.graph.check(p.backward.seeds.values())
    assert set(p.schedule.nodes) == set(p.graph.nodes)
    assert len(p.schedule.nodes) == len(p.graph.nodes)
    assert all(n.op not in WEIGHT_GRADS for n in nodes_of(p.schedule.forward))


def test_weight_gradients_are_in_groups_on_the_second_stream(made):
    """With the sums and casts behind them; nothing of the chain reads what is made there."""
    _, _, p = made
    beside = set()
    assert all(move.stream == MAIN for move in p.schedule.forward)
    for move in p.schedule.backward:
        kinds = [node.op for node in move.all_nodes]
        if move.stream == MAIN:
            assert not {*kinds} & {*WEIGHT_GRADS} and beside.isdisjoint(move.reads)
            continue
        assert move.stream == SECOND and {*kinds} <= {*WEIGHT_GRADS, *SMALL}
        assert sum(kind in WEIGHT_GRADS for kind in kinds) <= GROUP
        beside |= move.made


def test_the_streams_have_no_races(made, monkeypatch):
    module, args, p = made
    assert races(p.schedule.forward, p.schedule.backward) == []
    monkeypatch.setattr(streams, "BUDGET", 2**12)
    little = plan(module, args, trains=True).schedule
    assert any(move.what == "wait" for move in little.backward)
    assert races(little.forward, little.backward) == []


def test_operands_of_gradients_in_no_piece_yet_count_as_kept():
    part = Value("x", (streams.BUDGET // 4,), torch.int8)

    def move(what):
        made = {"y": Value("y", (1,), torch.int8)}
        return Move(what, (Node("linear_dw", {"x": part}, made),))

    pieces = [move("beside") for _ in range(4)]
    assert all(m.what != "wait" for m in streams.on_streams(pieces, False))
    path = Move("launch")
    *_, wait, last, piece = streams.on_streams([*pieces, move("later"), path], False)
    assert (wait.what, last.what, piece.what) == ("wait", "launch", "beside")
    (oldest,) = wait.waits
    assert oldest.nodes == pieces[0].nodes


def test_values_live_as_long_as_they_are_read_and_memory_is_what_was_said(made):
    """Runs it, and adds up what is alive during each move: no value is missing, and none but
    results is left, and what the second stream may still read."""
    module, args, p = made
    graph = p.graph
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    values = dict(zip(graph.inputs, p.traced.leaves(args, {}), strict=True)) | graph.constants
    values |= {v: tensors[name].detach() for name, v in graph.parameters.items()}
    values |= {s: torch.ones(s.shape) for s in p.backward.seeds.values()}
    given = {tensor.untyped_storage().data_ptr() for tensor in values.values()}
    start, found = set(values), []
    for move in p.schedule.moves:
        for node in move.all_nodes:
            with torch.no_grad():
                results = launch_reference(node, values)
            # in memory of their own, as what a kernel of Triton makes is
            own = not node.is_view
            values.update({v: x.clone() if own else x for v, x in results.items()})
            for value in node.outputs.values():
                assert values[value].shape == value.shape
        there = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in values.values()}
        found.append(sum(rounded(m.nbytes()) for at, m in there.items() if at not in given))
        for value in move.dying:
            values.pop(value, None)
    beside = {v for m in p.schedule.moves if m.stream for v in (*m.reads, *m.made)}
    assert values.keys() - start <= {*graph.outputs, *p.backward.grads.values(), *beside}
    said = alive(p.schedule.moves)
    assert max(said) == p.schedule.peak
    for there, expected in zip(found, said, strict=True):
        assert abs(there - expected) <= 0.02 * max(found)


def test_memory_is_used_again():
    module, args, kwargs = network("diffusers: as diffusers trains")
    sampling = plan(module, args, kwargs).schedule
    every = sum(rounded(v.bytes) for n in sampling.nodes for v in n.outputs.values())
    assert sampling.peak < 0.4 * every
