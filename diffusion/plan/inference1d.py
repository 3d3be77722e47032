"""`UNet1d` in real time: its plan over `triton_kernels.conv1d`, see `join.stages`.

A layer is one launch or two: 29 or 57 launches per forward pass at the published size. A block's
FiLM is a linear map of Mish(step embedding, condition), and therefore a sum of two terms: one of
the step, computed once for all steps of a chain, and one of the condition, computed once per chain.

Weights are copied into the order in which the kernels read them, in the backend's dtype; later
changes of the parameters have no effect.
"""

import logging
from types import ModuleType

import torch
from torch import Tensor, nn

from triton_kernels import fused_ops
from triton_kernels.runtime.device import Device, describe

from ..models.unet1d import UNet1d
from .build import Plan, evaluated, states_of
from .evaluation import Evaluation
from .graph import Node, PlanError, Value
from .join.stages import MAX_LENGTH, stages
from .launch.table import launcher_of
from .trace import trace

log = logging.getLogger(__name__)


def real_time(model: nn.Module, length: int) -> "InferenceUNet1d | None":
    """The plan of the network for chunks of that length; None, which the log explains, if its
    backend is not Triton or the kernels have no place for a layer."""
    if not isinstance(model, UNet1d) or model.backend.name != "triton":
        return None
    try:
        _check_length(length)
        return InferenceUNet1d(model)
    except PlanError as why:
        log.info("the network runs layer by layer: %s", why)
        return None


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise PlanError(f"chunks of {length} time steps; at most {MAX_LENGTH}")


def real_time_plan(
    model: UNet1d,
    n: int,
    length: int,
    kernels: ModuleType,  # `triton_kernels.fused_ops` or its reference
    gpu: Device,
) -> Plan:
    """The plan of `model.forward_nhwc`; what it launches does for other n and lengths, too. Its
    inputs are the image [N, 1, T, C], the embedding of the diffusion steps [N, E], the condition
    [N, G] if the model has one, and the row of the steps' table that all samples take, int64 [1],
    or None where each has its own. PlanError: the kernels have no place for a layer."""
    backend = model.backend
    p = next(model.parameters())
    # norms, biases and sums are float32, and float64 in tests of the reference
    wide = torch.promote_types(backend.dtype, torch.float32)
    sizes = [(n, 1, length, model.input_dim), (n, model.embedding_dim)]
    sizes += [] if model.global_cond_dim is None else [(n, model.global_cond_dim)]
    args = tuple(torch.empty(size, dtype=wide, device=p.device) for size in sizes)
    traced = trace(model, args, dtype=wide, forward=model.from_embedding)
    graph = traced.graph
    emb = graph.inputs[1]
    stages(
        graph,
        states_of(model),
        kernels,
        gpu,
        dtype=backend.dtype,
        tf32=backend.allow_tf32,
    )
    graph.why = {node.out: _why(node, emb) for node in graph.nodes}
    return evaluated(traced)


def _why(node: Node, emb: Value) -> list[str]:
    if node.op == "project":
        once = "steps, for all chains" if node.inputs["z"] is emb else "observations, in a call"
        return [f"every block's FiLM, once for the {once}"]
    parts = {"groups": "norm", "columns": "FiLM"}
    joined = [name for attr, name in parts.items() if attr in node.attrs]
    joined += ["residual"] if any(role.startswith("residual") for role in node.inputs) else []
    joined += ["skip connection"] if "skip" in node.inputs else []
    return [f"with the {', '.join(joined)} in front of it"] if joined else []


class InferenceUNet1d:
    """A `UNet1d` as a TabulatedDenoiser (see `chain`), without gradients, from copies of its
    parameters. PlanError: the kernels have no place for a layer."""

    def __init__(
        self,
        model: UNet1d,
        kernels: ModuleType = fused_ops,
        *,
        gpu: Device | None = None,  # None: what is there
    ) -> None:
        self.model = model
        device = next(model.parameters()).device
        gpu = describe(device) if gpu is None else gpu
        made = real_time_plan(model, 2, 4 * model.factor, kernels, gpu)
        self.image, self.emb, *self.cond, self.row = made.graph.inputs
        states = states_of(model)
        parameters = {
            name: states[name].detach().to(self.emb.dtype) for name in made.graph.parameters
        }
        with torch.no_grad():
            shared = self.emb, *self.cond
            self.evaluation = Evaluation(made, parameters, launcher_of(kernels), shared)
            # most parameters are read once, for a copy in another order; the rest are copied here
            theirs = {x.untyped_storage().data_ptr() for x in parameters.values()}
            for value, x in self.evaluation.values.items():
                if x.untyped_storage().data_ptr() in theirs:
                    self.evaluation.values[value] = x.clone(memory_format=torch.contiguous_format)
        self._kept: tuple[Tensor, Tensor] | None = None  # timesteps and what they contribute

    # --- FiLM -------------------------------------------------------------------------------------

    def film_of_steps(self, t: Tensor) -> Tensor:  # [R] -> float32 [R, F]
        """What the diffusion steps t contribute to every block's scale and shift."""
        return self._film(self.emb, self.model.embed(t))

    def film_of_condition(self, cond: Tensor) -> Tensor:  # float [N, G] -> float32 [N, F]
        """What the conditions contribute to it."""
        return self._film(*self.cond, cond)

    def _film(self, given: Value, x: Tensor) -> Tensor:
        return self.evaluation.part(given, x.to(given.dtype).contiguous())

    @torch.no_grad()
    def tabulate(
        self, timesteps: Tensor, labels: Tensor | None, n: int
    ) -> tuple[Tensor, ...]:  # float32 [K, F], and [N, F] if the model has a condition
        """The FiLM of a chain, see `TabulatedDenoiser`. That of the steps is kept for the next."""
        if self._kept is None or self._kept[0] is not timesteps:
            self._kept = timesteps, self.film_of_steps(timesteps)
        self.model.check_condition(labels, n)
        table = self._kept[1]
        return (table,) if labels is None else (table, self.film_of_condition(labels))

    # --- the network ------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(
        self,
        x: Tensor,  # [N, 1, T, C]
        t: Tensor,  # int64 or float [N]
        cond: Tensor | None = None,  # float [N, G], if the model has a condition
    ) -> Tensor:  # float32 [N, 1, T, C]
        """As `UNet1d.forward_nhwc`."""
        self.model.check_inputs(x, t, cond)
        other = () if cond is None else (self.film_of_condition(cond),)
        return self.at_row(x, None, (self.film_of_steps(t), *other))

    @torch.no_grad()
    def at_row(
        self,
        x: Tensor,  # [N, 1, T, C]
        row: Tensor | None,  # int64 [1], on the device: the step of all samples; None: of each
        tables: tuple[Tensor, ...],  # of `tabulate`
    ) -> Tensor:  # float32 [N, 1, T, C]
        """The network behind its FiLM. Nothing in it waits for the host: with a row it can be
        captured for each step of a chain."""
        _check_length(x.shape[2])
        if len(x) == 0:
            return torch.empty_like(x, dtype=self.image.dtype)
        projected = [nodes[-1].out for nodes in self.evaluation.parts.values()]
        given = dict(zip(projected, tables, strict=True))
        given |= {self.image: x.to(self.image.dtype).contiguous(), self.row: row}
        return self.evaluation(given)
