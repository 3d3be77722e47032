"""One run, one process: who trains in a folder holds its `lock` file.

On one host the lock is the kernel's (flock), which is released when the process dies, however it
dies. A file system that several hosts share may not carry it from one to the other. Therefore the
file also says who holds it, and a number in it grows every few seconds; another host that finds
the file watches whether the number still grows, which takes no clocks that agree.
"""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import ConfigError
from ..runtime.file_lock import is_at, open_locked

LOCK = "lock"
BEAT = 10.0  # seconds between two signs of life
PATIENCE = 45.0  # seconds without one after which another host's process is taken for dead


class RunLock:
    """The lock of a run's folder, held from `take` until `release` or the end of the process."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOCK
        self._file: int | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def take(self) -> None:
        """Take the lock of a folder that exists; nothing if it is held already. ConfigError names
        the process that holds it."""
        while not self.held:
            try:
                file = open_locked(self.path)
            except BlockingIOError:
                raise ConfigError(self._refusal(_read(self.path))) from None
            try:
                self._outlive(file)
                if is_at(file, self.path):  # else its holder has deleted it meanwhile
                    self._file, file = file, None
            finally:
                if file is not None:
                    os.close(file)
        self._beat(0)
        self._ended.clear()
        self._thread = threading.Thread(target=self._live, name="run lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._file is None:
            return
        self._ended.set()
        self._thread.join()
        self.path.unlink(missing_ok=True)  # before others can lock it
        os.close(self._file)
        self._file = None

    def _outlive(self, file: int) -> None:
        """Wait until the process that left a note from another host is known to be dead.
        ConfigError: it lives."""
        note, began = _read(self.path), time.monotonic()
        if not note or note.get("boot") == _boot():  # a lock of this host says all
            return
        tqdm.write(
            f"{self.path} is from process {note.get('pid')} on {note.get('host')}: waiting"
            f" {PATIENCE:.0f} s for a sign of life"
        )
        while time.monotonic() - began < PATIENCE:
            time.sleep(min(1.0, PATIENCE / 10))
            if not is_at(file, self.path):
                return
            now = _read(self.path)
            if now and now.get("beat") != note.get("beat"):
                raise ConfigError(self._refusal(now))

    def _refusal(self, note: dict[str, Any]) -> str:
        who = "another process"
        if note:
            who = (
                f"process {note.get('pid')} on {note.get('host')} (since {note.get('since')}, last"
                f" sign of life {note.get('alive')})"
            )
        return f"{self.path.parent} is being trained by {who}; wait for it or give another run_dir"

    def _live(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT):
            beat += 1
            self._beat(beat)

    def _beat(self, beat: int) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        if beat == 0:
            self._since = now
        note = {"host": socket.gethostname(), "pid": os.getpid(), "since": self._since}
        note |= {"alive": now, "beat": beat, "boot": _boot()}
        text = json.dumps(note, indent=1).encode().ljust(400) + b"\n"  # of one length: one write
        try:
            os.pwrite(self._file, text, 0)
        except OSError:
            pass  # a full disk: the kernel's lock still holds


def _read(path: Path) -> dict[str, Any]:
    """What the holder wrote; nothing if it has not come to that. Opened anew, or a server of files
    might answer from memory."""
    try:
        note = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def _boot() -> str:
    """What tells this running kernel from all others, whatever they are called."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
