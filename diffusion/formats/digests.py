"""SHA256SUMS: what the files of a folder were when they were written.

The lines are those of sha256sum(1), so that `sha256sum -c SHA256SUMS` checks a folder, too; the
last one is a comment that holds the digest of the lines above it.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import ConfigError

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (\S+)")
_OWN = re.compile(r"# of these lines: ([0-9a-f]{64})")
_AT_ONCE = 4  # files that are hashed side by side; hashlib releases the interpreter's lock


def file_digest(path: Path) -> str:
    """SHA-256 in hexadecimal; about 1.7 GB/s a processor that has instructions for it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_text(digests: dict[str, str]) -> str:
    """What SHA256SUMS holds for files of these names."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return f"{lines}# of these lines: {hashlib.sha256(lines.encode()).hexdigest()}\n"


def read_sums(folder: Path) -> dict[str, str] | None:
    """Digest by name; None if the folder has no SHA256SUMS. ConfigError: that file is damaged."""
    path = folder / SUMS
    try:
        text = path.read_bytes().decode("ascii")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    lines, _, own = text.removesuffix("\n").rpartition("\n")
    found, expected = _OWN.fullmatch(own), hashlib.sha256(f"{lines}\n".encode()).hexdigest()
    pairs = [_LINE.fullmatch(line) for line in lines.split("\n")]
    if found is None or found[1] != expected or None in pairs:
        raise ConfigError(f"{path} is damaged: it is not as it was written")
    return {pair[2]: pair[1] for pair in pairs}


def check_files(folder: Path, names: Iterable[str], sums: dict[str, str]) -> None:
    """ConfigError names the first of the files that is not as it was written."""
    names = list(names)
    for name in names:
        if name not in sums:
            raise ConfigError(f"{folder / name} is damaged or strange: {SUMS} does not list it")
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        for name, found in zip(names, pool.map(_digest, (folder / n for n in names)), strict=True):
            if found != sums[name]:
                raise ConfigError(
                    f"{folder / name} is damaged: its SHA-256 is {found[:12]}..., and was"
                    f" {sums[name][:12]}... when it was written"
                )


def _digest(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
