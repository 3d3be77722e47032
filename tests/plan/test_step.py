"""How a training step is cut into launches: groups of gradients of weights, what is held, and what
is made again."""

import pytest
import torch

from diffusion.models.flat_parameters import FlatParameters
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.step import memory, order
from diffusion.plan.step.network import TrainingUNet
from tests.diffusion.test_fused_unet import MODELS, make
from triton_kernels.reference import fused as fused_reference


def planned(name="three_levels", size=(16, 16), **options):
    model = make(MODELS[name], size)
    network = TrainingUNet(
        model, FlatParameters(model, together=TOGETHER), fused_reference, **options
    )
    return network.plan_of(torch.zeros(2, *size, 3).double())


def moves(made, *what):
    return [move for move in made.backward if move.what in what]


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
    assert max(len(move.nodes) for move in groups) == order.MOST
    for move in groups:
        assert len(move.nodes) <= order.MOST
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
    written = [v for m in made.backward for n in (*m.before, *m.nodes) for v in n.outputs.values()]
    assert len(written) == len(set(written))
    assert set(made.placed) <= set(written)


def test_the_last_block_has_all_multiprocessors(waits):
    made = planned()
    at = next(i for i, move in enumerate(made.backward) if move.what == "sums")
    parts = made.backward[:at], made.backward[at:]
    before, behind = ([move.share for move in part if move.what == "weights"] for part in parts)
    assert set(before) == {order.SHARE} and 1.0 in behind


def test_what_is_held_is_released_at_the_smallest_images():
    """Unless others wait for it."""
    kinds = [move.what for move in planned().backward]
    assert (
        kinds.index("hold") < kinds.index("release") < kinds.index("meet") < kinds.index("finish")
    )
    assert not moves(planned(urgent=True), "hold")


def test_filters_are_complete_from_the_last_to_the_first():
    made = planned(urgent=True)
    starts = [move.start for move in moves(made, "ready")]
    assert starts == sorted(starts, reverse=True) and len(set(starts)) == len(starts) > 5


def made_again(made):
    again = ("upsample", "norm_apply", "avg_pool")
    return sum(n.op in again for m in made.backward for n in (*m.before, *m.nodes))


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
    nodes = [node for move in made.backward for node in move.nodes]
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
    assert len(network._plans) == 1
