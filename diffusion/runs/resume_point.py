"""Which checkpoint a run goes on from, and what becomes of newer ones."""

import warnings
from pathlib import Path

from ..errors import ConfigError
from ..formats.checkpoint import find_checkpoint, newest_good, read_state, verify_checkpoint
from ..formats.checkpoint_folder import (
    empty_checkpoints,
    latest_checkpoint,
    list_checkpoints,
    set_aside,
    step_in_name,
)


def resume_point(resume: str | None, run_dir: Path) -> Path | None:
    """The checkpoint that train.resume means, every file of which has been checked; None: begin
    anew. ConfigError: it would overwrite another run, or the checkpoint is damaged; then the newest
    good one is named, too."""
    folder = run_dir / "checkpoints"
    chosen = _choose(resume, run_dir, latest_checkpoint(folder))
    if chosen is None:
        return None
    for empty in empty_checkpoints(chosen.parent):
        if step_in_name(empty) > (step_in_name(chosen) or 0):
            warnings.warn(f"{empty} is empty and is skipped", stacklevel=2)
    try:
        verify_checkpoint(chosen)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_way_out(chosen, run_dir)}") from error
    return chosen


def newer_checkpoints(chosen: Path | None, run_dir: Path) -> list[Path]:
    """Those of the run that are later than the one it goes on from."""
    folder = run_dir / "checkpoints"
    if chosen is None or not _is_in(chosen, folder):
        return []
    step = step_in_name(chosen)
    return [path for path in list_checkpoints(folder) if step_in_name(path) > step]


def set_newer_aside(chosen: Path | None, run_dir: Path) -> list[Path]:
    """Rename them, so that a run goes on from an earlier checkpoint and nothing is lost; returns
    their new paths."""
    return [set_aside(path) for path in newer_checkpoints(chosen, run_dir)]


def _choose(resume: str | None, run_dir: Path, existing: Path | None) -> Path | None:
    if resume == "auto":
        return existing
    if resume in (None, "none"):
        if existing is not None:
            raise ConfigError(_holds(existing, run_dir))
        return None
    if existing is not None and _asked_before(resume, existing):
        return existing  # the same command again goes on where it stopped
    chosen = find_checkpoint(resume)
    if existing is not None and not _is_in(chosen, existing.parent):
        raise ConfigError(_holds(existing, run_dir))
    return chosen


def _asked_before(resume: str, existing: Path) -> bool:
    """Whether the run was begun with this very train.resume the last time."""
    try:
        _, config = read_state(existing)
    except ConfigError:
        return False  # a damaged one; another is asked for
    before = config["train"].get("resume")
    return isinstance(before, str) and Path(before).absolute() == Path(resume).absolute()


def _is_in(checkpoint: Path, folder: Path) -> bool:
    """Whether it is one of the folder's own, and not one that was set aside there."""
    named = step_in_name(checkpoint) is not None
    return named and checkpoint.resolve().parent == folder.resolve()


def _holds(existing: Path, run_dir: Path) -> str:
    return (
        f"{run_dir} already holds {existing.name}; use train.resume=auto to go on with it,"
        " train.resume=PATH of an earlier one of its checkpoints, or another run_dir"
    )


def _way_out(damaged: Path, run_dir: Path) -> str:
    good = newest_good(damaged.parent, before=damaged)
    if good is None:
        return f"there is no good checkpoint before it in {damaged.parent}: begin anew elsewhere"
    return (
        f"the newest good one is {good}: go on from it with"
        f" python train.py run_dir={run_dir} train.resume={good}"
    )
