"""Runs the plan of a training step: forward and backward of a UNet, planned together. Gradients are
written into a flat buffer, or added to it."""

import logging
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn

from triton_kernels import fused_ops as fused
from triton_kernels.fused_float32 import in_float32
from triton_kernels.fused_tf32 import in_tf32

from ...models.blocks import ResBlock
from ...models.conditions import Conditions, Given, parts_of
from ...models.flat_parameters import FlatParameters
from ...models.unet import UNet
from ...runtime.backend import Backend
from ..embedding import EmbeddingLayers, Step
from ..execute import Streams, run_moves
from ..graph import Value
from ..launch.table import Launcher
from ..schedule.moves import Move
from .others import TrainingNetwork
from .places import EMB
from .plan import StepPlan, step_plan

DTYPES = (torch.bfloat16, torch.float16)
_DRAW = 4  # channels that one evaluation of the generator draws for

log = logging.getLogger(__name__)


def training_network(
    model: nn.Module,
    flat: FlatParameters,
    recompute: bool = False,  # keep fewer activations, see `step.memory`
    ready: Callable[[int], None] | None = None,  # told how far backward is, see `GradientSum`
    urgent: bool = False,  # it wants to know as early as can be
) -> Callable[..., Tensor]:
    """What a training step calls as `forward_nhwc`: the plan of a `UNet`, that of another network,
    or the model itself on PyTorch's backend."""
    backend = model.backend
    refusal, kernels = "it is for the Triton backend", step_kernels(backend)
    if kernels is not None:
        refusal = TrainingUNet.refusal(model)
        if refusal is None:
            return TrainingUNet(model, flat, kernels, recompute, ready, urgent)
    if recompute:
        log.warning("train.recompute has no effect without the plan of a UNet: %s", refusal)
    return model.forward_nhwc if kernels is None else TrainingNetwork(model, flat)


def step_kernels(backend: Backend) -> ModuleType | SimpleNamespace | None:
    """What the plan of a step launches in the backend's precision; None: PyTorch has no plan."""
    if backend.name != "triton":
        return None
    if backend.dtype in DTYPES:
        return fused
    return in_tf32(fused) if backend.allow_tf32 else in_float32(fused)


