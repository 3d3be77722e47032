"""Sequences of vectors that the samples of a set are given, such as what a text encoder makes of
captions: recorded beside the images, and read when they are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, counted

LENGTHS = "lengths"  # the array of that name in a .npz or a zarr group
_PART = 64 * 2**20  # bytes that are read at once
EXPECTED = f"a .npy [M, L, D] of float16 or float32, or a .npz of one and {LENGTHS} [M]"


@dataclass(frozen=True)
class Context:
    """A sequence for each of M samples, of at most L tokens of D numbers."""

    rows: Any  # numpy's array [M, L, D], in memory or mapped, or zarr's
    lengths: Tensor  # int64 [M]: how many of the L tokens there are, from 0 to L
    name: str = "the context"  # for messages

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def most(self) -> int:
        """L."""
        return self.rows.shape[1]

    @property
    def dim(self) -> int:
        """D."""
        return self.rows.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """As tokens are handed out: float16 if they are stored so."""
        return torch.float16 if np.dtype(self.rows.dtype) == np.float16 else torch.float32

    @property
    def nbytes(self) -> int:
        """Of the tokens, as they are handed out."""
        return len(self) * self.most * self.dim * self.dtype.itemsize

    def __getitem__(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, L, D] and lengths int64 [B] of some samples. ConfigError: a token has a number
        that is not finite."""
        select = getattr(self.rows, "oindex", self.rows)  # of zarr, whose [] is not numpy's
        rows, lengths = np.asarray(select[index.numpy()]), self.lengths[index]
        there = np.arange(self.most) < lengths.numpy()[:, None]
        bad = there & ~np.isfinite(rows).all(axis=2)
        if bad.any():
            raise ConfigError(
                f"{self.name} has numbers that are not finite, first of sample"
                f" {int(index[int(bad.any(axis=1).argmax())])}"
            )
        stored = np.float16 if self.dtype == torch.float16 else np.float32
        return torch.from_numpy(np.ascontiguousarray(rows, dtype=stored)), lengths

    def tokens_on(self, device: torch.device) -> Tensor:
        """Those of all samples, [M, L, D]."""
        out = torch.empty(len(self), self.most, self.dim, dtype=self.dtype, device=device)
        size = self.most * self.dim * self.dtype.itemsize
        for index in torch.arange(len(self)).split(max(1, _PART // size)):
            out[int(index[0]) : int(index[-1]) + 1] = self[index][0]
        return out

    def described(self) -> dict[str, Any]:
        """As `precompile.described` has it, of the tokens."""
        return {"shape": [len(self), self.most, self.dim], "dtype": str(self.dtype)[6:]}

    def __str__(self) -> str:
        return (
            f"sequences of up to {counted(self.most, 'tokens')} of {counted(self.dim, 'numbers')}"
        )


def checked_context(
    rows: Any,  # numpy's array, or zarr's
    lengths: Any | None,  # whole numbers; None: all of the tokens are there
    name: str,
    count: int | None = None,
) -> Context:
    """ConfigError: they do not fit."""
    wanted = EXPECTED if count is None else f"[{count}, L, D], a sequence for each image in order"
    if rows.ndim != 3 or 0 in rows.shape or rows.dtype.kind not in "fiu":
        raise ConfigError(f"{name} is {rows.dtype} {list(rows.shape)}; expected {wanted}")
    if count is not None and len(rows) != count:
        raise ConfigError(f"{name} has the shape {list(rows.shape)}; expected {wanted}")
    many, most = rows.shape[:2]
    if lengths is None:
        return Context(rows, torch.full((many,), most), name)
    found = np.asarray(lengths[:])
    if found.shape != (many,) or found.dtype.kind not in "iu":
        raise ConfigError(
            f"{name}: {LENGTHS} are {found.dtype} {list(found.shape)}; expected whole numbers"
            f" [{many}]"
        )
    if found.min() < 0 or found.max() > most:
        raise ConfigError(
            f"{name}: {LENGTHS} are {found.min()} to {found.max()}; expected 0 to {most}"
        )
    return Context(rows, torch.from_numpy(found.astype(np.int64)), name)


def padded(sequences: Sequence[np.ndarray], name: str) -> Context:
    """Sequences [L_i, D] as one context. ConfigError: they are none, or of several D."""
    try:
        each = [np.asarray(sequence, dtype=np.float32) for sequence in sequences]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is no sequence of vectors ({error})") from None
    shapes = {x.shape[1:] for x in each}
    if not each or any(x.ndim != 2 for x in each) or len(shapes) != 1:
        found = ", ".join(str(list(x.shape)) for x in each[:4])
        raise ConfigError(f"{name} has sequences of shapes {found}; expected [L, D], of one D")
    most = max(1, *(len(x) for x in each))
    rows = np.zeros((len(each), most, *shapes.pop()), np.float32)
    for row, x in zip(rows, each, strict=True):
        row[: len(x)] = x
    return checked_context(rows, np.array([len(x) for x in each]), name)
