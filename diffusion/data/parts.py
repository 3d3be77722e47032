"""A data set written to one file by parts, by one process or several; after a kill they go on.

Sample i has its place in the file, whoever writes it and in whatever order. Beside the file that is
to be there is meanwhile a folder, .writing_NAME.parts:

    plan.json       what is written, from what and how; another plan begins anew
    samples         the file without what is not a sample, of its full size from the beginning
    000012.lock     held by the process that writes part 12, and released when that dies
    000012.json     part 12 is on disk: its digests, and what could not be read

A process takes whichever part nobody holds and nobody has written. Who finds all of them written
finishes the file, renames it into place and deletes the folder.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError, writing
from ..runtime.file_lock import open_locked
from .packed_format import FORMATS
from .values import Values

PART = 512  # samples
_WAIT = 0.1  # seconds between looks at what others do


class Source(Protocol):
    """What is written."""

    shape: tuple[int, int, int]  # of a sample, [H, W, C]
    values: Values
    labels: list[int] | None  # of all samples
    class_names: tuple[str, ...] | None

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Iterator[np.ndarray | Exception]:
        """Samples start .. stop - 1, or why one cannot be read."""

    def remarks(self) -> dict[str, Any]:
        """What is to be known at the end of the samples read since the last call, as JSON."""

    def check(self, remarks: list[dict[str, Any]]) -> None:
        """ConfigError if what is known of all parts so far is no file to be written."""


def write_parts(
    path: Path,
    source: Source,
    plan: dict[str, Any],  # what decides about the samples, as JSON
    progress: Callable[[int], None] = lambda done: None,  # called with samples written so far
) -> list[dict[str, Any]]:
    """Write `path`, together with other processes that were given the same; returns the remarks of
    all parts when it is there. ConfigError: another plan is being written there, or what `source`
    finds wrong, after which nothing is left."""
    parts = _Parts(path, source, plan)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            parts.begin()
            return parts.write_all(progress)
        except FileNotFoundError:
            if parts.folder.exists():
                raise
            if path.exists():  # another process has finished it
                return []
            raise ConfigError(f"{path}: another process that wrote it gave up") from None


def unfinished(path: Path) -> tuple[int, int] | None:
    """(parts written, parts) of a file that was begun, if it was."""
    folder = _folder(path)
    try:
        count = json.loads((folder / "plan.json").read_text())["parts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return len(list(folder.glob("[0-9]*.json"))), count


def _folder(path: Path) -> Path:
    return path.with_name(f".writing_{path.name}.parts")


class _Parts:
    def __init__(self, path: Path, source: Source, plan: dict[str, Any]) -> None:
        self.path, self.source, self.folder = path, source, _folder(path)
        self.format = FORMATS[path.suffix](source.shape, source.values)
        self.count = -(-len(source) // PART)
        self._plan = json.dumps({**plan, "samples": len(source), "parts": self.count}, indent=1)
        self._samples = self.folder / "samples"

    def begin(self) -> None:
        """Make the folder, or go on in one of the same plan."""
        self.folder.mkdir(exist_ok=True)
        with self._held("folder.lock"):
            plan = self.folder / "plan.json"
            same = plan.is_file() and plan.read_text() == self._plan
            if same and self._samples.is_file():  # or its finished file was renamed just now
                return
            self._check_idle()
            for file in self.folder.iterdir():
                if file.name != "folder.lock":
                    file.unlink()
            size = self.format.offset + len(self.source) * self.format.item_bytes
            with open(self._samples, "wb") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, size)  # a full disk is seen now
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        raise
                    file.truncate(size)
            _write_whole(plan, self._plan)

    def _check_idle(self) -> None:
        for lock in self.folder.glob("[0-9]*.lock"):
            try:
                os.close(open_locked(lock))
            except BlockingIOError:
                raise ConfigError(
                    f"out={self.path} is being written by another process, with other settings"
                ) from None

    def write_all(self, progress: Callable[[int], None]) -> list[dict[str, Any]]:
        """Write what nobody has written, wait for what others write, finish the file."""
        try:
            while True:
                taken = [self.take(part, progress) for part in range(self.count)]
                if all(self.is_done(part) for part in range(self.count)):
                    return self.finish()
                if not any(taken):
                    time.sleep(_WAIT)  # for who has the last ones, and may die
                progress(self.samples_done())
        except FileNotFoundError:
            raise
        except (ConfigError, OSError):
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @contextmanager
    def _held(self, name: str) -> Iterator[None]:
        """The lock of that name, when whoever has it lets go."""
        while True:
            try:
                lock = open_locked(self.folder / name)
                break
            except BlockingIOError:
                time.sleep(_WAIT)
        try:
            yield
        finally:
            os.close(lock)

    def _done(self, part: int) -> Path:
        return self.folder / f"{part:06d}.json"

    def is_done(self, part: int) -> bool:
        return self._done(part).exists()

    def samples_done(self) -> int:
        done = sum(1 for _ in self.folder.glob("[0-9]*.json"))
        return min(done * PART, len(self.source))

    def take(self, part: int, progress: Callable[[int], None]) -> bool:
        """Write a part, unless it is written or another process does."""
        if self.is_done(part):
            return False
        place = self.folder / f"{part:06d}.lock"
        try:
            lock = open_locked(place)
        except BlockingIOError:
            return False
        try:
            if not self.is_done(part):
                self._write(part, progress)
        finally:
            place.unlink(missing_ok=True)
            os.close(lock)
        return True

    def _write(self, part: int, progress: Callable[[int], None]) -> None:
        start, stop = part * PART, min((part + 1) * PART, len(self.source))
        digests, skipped, done = bytearray(), [], self.samples_done()
        with open(self._samples, "r+b") as file:
            for i, sample in enumerate(self.source.read(start, stop), start):
                progress(done + i - start)
                if isinstance(sample, Exception):
                    skipped.append(i)
                    continue
                content = self.format.encode(sample)
                file.seek(self.format.offset + i * self.format.item_bytes)
                file.write(content)
                digests += self.format.digest(content)
            file.flush()
            os.fsync(file.fileno())
        remarks = self.source.remarks()
        self.source.check([*(found["remarks"] for found in self._known()), remarks])
        about = {"skipped": skipped, "digests": digests.hex(), "remarks": remarks}
        _write_whole(self._done(part), json.dumps(about))

    def _known(self) -> Iterator[dict[str, Any]]:
        for part in range(self.count):
            if self.is_done(part):
                yield json.loads(self._done(part).read_text())

    def finish(self) -> list[dict[str, Any]]:
        """Write what is not a sample, and rename the file into place."""
        with self._held("folder.lock"):
            known = list(self._known())
            skipped = {i for found in known for i in found["skipped"]}
            kept = [i for i in range(len(self.source)) if i not in skipped]
            whole = self._without(kept) if skipped else self._samples
            labels = self.source.labels
            with open(whole, "r+b") as file:
                file.truncate(self.format.offset + len(kept) * self.format.item_bytes)
                file.seek(0, os.SEEK_END)
                self.format.finish(
                    file,
                    len(kept),
                    [] if labels is None else [labels[i] for i in kept],
                    self.source.class_names,
                    b"".join(bytes.fromhex(found["digests"]) for found in known),
                )
                file.flush()
                os.fsync(file.fileno())
            os.replace(whole, self.path)
            shutil.rmtree(self.folder)
        return [found["remarks"] for found in known]

    def _without(self, kept: list[int]) -> Path:
        """A copy with these samples alone: should it be cut off, the whole is still there."""
        copy, size = self.folder / "kept", self.format.item_bytes
        with open(self._samples, "rb") as file, open(copy, "wb") as out:
            out.seek(self.format.offset)
            for i in kept:
                file.seek(self.format.offset + i * size)
                out.write(file.read(size))
        return copy


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
