"""The choice of tiles: tables are well formed, and a table can only name what can run."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from triton_kernels import tuning

SHIPPED = sorted((Path(tuning.__file__).parent / "tuned").glob("*.json"))


class Tile(NamedTuple):
    size: int
    warps: int


TILES = [Tile(64, 4), Tile(128, 4), Tile(256, 8)]


def choose(n: int = 8, run=None) -> Tile:
    return tuning.choose("op", (n, 16, 16), lambda: TILES, lambda: TILES[0], run)


@pytest.fixture
def table(monkeypatch):
    """A function that installs a table."""

    def install(entries: dict[str, list[int]]) -> None:
        by_name = {}
        for full, config in entries.items():
            name, n = full.rsplit(" n=", 1)
            by_name.setdefault(name, {})[int(n)] = config
        monkeypatch.setattr(tuning, "_table", lambda: by_name)

    return install


def test_without_a_measurement_the_default():
    assert choose() == TILES[0]


def test_the_nearest_batch_is_taken(table):
    table({"op 16 16 n=8": [128, 4], "op 16 16 n=128": [256, 8]})
    assert [choose(n) for n in (1, 8, 31, 33, 512)] == [
        *[TILES[1]] * 3,
        *[TILES[2]] * 2,
    ]


def test_a_tile_that_is_not_listed_any_more_is_not_used(table):
    table({"op 16 16 n=8": [512, 8]})
    assert choose() == TILES[0]


def test_search_compiles_each_share_once():
    ran = []
    for part in range(2):
        with tuning.search(part, 2, timed=False):
            for n in (1, 2, 2, 3):
                choose(n, lambda tile, n=n: ran.append((n, tile)))
    assert sorted(ran) == sorted((n, tile) for n in (1, 2, 3) for tile in TILES)


def test_search_leaves_wrong_tiles_out(monkeypatch):
    """The fastest one is wrong here, and must not win."""
    times = {64: 3.0, 128: 2.0, 256: 1.0}
    results = {64: 1.0, 128: 1.0, 256: 1.1}

    def run(tile: Tile):
        value = torch.tensor([results[tile.size]])
        value.tile = tile.size
        return value

    monkeypatch.setattr(tuning, "_time", lambda run, best: times[run().tile])
    with tuning.search() as found:
        choose(8, run)
    assert found.found == {"op 16 16 n=8": [128, 4]}
    assert len(found.rejected) == 1 and "256" in found.rejected[0]


def test_saved_measurements_add_up(tmp_path):
    path = tmp_path / "a" / "table.json"
    tuning.save({"op 1 n=2": [1, 2]}, path)
    tuning.save({"op 1 n=3": [3, 4]}, path)
    assert json.loads(path.read_text()) == {"op 1 n=2": [1, 2], "op 1 n=3": [3, 4]}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_tables_are_well_formed(path):
    entries = json.loads(path.read_text())
    assert len(entries) > 50
    for name, config in entries.items():
        assert name.rsplit(" n=", 1)[1].isdigit()
        assert config and all(isinstance(v, int) for v in config)
