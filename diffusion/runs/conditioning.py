"""What a drawing is conditioned on beside a class, from files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.array import is_array, load_context
from ..data.context import Context, checked_context, padded
from ..data.given import GivenChannels, enlarged
from ..data.handed import handed_samples
from ..data.images import decode_image, load_folder
from ..data.values import Pixels, Units
from ..errors import ConfigError, counted
from ..formats.trained import Trained
from ..models.conditions import Conditions, Given, with_null_token, with_presence
from ..sampling.conditioning import as_seen
from ..settings import shown

Source = str | Path | np.ndarray  # a file, a folder, a .zip, or an array [M, H, W, K]
# a file, an array [M, L, D] or [L, D], or arrays [L, D] of any lengths
Sequences = str | Path | np.ndarray | Sequence[np.ndarray]


def load_conditions(
    condition: Source | None,
    vector: Source | Sequence[float] | None,
    context: Sequences | None,
    labels: Tensor | None,
    n: int,
    trained: Trained,
) -> Given:
    """What n images are given: labels, the channels of the condition, image i those of its picture
    i % M, and likewise a vector and a sequence. ConfigError: there is none, it is not for this
    network, or it does not fit."""
    index = torch.arange(n)
    image, vectors = _load_image(condition, n, trained), _load_vectors(vector, trained)
    found = _load_context(context, trained)
    return Conditions(
        labels,
        None if image is None else image[index % len(image)],
        None if vectors is None else with_presence(vectors[index % len(vectors)]),
        *(() if found is None else with_null_token(*found[index % len(found)])),
    ).shortest()


def _load_image(condition: Source | None, n: int, trained: Trained) -> Tensor | None:
    """float32 [M, H, W, K], as the network is to see it."""
    given = trained.condition
    if given is None:
        if condition is not None:
            raise ConfigError(
                f"condition={_named(condition)}, but {trained.name} was trained without one; leave"
                " it out"
            )
        return None
    if condition is None:
        kind = "images" if isinstance(given.values, Pixels) else "numbers (.npy, .npz, zarr)"
        raise ConfigError(
            f"{trained.name} was trained with {given}: give condition=FILE or FOLDER of {kind}"
        )
    height, width, learned = trained.image_shape
    return _load(condition, n, (height, width), learned, given)


def _load_vectors(source: Source | Sequence[float] | None, trained: Trained) -> Tensor | None:
    """float32 [M, D]; of numbers alone a single one."""
    dim = trained.model.vector_dim
    if not dim:
        if source is not None:
            raise ConfigError(
                f"vector={_named(source)}, but {trained.name} was trained without one; leave it out"
            )
        return None
    expected = f"{counted(dim, 'numbers')}, or a .npy of float32 [M, {dim}]"
    if source is None:
        raise ConfigError(
            f"{trained.name} was trained with vectors of {counted(dim, 'numbers')}: give"
            " vector=[...] of"
            f" {expected}"
        )
    if isinstance(source, str | Path) and not Path(source).is_file():
        raise ConfigError(f"vector={source} does not exist; give {expected}")
    try:
        found = source
        if isinstance(source, str | Path):
            found = np.load(source, mmap_mode="r", allow_pickle=False)
        vectors = torch.from_numpy(np.atleast_2d(np.array(found, dtype=np.float32)))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"vector={_named(source)} is no array ({error}); give {expected}"
        ) from None
    if vectors.ndim != 2 or vectors.shape[1] != dim or not len(vectors):
        raise ConfigError(
            f"vector={_named(source)} has shape {list(vectors.shape)}; expected {expected}"
        )
    if not torch.isfinite(vectors).all():
        raise ConfigError(f"vector={_named(source)} has numbers that are not finite")
    return vectors


def _load_context(source: Sequences | None, trained: Trained) -> Context | None:
    """Sequences of the network's numbers a token."""
    dim = trained.model.context_dim
    if not dim:
        if source is not None:
            raise ConfigError(
                f"context={_named(source)}, but {trained.name} was trained without one; leave it"
                " out"
            )
        return None
    expected = f"a .npy of float32 [M, L, {dim}] or [L, {dim}], or a .npz of one and lengths [M]"
    if source is None:
        raise ConfigError(
            f"{trained.name} was trained with sequences of tokens of {counted(dim, 'numbers')}:"
            " give"
            f" context={expected}"
        )
    if isinstance(source, str | Path):
        found = load_context(str(source), option="context")
    elif isinstance(source, np.ndarray):
        rows = source[None] if source.ndim == 2 else source
        found = checked_context(rows, None, f"context={_named(source)}")
    else:
        found = padded(source, "context")
    if found.dim != dim:
        raise ConfigError(
            f"context={_named(source)} has tokens of {counted(found.dim, 'numbers')}; expected"
            f" {expected}"
        )
    return found


def _load(
    source: Source, n: int, size: tuple[int, int], learned: int, given: GivenChannels
) -> Tensor:
    """float32 [M, H, W, K], as the network is to see it, of the first n at least."""
    if isinstance(source, np.ndarray) or is_array(Path(source)):
        shape, of = (*size, given.channels), given.channels + learned
        found = handed_samples("condition", source, shape, given.values, given.numbers, of)
        return as_seen(found[torch.arange(min(n, len(found)))])
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"condition={path} does not exist; give an image, a folder or a .zip")
    if isinstance(given.values, Units):
        raise ConfigError(
            f"condition={path} is no array, and the network was trained with {given} in units of"
            " their own; give a .npy, .npz or zarr"
        )
    reduced = given.size or size
    if path.is_dir() or path.suffix == ".zip":
        pictures = load_folder(str(path), reduced, given.channels, classes=False).images.numpy()
    else:
        try:
            with open(path, "rb") as file:
                pictures = decode_image(file, reduced, given.channels)[0][None]
        except (OSError, ValueError, SyntaxError) as error:
            raise ConfigError(
                f"condition={path} is no image that can be decoded: {error}"
            ) from error
    return as_seen(torch.from_numpy(np.stack([enlarged(p, size) for p in pictures])))


def _named(source: Any) -> str:
    return f"an array {list(source.shape)}" if isinstance(source, np.ndarray) else shown(source)
