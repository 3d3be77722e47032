"""Order, lifetimes and memory: what is said beforehand is what happens."""

import pytest
import torch

from diffusion.plan.build import plan
from diffusion.plan.execute import launch_reference
from diffusion.plan.schedule import (
    BUCKET,
    GROUP,
    SMALL,
    WEIGHT_GRADS,
    arena,
    last_readers,
    lifetimes,
    rounded,
)
from tests.plan.networks import network

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
    p.graph.check_with(p.backward.seeds.values())
    assert len(p.schedule.forward) + len(p.schedule.backward) == len(p.graph.nodes)
    assert all(n.op not in WEIGHT_GRADS for n in p.schedule.forward)


def test_weight_gradients_are_in_groups_on_the_second_stream(made):
    """With the sums and casts behind them; nothing of the chain reads what is made there."""
    _, _, p = made
    run, beside = 0, set()
    for node in p.schedule.backward:
        own = p.schedule.stream[node] == 1
        assert own == (node.op in WEIGHT_GRADS) or (own and node.op in SMALL)
        assert own or beside.isdisjoint(node.inputs.values())
        beside.update(node.outputs.values() if own else ())
        run = run + (node.op in WEIGHT_GRADS) if own else 0
        assert run <= GROUP
    assert all(p.schedule.stream[node] == 0 for node in p.schedule.forward)


def test_what_the_second_stream_reads_is_there_until_the_chain_has_waited(made):
    """The chain waits for a group before the group after the next, and lets go of nothing before
    that; no memory that the second stream may be reading is written by the chain."""
    _, _, p = made
    s = p.schedule
    at = {node: i for i, node in enumerate(s.nodes)}
    awaited = {at[ended]: at[behind] for behind, ended in s.waits.items()}
    end_of = {value: at[node] for node, values in s.last.items() for value in values}
    made_beside = {v for n in s.nodes if s.stream[n] for v in n.outputs.values()}
    ends = sorted(awaited)
    assert len(ends) >= 1
    for node in s.backward:
        if not s.stream[node]:
            continue
        group = next((end for end in ends if end >= at[node]), None)
        free = len(s.nodes) - 1 if group is None else awaited[group]
        for value in node.inputs.values():
            if value in s.place and value not in made_beside:
                assert end_of.get(value, free) >= free


def test_values_live_as_long_as_they_are_read_and_peak_is_what_was_said(made):
    """Runs it, and adds up what is alive: no value is missing, none is left but results, and at no
    time there is more than the arena holds."""
    module, args, p = made
    graph, schedule = p.graph, p.schedule
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    values = dict(zip(graph.inputs, p.traced.leaves(args, {}), strict=True)) | graph.constants
    values |= {v: tensors[name].detach() for name, v in graph.parameters.items()}
    values |= {s: torch.ones(s.shape) for s in p.backward.seeds.values()}
    given = {tensor.untyped_storage().data_ptr() for tensor in values.values()}
    peak = 0
    for node in schedule.nodes:
        with torch.no_grad():
            values.update(launch_reference(node, values))
        for value in node.outputs.values():
            assert values[value].shape == value.shape
        alive = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in values.values()}
        peak = max(peak, sum(rounded(m.nbytes()) for at, m in alive.items() if at not in given))
        for value in schedule.last.get(node, ()):
            values.pop(value, None)
    assert {v for v in values if v in schedule.place} <= {
        *graph.outputs,
        *p.backward.grads.values(),
    }
    assert abs(peak - schedule.peak) <= 0.02 * peak
    assert schedule.peak <= schedule.arena <= 1.1 * schedule.peak  # a tenth of holes, at most


def test_places_of_values_that_live_together_do_not_overlap(made):
    _, _, p = made
    lives = lifetimes(p.schedule.nodes, p.schedule.last)
    assert set(lives) == set(p.schedule.place)
    values = list(lives)
    for i, value in enumerate(values):
        (born, dies), low = lives[value], p.schedule.place[value]
        for other in values[:i]:
            together = lives[other][0] <= dies and born <= lives[other][1]
            start = p.schedule.place[other]
            assert not together or low + value.bytes <= start or start + other.bytes <= low


def test_memory_is_used_again():
    module, args, kwargs = network("diffusers: as diffusers trains")
    sampling = plan(module, args, kwargs).schedule
    every = sum(rounded(v.bytes) for n in sampling.nodes for v in n.outputs.values())
    assert sampling.arena < 0.4 * every
    place, end = arena(sampling.nodes, last_readers(sampling.nodes, set()))
    assert end <= sampling.arena and min(place.values()) == 0


def test_buckets_have_every_gradient_once_and_in_order(made):
    _, _, p = made
    grads = [v for _, bucket in p.schedule.buckets for v in bucket]
    assert sorted(map(id, grads)) == sorted(map(id, set(p.backward.grads.values())))
    made_at = {v: i for i, n in enumerate(p.schedule.nodes) for v in n.outputs.values()}
    for at, bucket in p.schedule.buckets:
        assert max(made_at[v] for v in bucket) == at
        assert sum(v.bytes for v in bucket[:-1]) < BUCKET
