"""RUN/checkpoints: which folders in it are checkpoints, and how one goes.

    step_00003000            a checkpoint, always complete
    set_aside_step_00003000  one that no run goes on from by itself; only the user deletes it
    .writing_step_00003000   not finished, or
    .removing_step_00003000  not wholly deleted when a process was killed; the next start does it

A folder of another name is somebody else's, and an empty one holds nothing to go on from.
"""

import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"step_(\d{8,})")
_WRITING, _REMOVING, _ASIDE = ".writing_", ".removing_", "set_aside_"


def checkpoint_name(step: int) -> str:
    """Of the checkpoint after so many updates."""
    return f"step_{step:08d}"


def step_in_name(path: Path) -> int | None:
    """The step that a folder's name says; None if it is not the name of a checkpoint."""
    found = _NAME.fullmatch(path.name)
    return None if found is None else int(found[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted((p for p in _named(folder) if any(p.iterdir())), key=step_in_name)


def empty_checkpoints(folder: Path) -> list[Path]:
    """Folders of a checkpoint's name in which there is nothing."""
    return sorted(path for path in _named(folder) if not any(path.iterdir()))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a folder, if there is one."""
    found = list_checkpoints(folder)
    return found[-1] if found else None


def writing_place(final: Path) -> Path:
    """Where what is to become `final` is written: beside it, and not seen as one."""
    return final.with_name(f"{_WRITING}{final.name}")


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint so that no run goes on from it; returns its new path."""
    name = f"{_ASIDE}{checkpoint.name}"
    taken = {path.name for path in checkpoint.parent.iterdir()}
    free = next(n for n in (name, *(f"{name}-{i}" for i in range(2, 10**6))) if n not in taken)
    return checkpoint.rename(checkpoint.with_name(free))


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint. It loses its name first, so that no half of one is ever found."""
    doomed = checkpoint.with_name(f"{_REMOVING}{checkpoint.name}")
    _delete(doomed)
    os.replace(checkpoint, doomed)
    _delete(doomed)


def clean_up(folder: Path) -> None:
    """Delete what killed processes have left. Only while nobody else writes there."""
    for pattern in (f"{_WRITING}*", f"{_REMOVING}*"):
        for path in folder.glob(pattern):
            _delete(path)
        for path in folder.glob(f"step_*/{pattern}"):  # an average that was being added
            path.unlink(missing_ok=True)


def _delete(path: Path) -> None:
    """As far as it goes; what is left is deleted at the next start."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _named(folder: Path) -> list[Path]:
    try:
        return [p for p in folder.iterdir() if step_in_name(p) is not None and p.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
