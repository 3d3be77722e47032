"""The choice of tiles: tables are well formed, and a table can only name what can run."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from triton_kernels.runtime import tuning

SHIPPED = sorted((Path(tuning.__file__).parents[1] / "tuned").glob("*.json"))


class Tile(NamedTuple):
    size: int
    warps: int


TILES = [Tile(64, 4), Tile(128, 4), Tile(256, 8)]


def choose(n=8, run=None, size=16, alike=None, filters=3, dtype=torch.bfloat16) -> Tile:
    key = (n, size, 16, filters, dtype)
    return tuning.choose("op", key, lambda: TILES, lambda: TILES[0], run, alike)


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
    table({"op 16 16 3 torch.bfloat16 n=8": [128, 4], "op 16 16 3 torch.bfloat16 n=128": [256, 8]})
    assert [choose(n) for n in (1, 8, 31, 33, 512)] == [
        *[TILES[1]] * 3,
        *[TILES[2]] * 2,
    ]


def test_a_tile_that_is_not_listed_any_more_is_not_used(table):
    table({"op 16 16 3 torch.bfloat16 n=8": [512, 8]})
    assert choose() == TILES[0]


class TestOtherShapes:
    """What has been measured for a shape says something of those that are like it."""

    @pytest.fixture(autouse=True)
    def rows(self, table):
        table(
            {
                "op 16 16 3 torch.bfloat16 n=8": [128, 4],
                "op 256 16 3 torch.bfloat16 n=8": [256, 8],
                "op 64 16 3 torch.bfloat16 n=8": [512, 8],  # is not listed
                "op 16 16 1 torch.bfloat16 n=8": [64, 4],
            }
        )

    @pytest.mark.parametrize(
        ("size", "n", "tile"),
        [(32, 8, TILES[1]), (20, 8, TILES[1]), (128, 8, TILES[2]), (32, 64, TILES[2])],
    )
    def test_the_most_similar_is_taken(self, size, n, tile):
        assert choose(n, size=size, alike=tuning.same) == tile

    def test_both_types_of_16_bits_are_as_fast(self):
        assert choose(dtype=torch.float16, alike=tuning.same) == TILES[1]
        assert choose(dtype=torch.float32, alike=tuning.same) == TILES[0]

    def test_only_if_it_is_asked_for(self):
        assert choose(size=32) == TILES[0]

    def test_a_measurement_of_the_shape_comes_first(self):
        assert choose(4096, size=16, alike=tuning.same) == TILES[1]

    def test_not_of_other_filters(self):
        assert choose(size=32, filters=5, alike=tuning.same) == TILES[0]

    def test_not_from_afar(self):
        assert choose(size=16 << 10, alike=tuning.same) == TILES[0]

    def test_not_between_small_sizes(self):
        """They may be anything: a stride, a number of terms."""
        assert choose(size=8, alike=tuning.same) == TILES[0]


def test_the_same_tile_has_about_as_many_parts():
    plans = [(64, 4, 7), (64, 4, 14), (64, 4, 3), (128, 4, 30)]
    assert tuning.same_tile([64, 4, 30], plans) == (64, 4, 14)
    assert tuning.same_tile([128, 4, 1], plans) == (128, 4, 30)
    assert tuning.same_tile([256, 4, 1], plans) is None


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
    assert found.found == {"op 16 16 3 torch.bfloat16 n=8": [128, 4]}
    assert len(found.rejected) == 1 and "256" in found.rejected[0]


def test_saved_measurements_add_up(tmp_path):
    path = tmp_path / "a" / "table.json"
    tuning.save({"op 1 n=2": [1, 2]}, path)
    tuning.save({"op 1 n=3": [3, 4]}, path)
    assert json.loads(path.read_text()) == {"op 1 n=2": [1, 2], "op 1 n=3": [3, 4]}


def test_several_may_save_side_by_side(tmp_path):
    path = tmp_path / "table.json"

    def save(i: int) -> None:
        tuning.save({f"op 1 n={i}": [i]}, path)

    with ThreadPoolExecutor(4) as threads:  # the lock is of a file, and as good for processes
        list(threads.map(save, range(1, 41)))
    assert len(json.loads(path.read_text())) == 40 and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text", ["", '{"op 16', "[1]", '{"op": [1]}', '{"op n=1": 3}', '{"op n=1": ["a"]}', "\udcff"]
)
def test_a_damaged_cache_is_not_used(text, tmp_path, monkeypatch, caplog):
    """Kernels run with the tiles of the shipped table, and the next measurement replaces it."""
    monkeypatch.setenv("TRITON_DIFFUSION_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "_on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    tuning.cache_path().write_text(text, errors="surrogateescape")
    tuning._table.cache_clear()
    try:
        assert choose() == TILES[0] and str(tuning.cache_path()) in caplog.text
        tuning.save({"op 16 16 3 torch.bfloat16 n=8": [256, 8]}, tuning.cache_path())
        assert choose() == TILES[2]
    finally:
        tuning._table.cache_clear()


def test_a_row_of_another_version_is_not_used(table):
    table({"op 16 16 3 torch.bfloat16 n=8": [128, 4, 1]})
    assert choose() == TILES[0]


def test_a_cache_is_of_one_gpu_torch_and_triton(tmp_path, monkeypatch):
    """What is saved there is found again, before what was shipped; by another version it is not."""
    monkeypatch.setenv("TRITON_DIFFUSION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_SHIPPED", tmp_path)
    monkeypatch.setattr(tuning, "_on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    name = "op 16 16 3 torch.bfloat16 n=8"
    (tmp_path / "some-gpu.json").write_text(json.dumps({name: [128, 4]}))
    tuning._table.cache_clear()
    try:
        assert choose() == TILES[1]  # as shipped
        path = tuning.cache_path()
        tuning.save({name: [256, 8]}, path)
        assert choose() == TILES[2] and path.parent == tmp_path / "cache"
        for module, version in ((tuning.triton, "9.9.9"), (torch, "9.9.9")):
            with monkeypatch.context() as other:
                other.setattr(module, "__version__", version)
                tuning._table.cache_clear()
                assert tuning.cache_path() != path and choose() == TILES[1]
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Another GPU")
        tuning._table.cache_clear()
        assert choose() == TILES[0]
    finally:
        tuning._table.cache_clear()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_tables_are_well_formed(path):
    entries = json.loads(path.read_text())
    assert len(entries) > 50
    for name, config in entries.items():
        assert name.rsplit(" n=", 1)[1].isdigit()
        assert config and all(isinstance(v, int) for v in config)
