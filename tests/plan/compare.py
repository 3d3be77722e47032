"""A module beside its plan: results and gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from diffusion.models.layers import set_backend
from diffusion.plan.differentiate import differentiate
from diffusion.plan.execute import run
from diffusion.plan.graph import Graph
from diffusion.plan.norms import split_norms
from diffusion.plan.trace import trace
from diffusion.runtime.backend import Backend
from triton_kernels import reference

FLOAT64 = Backend("torch", reference, torch.float64)


def in_float64(module: nn.Module) -> nn.Module:
    set_backend(module, FLOAT64)
    return module.double()


@dataclass
class Compared:
    """A module's results and gradients, the plan's, and the plan."""

    results: list[tuple[Tensor, Tensor]]
    grads: dict[str, tuple[Tensor | None, Tensor | None]]  # by parameter; "x0", ... of inputs
    graph: Graph
    output: object  # of the plan, as the module would return it

    def error(self) -> float:
        """The largest difference of a result, by the largest element of it."""
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in self.results)

    def gradient_error(self) -> float:
        """Likewise of a gradient, but not by less than 1e-3 of the largest of all: some are zero
        but for rounding, such as that of a key's bias."""
        pairs = [(a, b) for a, b in self.grads.values() if b is not None]
        scale = max(float(b.abs().max()) for _, b in pairs)
        assert scale > 0
        return max(
            float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * scale) for a, b in pairs
        )


def compare(module: nn.Module, args: tuple, kwargs: dict | None = None, **options) -> Compared:
    """Both, of the forward pass and of the gradients of all parameters and floating-point inputs
    under a random gradient of the result."""
    kwargs = kwargs or {}
    traced = trace(module, args, kwargs)
    graph = traced.graph
    split_norms(graph)
    parameters = {k: p for k, p in module.named_parameters() if p.requires_grad}
    inputs = traced.leaves(args, kwargs)
    wanted = {f"x{i}": v for i, v in enumerate(graph.inputs) if v.dtype.is_floating_point}
    wanted |= {name: graph.parameters[name] for name in parameters if name in graph.parameters}
    backward = differentiate(graph, list(wanted.values()))
    graph.check(backward.seeds.values())
    if "rewrite" in options:
        backward = options["rewrite"](graph, backward) or backward

    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    flat, spec = pytree.tree_flatten((args, kwargs))
    for at, leaf in zip(traced.given, leaves, strict=True):
        flat[at] = leaf
    args, kwargs = pytree.tree_unflatten(flat, spec)
    theirs = [y for y in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(y, Tensor)]
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in theirs]
    sources = {f"x{i}": x for i, x in enumerate(leaves) if x.requires_grad} | parameters
    made = torch.autograd.grad(theirs, list(sources.values()), seeds, allow_unused=True)

    values = dict(zip(graph.inputs, inputs, strict=True)) | graph.constants
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    values |= {value: tensors[name].detach() for name, value in graph.parameters.items()}
    with torch.no_grad():
        run(graph.nodes[: backward.start], values)
        ours = [values[v] for v in graph.outputs[: len(theirs)]]  # without buffers written to
        for value, seed in zip(graph.outputs, seeds, strict=False):
            if value in backward.seeds:
                values[backward.seeds[value]] = seed
        run(graph.nodes[backward.start :], values)
    grads = {}
    for (name, _), theirs_grad in zip(sources.items(), made, strict=True):
        value = backward.grads.get(wanted[name]) if name in wanted else None
        grads[name] = (None if value is None else values[value], theirs_grad)
    results = [(a, b.detach()) for a, b in zip(ours, theirs, strict=True)]
    return Compared(results, grads, graph, traced.assemble(ours))