class TrainingUNet:
    """Runs a `UNet` by its plan. `refusal` says whether it can. The first call for images of a
    shape traces and plans it."""

    def __init__(
        self,
        model: UNet,
        flat: FlatParameters,
        kernels: ModuleType | SimpleNamespace,
        recompute: bool = False,
        ready: Callable[[int], None] | None = None,
        urgent: bool = False,
    ) -> None:
        self.model, self.flat, self.kernels = model, flat, kernels
        self.recompute, self.ready, self.urgent = recompute, ready, urgent
        self.params, self.grads = flat.views(flat.param), flat.views(flat.grad)
        backend = model.backend
        self.low = flat.views(flat.low(backend.dtype, backend.allow_tf32))
        self.streams = Streams(flat.param.device, others=2)
        self.sums = kernels.RowSums(flat.grad)
        self.launcher = Launcher(kernels, sums=self.sums, is_step=True)
        self.embedding = EmbeddingLayers(model, flat, kernels)
        self._rest_of_grad = flat.grad[flat.filters_end :]
        self._ends = {
            name: grad.storage_offset() + grad.numel()
            for name, grad in self.grads.items()
            if grad.ndim > 2
        }
        self.plans: dict[tuple, StepPlan] = {}  # that calls so far have needed
        # told of each move that has been made, and of the values that are there
        self.watch: Callable[[Move, dict[Value, Tensor]], None] | None = None

    @staticmethod
    def refusal(model: nn.Module, dropout: bool = True) -> str | None:
        """Why this model has no plan, or None if it has one. Without `dropout` nothing is dropped,
        as in an evaluation."""
        if not isinstance(model, UNet):
            return f"{type(model).__name__} has none"
        for name, module in model.named_modules():
            if isinstance(module, ResBlock) and module.dropout and dropout:
                channels = len(module.out_layers["0"].weight)
                if channels % _DRAW:
                    return f"{name} has dropout of {channels} channels, no multiple of {_DRAW}"
        return None

    def plan_of(self, x: Tensor, *context: Tensor) -> StepPlan:
        """The plan of a call with such images, and a context [N, 1, 1 + L, D] and what is present
        of it."""
        training = tuple(module.training for module in self.model.modules())
        key = tuple(x.shape), x.dtype, training, *((*part.shape, part.dtype) for part in context)
        if key not in self.plans:
            width = 4 * self.model.model_channels
            options = self.recompute, self.urgent, self.ready is not None, context
            self.plans[key] = step_plan(self.model, x, width, self.kernels, self._ends, *options)
        return self.plans[key]

    def __call__(
        self,
        x: Tensor,
        t: Tensor,
        labels: Given = None,
        *,
        rng: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """As `UNet.forward_nhwc`; backward adds to the flat gradient."""
        more = parts_of(labels)
        context = self.tokens(more)
        made = self.plan_of(x, *context)
        drops = [m.dropout for m in self.model.modules() if isinstance(m, ResBlock) and m.training]
        if rng is None and any(drops):
            raise ValueError(f"dropout={max(drops)} in training needs rng (seed, step)")
        emb, ready = self.embedding.beside(t, labels, rng, first)
        step = Step(emb, torch.empty_like(emb), rng, first, ready)
        # the embedding's layers go back on their own, as soon as `step.d_emb` is complete
        start = emb.detach().requires_grad_(emb.requires_grad)
        return _Planned.apply(start, x, _Call(self, made, step, context))

    def tokens(self, given: Conditions) -> tuple[Tensor, ...]:
        """The tokens of a context as images of one row, which products of pixels read, in float32
        as these do; and which of them are present."""
        if given.context is None:
            return ()
        row, dtype = given.context[:, None], self.model.backend.dtype
        if dtype not in DTYPES:
            row = self.kernels.pad_channels(row.contiguous(), row.shape[-1], dtype)
        return row, given.present

    def timesteps_known(self) -> None:
        """The timesteps and labels of the next call are there, as of the current stream; x need not
        be."""
        self.embedding.begin()

    def forget_gradients(self) -> None:
        """Zero the flat gradient but for the filters', which the next backward pass will write."""
        self._rest_of_grad.zero_()
        self.launcher.accumulates = False


class _Call:
    """A pass forward and backward."""

    def __init__(
        self, network: TrainingUNet, made: StepPlan, step: Step, context: tuple[Tensor, ...]
    ) -> None:
        self.network, self.made, self.step = network, made, step
        self.values: dict[Value, Tensor] = dict(zip(made.context, context, strict=True))
        self._rows: list[list[Tensor]] = []  # which the third stream reads

    def forward(self, x: Tensor) -> Tensor:
        network, made, step = self.network, self.made, self.step
        graph = made.graph
        parameters, low = network.params, network.low
        self.values |= {v: parameters[n] for n, v in graph.parameters.items() if n in parameters}
        self.values |= {v: low[name] for v, name in made.low.items()}
        self.values |= graph.constants
        self.values[made.image] = x
        if step.rng is not None:
            self.values[made.rng] = step.rng
        self._run(made.schedule.forward)
        (result, *_) = graph.outputs
        return self.values.pop(result).contiguous()

    def backward(self, dy: Tensor) -> None:
        network, made = self.network, self.made
        self.values[made.seed] = dy
        places = network.grads | {EMB: self.step.d_emb}
        self.values |= {value: at.of(places[at.name]) for value, at in made.placed.items()}
        self._run(made.schedule.backward)
        self._join(dy)

    def _run(self, moves: Sequence[Move]) -> None:
        network = self.network
        network.launcher.first = self.step.first
        run_moves(moves, self.values, network.streams, network.launcher, self._other, network.watch)

    def _other(self, move: Move) -> bool:
        """Do what a move is besides launches of nodes one by one; whether it is anything else."""
        network, step, values = self.network, self.step, self.values
        match move.what:
            case "weights":
                network.launcher.weights(list(move.nodes), values, move.share)
            case "weight":
                network.launcher.weight(*move.nodes, values)
            case "take":
                rows = step.emb
                values |= {v: rows[:, part] for v, part in self.made.emb.items()}
            case "sums" | "all sums":
                self._rows.append(network.sums.kept)
                network.sums.flush(move.what == "all sums")
            case "ready":
                network.ready(move.start)
            case "embedding":
                step.done()
            case "finish":
                network.embedding.backward(step)
            case _:
                return False
        return True

    def _join(self, dy: Tensor) -> None:
        """Let the current stream wait for the others when autograd has done all that is left."""
        stream, network = torch.cuda.current_stream() if dy.is_cuda else None, self.network

        def join() -> None:
            with torch.cuda.stream(stream):  # callbacks come on a thread of autograd's
                network.streams.join()
                network.embedding.join()
            network.launcher.accumulates = True
            self.values, self._rows = {}, []

        torch.autograd.Variable._execution_engine.queue_callback(join)


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, emb: Tensor, x: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return call.forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[None, ...]:
        ctx.call.backward(dy.contiguous())
        return None, None, None
