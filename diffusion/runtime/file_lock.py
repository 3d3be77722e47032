"""Files that one process holds: the kernel's lock (flock), which is released when the process dies,
however it dies."""

import errno
import fcntl
import os
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # of the file system


def open_locked(path: Path) -> int:
    """Open a file to read and write it, make it if there is none, and lock it until it is closed;
    returns its number. BlockingIOError: another process holds it. Where the file system has no
    locks the file is opened without one."""
    while True:
        file = _locked(os.open(path, os.O_RDWR | os.O_CREAT, 0o666))
        if is_at(file, path):
            return file
        os.close(file)  # who held it has deleted or renamed it meanwhile


def open_locked_folder(path: Path) -> int:
    """Likewise of a folder, which is there, and is opened to lock it alone."""
    return _locked(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


def _locked(file: int) -> int:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(file)
            raise
    return file


def is_at(file: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def delete_abandoned(path: Path) -> None:
    """Delete a file that processes lock while they write it, unless one does."""
    try:
        file = open_locked(path)
    except OSError:
        return
    path.unlink(missing_ok=True)
    os.close(file)
