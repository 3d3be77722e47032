"""Images out of a trained network."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from ..process.objective import Denoiser
from ..tracking.pictures import to_uint8
from .chain import TabulatedDenoiser
from .edit import Edit
from .guidance import Guidance, guide
from .sampler import Sampler

BATCH = 64  # images at a time, if nobody says


@torch.no_grad()
def draw(
    model: nn.Module,
    sampler: Sampler,
    n: int,
    image_shape: tuple[int, int, int],  # H, W, C
    *,
    seed: int,
    first: int = 0,  # the number of the first image
    labels: Tensor | None = None,  # int64 [n]
    guidance: float | Guidance = 1.0,  # scale; 1: none
    weaker: Denoiser | TabulatedDenoiser | None = None,  # what to go away from, see `guide`
    batch_size: int = BATCH,
    progress: Callable[[int, int], None] | None = None,  # (steps done, steps in all)
    network: Denoiser | TabulatedDenoiser | None = None,  # None: model.forward_nhwc
    finish: Callable[[Tensor], np.ndarray] = to_uint8,  # of a batch: float32 [N, H, W, C]
    edit: Edit | None = None,  # images to begin from, or to keep in part
) -> np.ndarray:
    """[n, H, W, C] as `finish` makes them, uint8 if nobody says another; images first ..
    first + n - 1 of this seed. Image i depends on the seed and on i alone, not on the batch size.

    Batches are of one size, as one graph serves them all: the last may go beyond n, and what is
    too much is cut off. ValueError: n or a batch size below 1, or labels that are not n.
    """
    if n < 1 or batch_size < 1:
        raise ValueError(f"n is {n} and batch_size {batch_size}; expected at least 1")
    if labels is not None and labels.shape != (n,):
        raise ValueError(f"labels have shape {list(labels.shape)}; expected [{n}]")
    network = model.forward_nhwc if network is None else network
    null_label = getattr(model, "null_label", None)
    denoiser = guide(
        network, guidance, null_label, model.backend.dtype, sigmas=sampler.row_sigmas(),
        weaker=weaker,
    )  # fmt: skip
    training = model.training
    model.eval()
    parts, (batches, count) = [], cut(n, batch_size)
    for batch in range(batches):
        start = batch * count

        def report(done: int, total: int, batch: int = batch) -> None:
            if progress is not None:
                progress(batch * total + done, batches * total)

        x = sampler.sample(
            denoiser,
            (count, *image_shape),
            seed=seed,
            labels=None if labels is None else labels[torch.arange(start, start + count) % n],
            first=first + start,
            progress=report,
            edit=edit,
        )
        parts.append(finish(x))
    model.train(training)
    return np.concatenate(parts)[:n]


@torch.no_grad()
def rehearse(
    model: nn.Module,
    sampler: Sampler,
    n: int,
    image_shape: tuple[int, int, int],  # H, W, C
    *,
    labels: Tensor | None,  # int64 [n]
    guidance: float | Guidance,
    batch_size: int,
    network: Denoiser | TabulatedDenoiser,
    weaker: Denoiser | TabulatedDenoiser | None = None,
) -> None:
    """Launch what `draw` launches; see `triton_kernels.runtime.launch_recorder`."""
    denoiser = guide(
        network, guidance, getattr(model, "null_label", None), model.backend.dtype,
        sigmas=sampler.row_sigmas(), weaker=weaker,
    )  # fmt: skip
    _, count = cut(n, batch_size)
    sampler.rehearse(denoiser, (count, *image_shape), None if labels is None else labels[:count])


def cut(n: int, batch_size: int) -> tuple[int, int]:
    """(batches, images of each)."""
    batches = -(-n // batch_size)
    return batches, -(-n // batches)
