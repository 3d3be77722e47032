"""A plan without gradients, bound to the parameters of its module: what samplers and policies run.

A node is launched as soon as what it reads is known:

    parameters and constants alone      once, when the plan is bound
    an input that many calls share      when that is known (`part`), such as the diffusion steps
    anything else                       in every call
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from .build import Plan
from .execute import Streams, run, run_moves
from .graph import Node, Value, behind_what_they_read, made_of, nodes_for
from .launch.table import filters


class Evaluation:
    """What a plan computes, but for what has been computed before."""

    def __init__(
        self,
        made: Plan,
        parameters: Mapping[str, Tensor],  # by the graph's names; nobody may change them
        launch: Callable[[Node, Mapping], dict],  # such as a `Launcher`
        shared: Sequence[Value] = (),  # inputs that many calls share
        known: dict[str, Tensor] | None = None,  # what plans have made of these parameters
    ) -> None:
        self.inputs, self.launch, fixed = made.graph.inputs, launch, made.schedule.fixed
        (self.result,) = made.graph.outputs
        rest = [node for node in made.schedule.nodes if node not in fixed]
        read = {value for node in rest for value in node.inputs.values()}
        known = {} if known is None else known
        self.values = _of_parameters(made, parameters, launch, known, read)
        # what depends on a shared input and on what is known, and on nothing else
        self.parts = {value: list(made_of({*self.values, value}, rest)) for value in shared}
        before = fixed.union(*self.parts.values())
        self.moves = [move for move in made.schedule.forward if not before.issuperset(move.nodes)]
        self.streams = Streams(next(iter(parameters.values())).device, others=0)

    def part(self, given: Value, x: Tensor) -> Tensor:
        """What nodes make of this shared input alone, to be given for the last one's result."""
        nodes = self.parts[given]
        return run(nodes, self.values | {given: x}, self.launch)[nodes[-1].out]

    def __call__(self, given: Mapping[Value, Tensor | None]) -> Tensor:
        """The result of these inputs, and of parts. An input that a call does not have is None."""
        values = self.values | given
        return run_moves(self.moves, values, self.streams, self.launch)[self.result]


def _of_parameters(
    made: Plan,
    parameters: Mapping[str, Tensor],
    launch: Callable,
    known: dict[str, Tensor],
    read: set[Value],
) -> dict[Value, Tensor]:
    """What is `read` of parameters, constants and what is made of these alone, which is `known` by
    how it is made. Each is made behind what it is made of, and that is released behind it: a copy
    of the parameters in another order is never there beside a second one."""
    graph, device = made.graph, next(iter(parameters.values())).device
    # without what is no longer read, such as buffers of an embedding's layers
    values = {v: parameters[name] for name, v in graph.parameters.items() if name in parameters}
    values |= {value: tensor.to(device) for value, tensor in graph.constants.items()}
    keys = _keys(made)
    new = {v for v in keys if keys[v] not in known}
    fixed = [n for n in made.schedule.nodes if n in made.schedule.fixed]
    needed = nodes_for(new & read, [n for n in fixed if not new.isdisjoint(n.outputs.values())])
    ends = [n for n in needed if not read.isdisjoint(n.outputs.values())]
    needed = behind_what_they_read([*ends, *needed])  # of each end all, before the next end
    last = {value: node for node in needed for value in node.inputs.values()}
    for node in needed:
        others = (value for value in node.inputs.values() if value not in values)
        values |= {value: known[keys[value]] for value in others}  # which another plan has made
        for value, tensor in launch(node, values).items():
            values[value] = filters(tensor) if tensor.ndim == 4 else tensor
            if value in read:
                known[keys[value]] = values[value]
        for value in {*node.inputs.values(), *node.outputs.values()} - read:
            if last.get(value, node) is node:
                values.pop(value, None)
    return {v: values[v] if v in values else known[keys[v]] for v in keys if v in read}


def _keys(made: Plan) -> dict[Value, str]:
    """What parameters, constants and what is made of these alone are, in words."""
    graph, shapes = made.graph, [value.shape for value in made.graph.inputs]
    keys = {value: name for name, value in graph.parameters.items()}
    keys |= {value: f"constant {i} of {shapes}" for i, value in enumerate(graph.constants)}
    for node in made.schedule.nodes:
        if node in made.schedule.fixed:
            inputs = ", ".join(f"{role}={keys[value]}" for role, value in node.inputs.items())
            key = f"{node.op}({inputs}; {sorted(node.attrs.items())})"
            keys |= {value: f"{key}.{role}" for role, value in node.outputs.items()}
    return keys
