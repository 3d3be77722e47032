"""Images out of a trained network."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..models.conditions import Conditions, Given
from ..process.objective import Denoiser
from ..tracking.pictures import to_uint8
from .beside import Beside
from .chain import TabulatedDenoiser
from .edit import Edit
from .guidance import Guidance, guide
from .sampler import Sampler

BATCH = 64  # images at a time, if nobody says


def draw(
    model: nn.Module,
    sampler: Sampler,
    n: int,
    image_shape: tuple[int, int, int],  # H, W, C
    **options: Any,  # of `draw_batches`
) -> np.ndarray:
    """[n, H, W, C] as `finish` makes them, uint8 if nobody says another; images first ..
    first + n - 1 of this seed. Image i depends on the seed and on i alone, not on the batch size.
    Raises ValueError as `draw_batches`."""
    return np.concatenate(list(draw_batches(model, sampler, n, image_shape, **options)))[:n]


@torch.no_grad()
def draw_batches(
    model: nn.Module,
    sampler: Sampler,
    n: int,
    image_shape: tuple[int, int, int],  # H, W, C
    *,
    seed: int,
    first: int = 0,  # the number of the first image
    labels: Given = None,  # int64 [n], or more that is given
    guidance: float | Guidance = 1.0,  # scale; 1: none
    weaker: Denoiser | TabulatedDenoiser | None = None,  # what to go away from, see `guide`
    batch_size: int = BATCH,
    done: int = 0,  # batches that are not drawn again
    progress: Callable[[int, int], None] | None = None,  # (steps done, steps in all), of the others
    network: Denoiser | TabulatedDenoiser | None = None,  # None: model.forward_nhwc
    finish: Callable[[Tensor], np.ndarray] = to_uint8,  # of a batch: float32 [N, H, W, C]
    edit: Edit | None = None,  # images to begin from, or to keep in part
) -> Iterator[np.ndarray]:
    """The images of `draw`, batch by batch as they are done.

    Batches are of one size, that of `cut`, as one graph serves them all: the last may go beyond n.
    ValueError: n or a batch size below 1, or labels that are not n.
    """
    if n < 1 or batch_size < 1:
        raise ValueError(f"n is {n} and batch_size {batch_size}; expected at least 1")
    if isinstance(labels, Tensor) and labels.shape != (n,):
        raise ValueError(f"labels have shape {list(labels.shape)}; expected [{n}]")
    if isinstance(labels, Conditions) and len(labels) != n:
        raise ValueError(f"conditions are of {len(labels)} images; expected {n}")
    network = model.forward_nhwc if network is None else network
    denoiser = _guided(model, sampler, guidance, network, weaker)
    device = sampler.rows.device
    training = model.training
    model.eval()
    batches, count = cut(n, batch_size)
    try:
        for batch in range(done, batches):
            start = batch * count

            def report(steps: int, total: int, batch: int = batch) -> None:
                if progress is not None:
                    progress((batch - done) * total + steps, (batches - done) * total)

            x = sampler.sample(
                denoiser,
                (count, *image_shape),
                seed=seed,
                labels=_rows(labels, torch.arange(start, start + count) % n, device),
                first=first + start,
                progress=report,
                edit=edit,
            )
            yield finish(x)
    finally:
        model.train(training)


@torch.no_grad()
def rehearse(
    model: nn.Module,
    sampler: Sampler,
    n: int,
    image_shape: tuple[int, int, int],  # H, W, C
    *,
    labels: Given,  # int64 [n], or more that is given
    guidance: float | Guidance,
    batch_size: int,
    network: Denoiser | TabulatedDenoiser,
    weaker: Denoiser | TabulatedDenoiser | None = None,
) -> None:
    """Launch what `draw` launches; see `triton_kernels.runtime.launch_recorder`."""
    denoiser = _guided(model, sampler, guidance, network, weaker)
    _, count = cut(n, batch_size)
    given = _rows(labels, torch.arange(count), sampler.rows.device)
    sampler.rehearse(denoiser, (count, *image_shape), given)


def _guided(
    model: nn.Module,
    sampler: Sampler,
    guidance: float | Guidance,
    network: Denoiser | TabulatedDenoiser,
    weaker: Denoiser | TabulatedDenoiser | None,
) -> Denoiser | TabulatedDenoiser:
    """What a sampler asks, of images without their conditions."""
    dtype = model.backend.dtype
    if getattr(model, "condition_channels", 0):
        network = Beside(network, dtype)
        weaker = None if weaker is None else Beside(weaker, dtype)
    return guide(
        network, guidance, getattr(model, "null_label", None), dtype, sigmas=sampler.row_sigmas(),
        weaker=weaker, drops=getattr(model, "condition_dropout", 0) > 0,
    )  # fmt: skip


def _rows(given: Given, index: Tensor, device: torch.device) -> Given:
    """Of these samples, on the device."""
    return None if given is None else given[index].to(device)


def cut(n: int, batch_size: int) -> tuple[int, int]:
    """(batches, images of each)."""
    batches = -(-n // batch_size)
    return batches, -(-n // batches)
