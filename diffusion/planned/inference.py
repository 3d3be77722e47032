"""The UNet for sampling: the forward half of its plan, over kernels that wait (`planned.waiting`).

What depends on timesteps and labels alone is computed once for a chain: the embedding and every
block's projection of it, as a table [K, U, E] that a step reads one row of.
"""

import logging
from types import ModuleType

import torch
from torch import Tensor, nn

from triton_kernels.fused import ops as fused

from ..flat import FlatParameters
from ..objective import Denoiser
from ..turns import turn
from ..unet import UNet
from .embedding import TOGETHER, Step
from .layers import Feature, FusedUpsample
from .unet import DTYPES, FusedUNet, missing_tile
from .waiting import WaitingKernels

_TABLE_BYTES = 2**29  # of the embedding's table, at most; beyond it is computed in every step

log = logging.getLogger(__name__)


def sampling_network(model: nn.Module) -> "Denoiser | InferenceUNet":
    """What a sampler should ask in the place of `model.forward_nhwc`: the plan if there is one for
    this model, backend and GPU, else that; the log says why not. The plan has a copy of the
    parameters in 16 bits: it does not follow what happens to them afterwards."""
    backend = model.backend
    if backend.name != "triton" or backend.dtype not in DTYPES:
        return model.forward_nhwc
    refusal = FusedUNet.refusal(model) or missing_tile(model)
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

    @torch.no_grad()
    def tabulate(
        self,
        timesteps: Tensor,  # [K]
        labels: Tensor | None,  # int64 [N]
        n: int,
    ) -> tuple[Tensor, ...]:
        """The projections of every block, float32 [K, U, E], and each sample's u, int64 [N]; or, if
        that were too large, timesteps and labels. ValueError: labels missing, or not wanted."""
        steps, classes = len(timesteps), self.model.num_classes
        if (labels is None) != (classes is None):
            given = "missing" if labels is None else "given"
            raise ValueError(f"labels are {given}; the model has num_classes={classes}")
        if labels is None:
            return (self.embedding(timesteps, None, None, 0)[:, None],)
        # a row a class, or if that is less, a row a sample
        rows, index = torch.arange(self.num_labels, device=timesteps.device), labels
        if self.num_labels > n:
            rows, index = labels, torch.arange(n, device=timesteps.device)
        width = self.embedding.projection.bias.shape[0]
        if 4 * steps * len(rows) * width > _TABLE_BYTES:
            return timesteps, labels.clone()
        table = [self.embedding(timesteps, row.expand(steps), None, 0) for row in rows]
        return torch.stack(table, dim=1), index.clone()

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
        self.kernels.read_once(h.x)
        return self._output(self.head_norm.apply((h,), "silu")[0])

    def _skips(self, i: int, h: Feature) -> None:
        """The norm that the decoder begins with may be made with the feature, of its channels."""
        at = len(self.decoder) - 1 - i
        before = self.decoder[at - 1] if at else self.middle
        norm = getattr(self.decoder[at][0], "norm1", None)
        if norm is None or isinstance(before[-1], FusedUpsample):
            return
        first = norm.weight.shape[0] - h.x.shape[3]
        given = norm.num_groups, norm.weight, norm.bias, norm.eps, "silu"
        self.kernels.beside_later(h.x, first, *given)

    def _run(self, block: list, h: Feature, other: Feature | None) -> Feature:
        h = super()._run(block, h, other)
        for layer in block:
            layer.tape = None  # there is no way back
        return h
