"""What is printed may have no place to go: whoever read it has read enough, or the disk is full."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

HELP = ("-h", "--help")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def exit_where_nobody_reads() -> Iterator[None]:
    """Around what prints to stdout. If the pipe is closed, exit as a process does that SIGPIPE
    ends, and with 0 if it was for help; if the disk is full, with 2 after one line."""
    try:
        yield
    except BrokenPipeError:  # such as of head
        _drop_output()
        sys.exit(0 if set(HELP) & set(sys.argv[1:]) else 128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        what = error.filename or "what is printed"
        print(f"error: {what} cannot be written: {error.strerror}", file=sys.stderr)
        _drop_output()
        sys.exit(2)


def show(text: str) -> NoReturn:
    """Print this and exit with 0."""
    with exit_where_nobody_reads():
        print(text, flush=True)
    sys.exit(0)


def _drop_output() -> None:
    """Else Python, which flushes what is left when it exits, meets the same error again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
