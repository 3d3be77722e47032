"""Parameters and buffers are those that the module has now, and are named only if others than
before."""

import pytest
import torch
from torch import nn

from diffusion.plan.build import states_of
from diffusion.plan.calls import module_states
from diffusion.plan.calls.module_states import ModuleStates


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


def _replaces(net: nn.Module) -> None:
    net[0].weight = nn.Parameter(torch.zeros(4, 3))


def _registers(net: nn.Module) -> None:
    net[2].register_buffer("more", torch.ones(2))


def _removes(net: nn.Module) -> None:
    net[1].register_buffer("running_var", None)


def _moves(net: nn.Module) -> None:
    del net[2][0].bias
    net[2].bias = net[0].bias


def _replaces_a_part(net: nn.Module) -> None:
    net[2] = nn.Linear(4, 2)


def _shares(net: nn.Module) -> None:
    net[0].bias = net[1].bias


@pytest.mark.parametrize(
    "change", [_replaces, _registers, _removes, _moves, _replaces_a_part, _shares]
)
def test_as_the_module_has_them_now(change):
    net, states = _network(), ModuleStates()
    for what in (lambda net: None, change):
        what(net)
        states.read(net)
        expected = states_of(net)
        assert list(states.by_name) == list(expected)
        assert all(states.by_name[name] is x for name, x in expected.items())


def _half(net: nn.Module) -> None:
    net.half()  # of the same parameters


def _freezes(net: nn.Module) -> None:
    net[0].weight.requires_grad_(False)


def _of_another_shape(net: nn.Module) -> None:
    net[0].bias.data = torch.zeros(5)


@pytest.mark.parametrize("change", [_half, _freezes, _of_another_shape, _registers])
def test_what_plans_depend_on_has_a_number(change):
    net, states = _network(), ModuleStates()

    def number(gradients: bool = True) -> int:
        states.read(net)
        return states.kind(gradients)

    first, without = number(), number(gradients=False)
    assert first != without and number() == first and number(gradients=False) == without
    change(net)
    assert number() not in (first, without)
    assert (number(gradients=False) == without) == (change is _freezes)


def test_names_are_not_asked_for_again(monkeypatch):
    net, states = _network(), ModuleStates()
    states.read(net)
    monkeypatch.setattr(module_states, "states_of", pytest.fail)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
    states.read(net)


def test_of_a_module_without_any():
    states = ModuleStates()
    states.read(nn.SiLU())
    assert states.by_name == {} and states.kind(True) == states.kind(False)
