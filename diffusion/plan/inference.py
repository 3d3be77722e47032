"""Runs the UNet for sampling by its plan (`sampling_plan`).

Values that depend only on timesteps and labels are computed once per chain: the embedding and every
block's projection of it, as a table [K, U, E] of which a step reads one row, and keys and values of
a context. Values that depend only on parameters are computed once.
"""

import logging
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn

from ..models.conditions import Conditions, Given, as_tables, attended, from_tables, parts_of
from ..models.flat_parameters import FlatParameters
from ..models.unet import UNet
from ..process.objective import Denoiser
from .embedding import TOGETHER, EmbeddingLayers
from .evaluation import Evaluation
from .launch.table import filters, launcher_of
from .sampling_plan import context_blocks, sampling_plan
from .step.network import TrainingUNet, step_kernels

_TABLE_BYTES = 2**29  # of the embedding's table, at most; beyond it is computed in every step

log = logging.getLogger(__name__)


def sampling_network(model: nn.Module) -> "Denoiser | InferenceUNet":
    """What a sampler should ask in the place of `model.forward_nhwc`: the plan if there is one for
    this model, backend and GPU, else that; the log says why not. The plan has a copy of the
    parameters as they are multiplied: it does not follow what happens to them afterwards."""
    kernels = step_kernels(model.backend)
    if kernels is None:
        return model.forward_nhwc
    refusal = TrainingUNet.refusal(model, dropout=model.training)
    if refusal is not None:
        log.warning("the network runs layer by layer, without the fused plan: %s", refusal)
        return model.forward_nhwc
    log.info("sampling with the fused plan")
    return InferenceUNet(model, kernels)


class InferenceUNet:
    """A `UNet` as a TabulatedDenoiser (see `chain`), without gradients. The first evaluation of
    images of a shape traces and plans it.
    """

    def __init__(self, model: UNet, kernels: ModuleType | SimpleNamespace) -> None:
        self.model, self.kernels = model, kernels
        flat, backend = FlatParameters(model, together=TOGETHER, trains=False), model.backend
        tf32 = backend.dtype == torch.float32 and backend.allow_tf32
        # nodes of the plan convert filters to 16 bits, and read what else there is in float32
        self.parameters = flat.views(flat.low(torch.float32, True) if tf32 else flat.param)
        self.embedding = EmbeddingLayers(model, flat, kernels)
        # of a class, or of the null class
        self.num_labels = model.label_emb.num_embeddings if model.num_classes is not None else 1
        self._kept: tuple[Tensor, Tensor] | None = None  # timesteps, and the table of all classes
        # by the shapes of images and of the mask of a context
        self._evaluations: dict[tuple, Evaluation] = {}
        self._context = [f"{name}.kv" for name in context_blocks(model)]
        self._fixed: dict[str, Tensor] = {}  # what parameters alone make, by what it is

    @torch.no_grad()
    def tabulate(
        self,
        timesteps: Tensor,  # [K]
        labels: Given,  # int64 [N], or more
        n: int,
    ) -> tuple[Tensor, ...]:
        """The projections of every block, float32 [K, U, E], and each sample's u, int64 [N]; or, if
        that were too large, timesteps and what is given. Behind it, of a network with a context,
        the mask bool [N, 1 + L] of its tokens, and of each block that attends to it keys and values
        [N, 1, 1 + L, 2C]. A table that serves any labels is kept for the next chain. ValueError:
        labels, vectors or contexts missing, not wanted, not N, or no class; which waits for the
        device, once a chain."""
        more = parts_of(labels)
        # the kernels take a row of the table by its number, and read whatever is there
        self.model.check_given(more, n, waits=True)
        table = self._tabulate(timesteps, more.of_embedding().shortest(), n)
        return *table, *self._tabulate_context(more)

    def _tabulate_context(self, given: Conditions) -> tuple[Tensor, ...]:
        """The mask, and keys and values of every block."""
        if given.context is None:
            return ()
        dtype = self.model.backend.dtype
        tokens, made = given.context.to(dtype)[:, None].contiguous(), []
        for name in self._context:
            weight = filters(self.parameters[f"{name}.weight"].to(dtype)[..., 0])
            bias = self.parameters[f"{name}.bias"]
            made.append(self.kernels.conv_forward(tokens, weight, bias)[0])
        return attended(given.present), *made

    def _tabulate(self, timesteps: Tensor, given: Given, n: int) -> tuple[Tensor, ...]:
        """What is of the embedding. Of labels alone the table has a row a class, if that is less
        than a row a sample."""
        by_class = given is None or isinstance(given, Tensor) and self.num_labels <= n
        width, rows = self.embedding.projection.bias.shape[0], self.num_labels if by_class else n
        if given is not None and 4 * len(timesteps) * rows * width > _TABLE_BYTES:
            return timesteps, *(part.clone() for part in as_tables(given))
        if not by_class:
            return self._table(timesteps, given), torch.arange(n, device=timesteps.device)
        if self._kept is None or self._kept[0] is not timesteps:
            every = None if given is None else torch.arange(rows, device=timesteps.device)
            self._kept = timesteps, self._table(timesteps, every)
        table = self._kept[1]
        return (table,) if given is None else (table, given.clone())

    def _table(self, timesteps: Tensor, labels: Given) -> Tensor:  # [K], [U] -> [K, U, E]
        """A row for each timestep with each of the labels, or of what is given, all at once."""
        if labels is None:
            return self.embedding(timesteps, None, None, 0)[:, None]
        steps, rows = len(timesteps), len(labels)
        t = timesteps.repeat_interleave(rows)
        labels = labels[torch.arange(rows, device=t.device).repeat(steps)]
        return self.embedding(t, labels, None, 0).unflatten(0, (steps, rows))

    @torch.no_grad()
    def at_row(self, x: Tensor, row: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        """[N, H, W, CO] at this row; the pixels of the result are some channels apart."""
        count = len(self._context) + 1 if self._context else 0
        tables, context = tables[: len(tables) - count], tables[len(tables) - count :]
        first, *given = tables
        table = (first, row, *given) if first.ndim == 3 else ()
        evaluation = self._evaluation(x, *context[:1])
        image, emb = self._begin(x, evaluation, *table)
        if not table:
            emb = self.embedding(first[row.expand(len(x))], from_tables(given), None, 0)
        given = image, emb.expand(len(x), -1), *context
        return evaluation(dict(zip(evaluation.inputs, given, strict=True)))

    @torch.no_grad()
    def __call__(self, x: Tensor, t: Tensor, labels: Given = None) -> Tensor:
        """As `UNet.forward_nhwc`."""
        context = self._tabulate_context(parts_of(labels))
        evaluation = self._evaluation(x, *context[:1])
        image, _ = self._begin(x, evaluation)
        given = image, self.embedding(t, labels, None, 0), *context
        return evaluation(dict(zip(evaluation.inputs, given, strict=True)))

    def _begin(self, x: Tensor, evaluation: Evaluation, *table: Tensor) -> tuple:
        """The image as the plan takes it, and a row of the table: one launch."""
        image = evaluation.inputs[0]
        return self.kernels.begin_step(x, image.shape[3], image.dtype, *table)

    def _evaluation(self, x: Tensor, mask: Tensor | None = None) -> Evaluation:
        tokens = 0 if mask is None else mask.shape[1]
        shape = *x.shape, tokens
        if shape not in self._evaluations:
            made = sampling_plan(self.model, x.shape, x.device, self.kernels, tokens)
            launch = launcher_of(self.kernels)
            self._evaluations[shape] = Evaluation(made, self.parameters, launch, known=self._fixed)
        return self._evaluations[shape]
