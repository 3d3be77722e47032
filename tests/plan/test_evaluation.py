"""What an evaluation launches, and when."""

import torch
from torch import nn

from diffusion.plan.build import evaluated, plan
from diffusion.plan.evaluation import Evaluation
from diffusion.plan.launch.table import launch_reference
from diffusion.plan.trace import trace


class Sum(nn.Module):
    """One term of parameters alone, one of a shared input alone."""

    def __init__(self):
        super().__init__()
        self.shared, self.own = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, shared, x):
        return self.own(x).mul(self.own.weight.mean(1)) + self.shared(shared)


def test_each_node_is_launched_once_what_it_reads_is_known():
    module = Sum().double()
    shared, x = torch.randn(3, 4).double(), torch.randn(3, 8).double()
    made = plan(module, (shared, x))
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    launched = []

    def launch(node, values):
        launched.append(node)
        return launch_reference(node, values)

    known = {}
    first, second = made.graph.inputs
    with torch.no_grad():
        evaluation = Evaluation(made, parameters, launch, (first,), known)
        fixed = list(launched)
        assert set(fixed) == made.schedule.fixed and fixed
        launched.clear()
        term = evaluation.part(first, shared)
        (node,) = launched
        launched.clear()
        for y in (x, 2 * x):
            found = evaluation({node.out: term, second: y})
            torch.testing.assert_close(found, module(shared, y))
        assert len(launched) == 2 * (len(made.schedule.nodes) - len(fixed) - 1)
        launched.clear()
        again = Evaluation(made, parameters, launch, (first,), known)
    assert not launched, "what other plans have made of the parameters is not made again"
    torch.testing.assert_close(again({node.out: term, second: x}), module(shared, x))


def test_what_is_made_of_parameters_is_released_behind_its_last_reader():
    """Copies that are read for another copy alone: those of one parameter are there at a time."""

    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.ParameterList(torch.randn(64, 64).double() for _ in range(8))

        def forward(self, x):
            return sum((x * (p.exp() + 1).sum(1)).sin() for p in self.own)

    module, x = Squares().requires_grad_(False), torch.randn(3, 64).double()
    made, parameters = evaluated(trace(module, (x,))), dict(module.named_parameters())
    large, theirs = [], set(made.graph.parameters.values())

    def launch(node, values):
        found = launch_reference(node, values)
        there = {**values, **found}.items()
        large.append(sum(y.shape == (64, 64) and v not in theirs for v, y in there))
        return found

    with torch.no_grad():
        evaluation = Evaluation(made, parameters, launch)
    assert max(large) == 2 and large[-1] == 0
    torch.testing.assert_close(evaluation({made.graph.inputs[0]: x}), module(x))
