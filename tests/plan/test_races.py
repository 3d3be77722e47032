"""No move of a training step reads what another stream may still write, and no memory is used again
while another stream may still read it: happens-before, from the moves' streams and waits alone."""

import pytest
import torch

from diffusion.models.conditions import parts_of
from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.schedule import streams
from diffusion.plan.schedule.moves import MAIN, SECOND, THIRD
from diffusion.plan.step import order
from diffusion.plan.step.network import TrainingUNet
from tests.diffusion.test_fused_unet import MODELS, given, make
from triton_kernels.reference import fused as fused_reference


def of_step(name, listens=True, urgent=False, recompute=False):
    model = make(MODELS[name], (16, 16))
    ready = (lambda start: None) if listens else None
    options = {"recompute": recompute, "ready": ready, "urgent": urgent}
    flat = FlatParameters(model, together=TOGETHER)
    network = TrainingUNet(model, flat, fused_reference, **options)
    context = network.tokens(parts_of(given(model)))
    made = network.plan_of(torch.zeros(2, 16, 16, 3).double(), *context)
    return made.schedule.forward, made.schedule.backward, made.placed


class Clocks:
    """Of each move, which moves of each stream are done before it begins."""

    def __init__(self, moves):
        self.at = {move: i for i, move in enumerate(moves)}
        self.done, last = {}, {}
        for move in moves:
            known = {}
            before = [m for m in (last.get(move.stream), *move.waits) if m is not None]
            for other in before:
                for stream, i in (*self.done[other].items(), (other.stream, self.at[other])):
                    known[stream] = max(known.get(stream, -1), i)
            self.done[move], last[move.stream] = known, move

    def before(self, first, then):
        return self.done[then].get(first.stream, -1) >= self.at[first]


def races(forward, backward, placed=()):
    """Sentences; none if there is no race. `placed`: what is written to memory of its own."""
    moves = [*forward, *backward]
    clocks, found = Clocks(moves), []
    maker = {v: move for move in moves for v in move.made if v not in placed}
    memory = {}  # of views, and of what is written over another
    for move in moves:
        for node in move.all_nodes:
            over = node.inputs.get("x") if node.is_view else None
            for role, value in node.outputs.items():
                source = node.inputs.get(node.attrs.get("over")) if role == "dx1" else over
                memory[value] = memory.get(source, source) if source is not None else value
    touched = {}  # who reads or writes each piece of memory
    for move in moves:
        for value in {*move.reads, *move.made}:
            touched.setdefault(memory.get(value, value), []).append(move)
    for move in moves:
        for value in move.reads:
            first = maker.get(value)
            if first not in (None, move) and not clocks.before(first, move):
                found.append(f"{move.what} reads {value.name}, which {first.what} may still write")
        for node in move.all_nodes:
            source = node.inputs.get(node.attrs.get("over"))
            for other in touched.get(memory.get(source, source), ()) if source is not None else ():
                earlier = clocks.at[other] < clocks.at[move]
                if earlier and not clocks.before(other, move):
                    found.append(f"{source.name} is written over while {other.what} may read it")
    gone = {value: clocks.at[move] for move in moves for value in move.dying}
    dies = {}  # a piece of memory with the last of the values that are in it
    for value in {v for move in moves for v in (*move.reads, *move.made)}:
        at = memory.get(value, value)
        dies[at] = max(dies.get(at, 0), gone.get(value, len(moves)))
    for value, i in dies.items():
        if value not in maker:
            continue
        stream = maker[value].stream  # whose allocator has it
        behind = next((m for m in moves[i + 1 :] if m.stream == stream), None)
        for other in touched[value] if behind is not None else ():
            if clocks.at[other] <= i and not clocks.before(other, behind):
                found.append(f"{value.name} is let go of while {other.what} may read it")
    return found


@pytest.fixture(params=["as it is", "little room", "much is held"])
def room(request, monkeypatch):
    if request.param != "as it is":
        monkeypatch.setattr(streams, "BUDGET", 2**18)
        monkeypatch.setattr(order, "LITTLE", 0)
    if request.param == "much is held":
        monkeypatch.setattr(streams, "LARGE", 0)


@pytest.mark.parametrize(
    "options", [{}, {"listens": False}, {"urgent": True}, {"recompute": True}], ids=str
)
def test_no_races(options, room):
    assert races(*of_step("three_levels", **options)) == []


@pytest.mark.parametrize("urgent", [True, False], ids=["urgent", "at the end"])
@pytest.mark.parametrize("large", [0, streams.LARGE], ids=["held", "not held"])
@pytest.mark.parametrize("name", ["three_levels", "context and all else", "ddpmpp"])
def test_what_is_said_to_be_complete_is(name, large, urgent, monkeypatch):
    """Behind every launch that writes a gradient of a filter from there on, on any stream."""
    monkeypatch.setattr(streams, "LARGE", large)
    forward, backward, placed = of_step(name, urgent=urgent)
    flat = FlatParameters(make(MODELS[name], (16, 16)), together=TOGETHER)
    grads = flat.views(flat.grad)
    ends = {n: g.storage_offset() + g.numel() for n, g in grads.items() if g.ndim > 2}
    clocks, written = Clocks([*forward, *backward]), 0
    for move in backward:
        if move.what != "ready":
            continue
        for other in backward:
            names = {placed[v].name for v in other.made if v in placed}
            if any(ends.get(name, 0) > move.start for name in names):
                assert clocks.before(other, move), names
                written += 1
    assert written > 10


@pytest.mark.parametrize("name", MODELS)
def test_no_races_in_any_network(name, monkeypatch):
    monkeypatch.setattr(streams, "BUDGET", 2**18)
    monkeypatch.setattr(streams, "LARGE", 0)
    assert races(*of_step(name)) == []


def test_a_wait_less_is_a_race(monkeypatch):
    """Of each kind: what the chain, the second and the third stream wait for."""
    monkeypatch.setattr(streams, "BUDGET", 2**18)
    monkeypatch.setattr(streams, "LARGE", 0)
    for stream in (MAIN, SECOND, THIRD):
        made = of_step("three_levels")
        assert races(*made) == []
        waiting = [m for m in made[1] if m.stream == stream and m.waits]
        assert waiting
        for move in waiting:
            move.waits = ()
        assert races(*made)
