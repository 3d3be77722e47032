"""A folder of drawn images, one PNG each, written as they are drawn.

Until the last is there, the folder holds a file that says of which drawing they are and how many
batches are done. The same drawing again goes on from there, with the same bits, since its batches
are the same; any other one begins anew.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.images import EXTENSIONS
from ..errors import ConfigError, counted
from ..models.conditions import Conditions, Given
from ..runtime.file_lock import open_locked_folder
from ..runtime.progress import Progress
from ..sampling.edit import Edit
from ..tracking.pictures import grid
from ..tracking.run_log import write_whole

_UNFINISHED, _PARTIAL, _GRID = ".drawing.json", ".writing_image.png", "grid.png"
_GRID_OF = 100  # images at most in the grid beside them


class PictureFolder:
    """Images 0 .. n - 1 of a drawing in the folder `out`, which is made if need be, and which no
    other drawing has before this one is closed."""

    def __init__(self, out: Path, drawing: str, n: int) -> None:
        """`drawing` is a digest of all that the images depend on, see `digest_of`. ConfigError:
        another process draws into the folder, or it has images that no drawing wrote, such as a
        data set's, which may have the same names."""
        self.out, self.drawing, self.n = out, drawing, n
        self._done = 0  # batches
        out.mkdir(parents=True, exist_ok=True)
        if foreign := _foreign_images(out):
            raise ConfigError(
                f"out={out} holds other images, such as {foreign[0]}; give a folder that is new or"
                " empty, or of another drawing"
            )
        try:
            self._lock = open_locked_folder(out)
        except BlockingIOError:
            raise ConfigError(
                f"out={out}: another process draws into it; wait for it, or give another out"
            ) from None

    def close(self) -> None:
        """Leave the folder to others."""
        os.close(self._lock)

    def begin(self, batches: Sequence[Sequence[int]]) -> int:
        """How many of the batches are there already, by this very drawing; `batches` has the
        numbers of their images, and n and above for those that are not wanted."""
        self._done, said = 0, batches[: self._said()]
        with Progress(len(said), unit="batch", what=f"reading {self.out}", leave=False) as progress:
            for numbers in said:
                if not all(self._is_whole(i) for i in numbers if i < self.n):
                    break
                self._done += 1
                progress.reach(self._done)
        self._say()
        return self._done

    def write(self, numbers: Sequence[int], images: np.ndarray) -> None:
        """The next batch, uint8 [N, H, W, C], but for images of numbers that are not wanted."""
        partial = self.out / _PARTIAL
        try:
            for i, image in zip(numbers, images, strict=True):
                if i < self.n:
                    Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(partial)
                    os.replace(partial, self._path(i))
        finally:
            partial.unlink(missing_ok=True)
        self._done += 1
        self._say()

    def finish(self, shown: Callable[[np.ndarray], np.ndarray]) -> None:
        """All are there: a grid of the first, as `shown` has them. Warns of images that are not of
        this drawing."""
        first = np.stack([self._read(i) for i in range(min(self.n, _GRID_OF))])
        grid(shown(first)).save(self.out / _GRID)
        (self.out / _UNFINISHED).unlink(missing_ok=True)
        numbers = [path.stem for path in self.out.glob("[0-9]*.png") if path.stem.isdecimal()]
        older = sum(int(number) >= self.n for number in numbers)
        if older:
            warnings.warn(
                f"{self.out} has {counted(older, 'images')} more, of an earlier drawing; these"
                " are numbers 0 to"
                f" {self.n - 1}",
                stacklevel=2,
            )

    def _said(self) -> int:
        """Batches that an earlier process of this drawing has written."""
        try:
            found = json.loads((self.out / _UNFINISHED).read_text())
            return int(found["batches"]) if found["drawing"] == self.drawing else 0
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return 0

    def _say(self) -> None:
        text = json.dumps({"drawing": self.drawing, "batches": self._done})
        write_whole(self.out / _UNFINISHED, text)

    def _path(self, number: int) -> Path:
        return self.out / f"{number:06d}.png"

    def _is_whole(self, number: int) -> bool:
        """Whether the image is there; after a failure of power it may be a part of one."""
        try:
            self._read(number)
        except (OSError, ValueError, SyntaxError):  # Pillow's, of what is no picture
            return False
        return True

    def _read(self, number: int) -> np.ndarray:  # uint8 [H, W, C]
        with Image.open(self._path(number)) as picture:
            pixels = np.asarray(picture)
        return pixels[..., None] if pixels.ndim == 2 else pixels


def _foreign_images(folder: Path) -> list[str]:
    """Images by other names than a drawing's, or by those where no drawing was: one that is under
    way has its file, and a grid is beside one that is done."""
    known = any((folder / name).exists() for name in (_UNFINISHED, _GRID))
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name.lower().endswith(EXTENSIONS)
        and path.name not in (_GRID, _PARTIAL)
        and not (known and path.suffix == ".png" and path.stem.isdecimal())
    )


def digest_of(settings: dict[str, Any], *holders: torch.nn.Module | Given | Edit) -> str:
    """SHA-256 of settings and of the bits of all tensors of what the images are made of."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for holder in holders:
        for name, x in sorted(_tensors(holder).items()):
            digest.update(f"{name} {list(x.shape)} {x.dtype}".encode())
            digest.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _tensors(holder: torch.nn.Module | Given | Edit) -> dict[str, Tensor]:
    if isinstance(holder, torch.nn.Module):
        return holder.state_dict()
    if isinstance(holder, Conditions | Edit):
        found = {field.name: getattr(holder, field.name) for field in fields(holder)}
        return {name: x for name, x in found.items() if x is not None}
    return {} if holder is None else {"labels": holder}
