"""What waits for ever is ended, says where it is, and leaves nothing that runs."""

import os
import sys
import time

import pytest

from .forked import ROOT
from .processes import descendants, end_all, ends, finish, started
from .run import _forked, environment

# a process that waits for another one, which waits as well, and ignores a polite request
WAITS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def for_ever():
    print("begun", flush=True)
    below = [sys.executable, "-c", "import time; time.sleep(1000)"]
    subprocess.run(below, stderr=subprocess.DEVNULL)  # or the stacks of both are one text
for_ever()
"""


def begin():
    process = started(
        [sys.executable, "-c", WAITS], stdout=-1, stderr=-1, text=True, env=environment()
    )
    while not (below := descendants(process.pid)):
        assert process.poll() is None
        time.sleep(0.01)
    return process, below


def test_a_process_that_takes_too_long():
    process, below = begin()
    with pytest.raises(AssertionError, match=r"took more than 1 s\n(.|\n)*in for_ever"):
        finish(process, 1)
    assert all(map(ends, below))


def test_what_a_test_leaves_ends_with_it():
    process, below = begin()
    end_all()
    assert process.poll() is not None and all(map(ends, below))


def test_copies_that_take_too_long_and_the_next_ones(tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "quick.py").write_text("print('here')")
    forked = _forked()
    for _ in range(2):
        code, out, _ = forked.run([str(tmp_path / "quick.py")], ROOT, dict(os.environ), 60)
        assert (code, out) == (0, "here\n")
        with pytest.raises(AssertionError, match=r"took more than 1 s\n(.|\n)*in for_ever"):
            forked.run([str(tmp_path / "waits.py")], ROOT, dict(os.environ), 1)
        assert not descendants(forked.process.pid)
