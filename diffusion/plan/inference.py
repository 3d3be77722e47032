"""The UNet for sampling: the forward half of its plan, over kernels that wait (`plan.fusion`).

What depends on timesteps and labels alone is computed once for a chain: the embedding and every
block's projection of it, as a table [K, U, E] that a step reads one row of.
"""

import logging
from types import ModuleType

import torch
from torch import Tensor, nn

from triton_kernels import fused_ops as fused

from ..models.flat_parameters import FlatParameters
from ..models.unet import UNet
from ..process.objective import Denoiser
from ..sampling.serialize import turn
from .embedding import TOGETHER, Step
from .fusion import WaitingKernels
from .layers import Feature
from .unet import FusedUNet, has_plan

_TABLE_BYTES = 2**29  # of the embedding's table, at most; beyond it is computed in every step

log = logging.getLogger(__name__)


def sampling_network(model: nn.Module) -> "Denoiser | InferenceUNet":
    """What a sampler should ask in the place of `model.forward_nhwc`: the plan if there is one for
    this model, backend and GPU, else that; the log says why not. The plan has a copy of the
    parameters in the backend's type: it does not follow what happens to them afterwards."""
    backend = model.backend
    if not has_plan(backend):
        return model.forward_nhwc
    refusal = FusedUNet.refusal(model)
    if refusal is not None:
        log.warning("the layers run one by one, without the fused plan: %s", refusal)
        return model.forward_nhwc
    log.info("sampling with the fused plan")
    return InferenceUNet(model, fused)


class InferenceUNet(FusedUNet):
    """A `UNet` as a TabulatedDenoiser (see `chain`), for images of its `image_size`, without
    gradients.

    From eight images on there are launches whose programs wait for one another, of which two may
    not be under way at once: evaluations, and replays of chains, take turns (`turns`). Whoever
    captures evaluations in other graphs has to replay those in turns, too. Other processes do not
    matter.
    """

    trains = False

    def __init__(self, model: UNet, kernels: ModuleType) -> None:
        flat = FlatParameters(model, together=TOGETHER, trains=False)
        super().__init__(model, flat, WaitingKernels(kernels))
        self.stem_weight = self._padded(self.stem.weight.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        # of a class, or of the null class
        self.num_labels = model.label_emb.num_embeddings if model.num_classes is not None else 1
        self._kept: tuple[Tensor, Tensor] | None = None  # timesteps, and the table of all classes

    @torch.no_grad()
    def tabulate(
        self,
        timesteps: Tensor,  # [K]
        labels: Tensor | None,  # int64 [N]
        n: int,
    ) -> tuple[Tensor, ...]:
        """The projections of every block, float32 [K, U, E], and each sample's u, int64 [N]; or, if
        that were too large, timesteps and labels. A table that serves any labels is kept for the
        next chain. ValueError: labels missing, not wanted, not N, or no class; which waits for the
        device, once a chain."""
        classes = self.model.num_classes
        if (labels is None) != (classes is None):
            given = "missing" if labels is None else "given"
            raise ValueError(f"labels are {given}; the model has num_classes={classes}")
        if labels is not None:
            self._check_labels(labels, n)
        # a row a class, or if that is less, a row a sample
        by_class = self.num_labels <= n or labels is None
        width = self.embedding.projection.bias.shape[0]
        rows = self.num_labels if by_class else n
        if labels is not None and 4 * len(timesteps) * rows * width > _TABLE_BYTES:
            return timesteps, labels.clone()
        if not by_class:
            return self._table(timesteps, labels), torch.arange(n, device=labels.device)
        if self._kept is None or self._kept[0] is not timesteps:
            every = None if labels is None else torch.arange(rows, device=labels.device)
            self._kept = timesteps, self._table(timesteps, every)
        table = self._kept[1]
        return (table,) if labels is None else (table, labels.clone())

    def _check_labels(self, labels: Tensor, n: int) -> None:
        """The kernels take a row of the table by its number, and read whatever is there."""
        if labels.shape != (n,) or labels.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"labels are {labels.dtype} of shape {list(labels.shape)}; expected int64 [{n}]"
            )
        low, high = map(int, labels.aminmax()) if n else (0, 0)
        if low < 0 or high >= self.num_labels:
            raise ValueError(f"labels lie in [{low}, {high}]; expected [0, {self.num_labels - 1}]")

    def _table(self, timesteps: Tensor, labels: Tensor | None) -> Tensor:  # [K], [U] -> [K, U, E]
        """A row for each timestep with each of the labels, all at once."""
        if labels is None:
            return self.embedding(timesteps, None, None, 0)[:, None]
        steps, rows = len(timesteps), len(labels)
        t, labels = timesteps.repeat_interleave(rows), labels.repeat(steps)
        return self.embedding(t, labels, None, 0).unflatten(0, (steps, rows))

    @torch.no_grad()
    def at_row(self, x: Tensor, row: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        """[N, H, W, CO] at this row; the pixels of the result are some channels apart."""
        first, *labels = tables
        table = (first, row, *labels) if first.ndim == 3 else ()
        with turn(x.device), self.kernels.zeros.evaluation(x) as cleared:
            image, emb = self._begin(x, *table, cleared=cleared)
            if not table:
                emb = self.embedding(first[row.expand(len(x))], *labels, None, 0)
            return self.run(image, emb.expand(len(x), -1))

    @torch.no_grad()
    def __call__(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """As `UNet.forward_nhwc`."""
        with turn(x.device), self.kernels.zeros.evaluation(x) as cleared:
            image, _ = self._begin(x, cleared=cleared)
            return self.run(image, self.embedding(t, labels, None, 0))

    def _begin(self, x: Tensor, *table: Tensor, cleared: Tensor | None) -> tuple:
        return self.kernels.begin_step(
            x, self.stem_weight.shape[1], self.dtype, *table, cleared=cleared
        )

    def run(self, image: Tensor, emb: Tensor) -> Tensor:  # [N, H, W, 16], [N, E]
        self.step = Step(emb, None, None, 0)
        h = self._features(self._first_feature(image, self.stem_weight))
        return self._output(self.head_norm.apply((h,), "silu")[0])

    def _run(self, block: list, h: Feature, other: Feature | None) -> Feature:
        h = super()._run(block, h, other)
        for layer in block:
            layer.tape = None  # there is no way back
        return h
