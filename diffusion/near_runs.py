"""Which runs are near a folder that was typed wrong, for messages."""

import difflib
from pathlib import Path

from .errors import first_of


def runs_in(folder: Path) -> list[Path]:
    """The folders of runs in a folder, such as a sweep's."""
    return [file.parent for file in sorted(folder.glob("*/config.yaml"))]


def runs_near(path: Path, key: str = "", sweeps: bool = False) -> str:
    """Which run [KEY=]PATH may mean, and which others are in `runs` and beside it: the beginning of
    a clause, or "". With `sweeps` folders of runs are meant as well."""
    places = Path("runs"), path.parent
    runs = [run for place in places for run in runs_in(place)]
    if sweeps:
        within = [file.parents[1] for place in places for file in place.glob("*/*/config.yaml")]
        runs += [folder for folder in within if folder.name != "checkpoints"]
    named = {run.name: str(run) for run in runs}
    meant = difflib.get_close_matches(path.name, named, n=1)
    others = [found for name, found in sorted(named.items()) if name not in meant]
    hint = f"did you mean {f'{key}=' * bool(key)}{named[meant[0]]}? " if meant else ""
    if others:
        hint += f"{'other ' * bool(meant)}runs: {first_of(others)}; "
    return hint
