"""The error that means: the user gave something wrong, or the disk is full; and which errors mean
that memory is."""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

_REFUSED = (  # what a disk or a path has against being written to
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
)

_SYSTEM = ("/proc", "/sys", "/dev")
_NO_MEMORY = ("not enough memory", "can't allocate memory", "Storage size calculation overflowed")


class ConfigError(ValueError):
    """A setting, path or file is wrong. The message is one line: the value that was wrong and the
    values that are right. Entry points print it and exit with code 2."""


def first_of(values: Sequence[object], most: int = 8) -> str:
    """The first values, for a message, and whether there are more: "a, b, ..."."""
    return ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "")


def counted(number: int, what: str) -> str:
    """For a message: "2 images", but "1 image"; and "1 class" of "classes"."""
    ending = "es" if what.endswith("sses") else "s"
    return f"{number} {what.removesuffix(ending) if number == 1 else what}"


def lack_of_memory(error: BaseException | None) -> BaseException | None:
    """The error that says that memory does not suffice, PyTorch's of any device or Python's: this
    one or what it came from, since letting go of a half-made CUDA graph raises another."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return error
        if isinstance(error, RuntimeError) and any(said in str(error) for said in _NO_MEMORY):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around writing to `path`: a full disk, or a place that cannot be written to, is a ConfigError
    that names it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    except SafetensorError as error:  # of its own type, with the system's words
        if "I/O error" not in str(error):
            raise
        raise ConfigError(f"{path} cannot be written: {error}") from error


def check_readable(key: str, path: str) -> None:
    """ConfigError if the setting names a pipe, a socket or a device, from which reading may never
    end; or what holds a null byte, which no name of a file does."""
    if "\0" in path:
        raise ConfigError(f"{key}={path!r} holds a null byte")
    try:
        mode = os.stat(os.path.expanduser(path)).st_mode
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(f"{key}={path[:40]}... is too long for the name of a file") from None
        return  # there is none: whoever wants it says so
    if is_of_system(path):
        raise ConfigError(f"{key}={path} is of the system, and no file or folder with data")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfigError(f"{key}={path} is a pipe, a socket or a device, and no file or folder")


def is_of_system(path: str | Path) -> bool:
    """Whether a path leads to where the system shows itself as files, endless or not to be read."""
    real = os.path.realpath(os.path.expanduser(path))
    inside = any(real == place or real.startswith(f"{place}/") for place in _SYSTEM)
    return inside and not real.startswith("/dev/shm/")  # which is memory, as good as a disk


def check_writable(path: Path) -> None:
    """ConfigError if what holds `path`, or will when it is made, is no folder or not to be written
    to: before hours of work whose result would have no place."""
    place = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    if is_of_system(place):
        raise ConfigError(f"{path} cannot be written: {place} is of the system, and no disk")
    if not os.path.isdir(place):
        raise ConfigError(f"{path} cannot be written: {place} is a file, expected a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: permission denied for {place}")
