"""The error that means: the user gave something wrong, or the disk is full."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REFUSED = (  # what a disk or a path has against being written to
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
)


class ConfigError(ValueError):
    """A setting, path or file is wrong. The message is one line: the value that was wrong and the
    values that are right. Entry points print it and exit with code 2."""


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
