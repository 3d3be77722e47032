"""The choice of kernels: rows are well formed, and a row can only name what can run."""

import dataclasses
import json
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from triton_kernels.conv.fused import FORWARD, INPUT_GRAD
from triton_kernels.conv.hopper.narrow_output import NarrowOutput
from triton_kernels.conv.hopper.stationary import stationary_weights
from triton_kernels.conv.refusals import Only
from triton_kernels.conv.split import CONV_SPLIT
from triton_kernels.conv.weight_grad import WEIGHT_GRAD
from triton_kernels.registry import choose as registry, rows, search
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.kernel import Kernel, Op
from triton_kernels.registry.spec import ConvSpec, Spec
from triton_kernels.runtime import device as device_module
from triton_kernels.runtime.device import Device

from .chips import HOPPER

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((Path(rows.__file__).parents[1] / "measured").glob("*.jsonl"))

AMPERE = Device(tma=False, num_sms=108, shared_memory=166_912, arch=80)


class Tile(NamedTuple):
    size: int
    warps: int


class Other(NamedTuple):
    size: int
    warps: int


@dataclasses.dataclass(frozen=True)
class Sized(Spec):
    size: int
    channels: int
    filters: int


TILES = [Tile(64, 4), Tile(128, 4), Tile(256, 8), Other(128, 4)]

KERNELS = (
    Kernel("tile", Tile, lambda *_: None, lambda *_: TILES[:3]),
    Kernel("other", Other, lambda *_: None, lambda *_: TILES[3:]),
)


def choose(n=8, run=None, size=16, similar=False, filters=3, dtype="bf16", gpu=HOPPER) -> tuple:
    op = Op("op", ("size", "channels", "filters", "dtype"), KERNELS, similar)
    return registry.select(op, Sized(n, dtype, size, 16, filters), gpu, run).config


def row(n, size=128, warps=4, *, kernel="tile", of=16, filters=3) -> dict:
    shape = {"size": of, "channels": 16, "filters": filters, "dtype": "bf16"}
    config = {"size": size, "warps": warps}
    return {"op": "op", "n": n, **shape, "kernel": kernel, "config": config}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A function that installs rows, and no others."""

    def install(*found: dict) -> None:
        folder = tmp_path / "measured"
        rows.save(list(found), folder / rows.file_name(HOPPER))
        monkeypatch.setattr(rows, "_SHIPPED", folder)
        monkeypatch.setenv("TRITON_DIFFUSION_CACHE", str(tmp_path / "cache"))
        rows.table.cache_clear()

    install()
    yield install
    rows.table.cache_clear()


@pytest.mark.usefixtures("measured")
def test_without_a_measurement_the_default():
    assert choose() == TILES[0]


def test_the_nearest_batch_is_taken(measured):
    measured(row(8), row(128, 256, 8))
    assert [choose(n) for n in (1, 8, 31, 33, 512)] == [*[TILES[1]] * 3, *[TILES[2]] * 2]


@pytest.mark.parametrize("off", ["tile", "op/tile", "a,tile,b"])
def test_a_kernel_that_is_switched_off_is_not_taken(measured, off):
    """Not where it was measured either, and by no other op whose kernel has another name."""
    measured(row(8))
    op = Op("op", ("size", "channels", "filters", "dtype"), KERNELS)
    spec, gpu = Sized(8, "bf16", 16, 16, 3), HOPPER._replace(off=off)
    assert registry.select(op, spec, HOPPER).config == TILES[1]
    assert registry.select(op, spec, gpu).config == TILES[3]
    assert registry.explain(op, spec, gpu)[0].refused == "it is switched off"
    assert op.why_not(KERNELS[0], spec, HOPPER._replace(off="other,op2/tile")) is None
    with pytest.raises(ValueError, match="tile: it is switched off; other: it is switched off"):
        registry.select(op, spec, HOPPER._replace(off="tile,op/other"))


def test_a_kernel_refuses_terms_of_an_epilogue_that_it_does_not_add():
    """Whatever its own `refuse` says; so a new field of `TERMS` is taken by no kernel at first."""
    with_terms = ConvSpec(8, "bf16", 16, 16, 64, 64, residual=True, stats=True)
    assert with_terms.added == ("residual", "stats")
    for adds, why in (
        (("residual", "stats", "emb"), None),
        (("stats",), "its epilogue does not add residual"),
        ((), "its epilogue does not add residual, stats"),
    ):
        kernel = Kernel("one", Tile, lambda *_: None, lambda *_: TILES[:1], adds=adds)
        assert Op("op", (), (kernel,)).why_not(kernel, with_terms, HOPPER) == why


def test_kernels_of_hopper_want_its_shared_memory():
    small = HOPPER._replace(shared_memory=128 << 10)
    spec = ConvSpec(128, "bf16", 64, 64, 64, 64, filters=(64, 64))
    assert registry.select(FORWARD, spec, HOPPER).kernel.name == "tile_mma"
    assert registry.select(FORWARD, spec, small).kernel.name == "tma"
    assert "227 KB of shared memory, not 128" in FORWARD.kernel("tile_mma").refuse(spec, small)


@pytest.mark.parametrize(
    "only, of, why",
    [
        (Only(hopper=True), {}, None),
        (Only(hopper=True), {"gpu": AMPERE}, "compute capability 9"),
        (Only(tma=True), {"gpu": AMPERE}, "no TMA unit"),
        (Only(tma=True), {"c": 36}, "36 channels are no multiple of 16 bytes"),
        (Only(dtypes=("bf16", "tf32")), {"dtype": "fp32"}, "fp32; it multiplies bf16, tf32"),
        (Only(stride=1), {"stride": 2}, "it does stride 1, not 2"),
        (Only(filters=(3, 3)), {}, None),
        (Only(filters=(1, 1)), {}, "1x1 filters of stride 1 and padding 0, not 3x3"),
        (Only(multiple=64), {"c": 128, "first": 96}, "96 channels are no multiple of 64"),
        (Only(widths=(8, 32)), {}, "rows of 16 pixels; it takes 8, 32"),
    ],
)
def test_what_a_kernel_is_only_for(only, of, why):
    of = {"dtype": "bf16", "c": 64, **of}
    gpu, dtype = of.pop("gpu", HOPPER), of.pop("dtype")
    said = only(ConvSpec(8, dtype, 16, 16, k=64, **of), gpu)
    assert said == why if why is None else why in said


def test_the_example_of_an_own_kernel(device, monkeypatch):
    monkeypatch.setattr(device_module, "kernels", set(device_module.kernels))
    own = runpy.run_path(str(ROOT / "examples" / "own_kernel.py"))
    for shape in ((3, 5, 7), (2, 1024), (0, 4)):
        x, z = torch.randn(2, *shape, device=device).half()
        exact = x.double() - 3 * z.double()
        torch.testing.assert_close(own["scaled_add"](x, z, -3), exact.half())
    spec = own["ScaledAddSpec"](256, "bf16", 4096)
    assert registry.select(own["SCALED_ADD"], spec, HOPPER).config == own["Flat"](1024)
    assert own["Flat"](4096) in own["FLAT"].configs(spec, HOPPER)


def test_a_kernel_is_known_by_its_name(measured):
    """Two kernels may have configurations of equal numbers."""
    measured(row(8, kernel="other"))
    assert type(choose()) is Other
    measured(row(8, kernel="gone"))
    assert choose() == TILES[0]


def test_configurations_of_two_kernels_are_never_equal():
    """Though they are tuples, of numbers that may be the same."""
    narrow, stationary = NarrowOutput(256), stationary_weights.StationaryWeights(256)
    assert narrow == NarrowOutput(256) != stationary
    assert stationary not in (narrow, (256,))
    assert len({narrow, stationary, NarrowOutput(256)}) == 2


def test_a_kernel_without_a_configuration_class_has_one_configuration():
    """Which names its kernel as others do, and which no other kernel takes for its own."""
    whole, halves = Kernel("whole"), Kernel("halves")
    (config,) = whole.configs(Spec(8, "bf16"), HOPPER)
    assert config.kernel == "whole" and config._asdict() == {} and config == whole.config()
    assert config != halves.config() and Op("op", (), (halves, whole)).kernel_of(config) is whole
    assert whole.meant({}, [config]) == config and whole.meant({"size": 8}, [config]) is None


def test_a_configuration_that_is_not_listed_any_more_is_not_used(measured, caplog):
    measured(row(8, 512, 8))
    assert choose() == TILES[0]
    assert "tile does not list {'size': 512, 'warps': 8} for this shape" in caplog.text
    fields = row(8) | {"config": {"size": 128, "warps": 4, "more": 1}}
    measured(fields)
    assert choose() == TILES[0]


class Grown(NamedTuple):
    size: int
    warps: int
    more: int = 1


def test_a_row_that_is_older_than_a_field_has_its_default():
    grown, old = Kernel("tile", Grown, lambda *_: None), {"size": 64, "warps": 4}
    assert grown.meant(old, [Grown(64, 4, 2), Grown(64, 4)]) == Grown(64, 4)
    assert grown.meant(old, [Grown(64, 4, 2)]) is None
    assert grown.meant(old | {"more": 2}, [Grown(64, 4, 2)]) == Grown(64, 4, 2)
    op = Op("op", ("size", "channels", "filters"), (grown,))
    fields = "size", "channels", "filters"
    assert op.wrong_names(fields, fields, "tile", old) is None
    assert "needs warps" in op.wrong_names(fields, fields, "tile", {"size": 64})


class TestOtherShapes:
    """What has been measured for a shape says something of those that are like it."""

    @pytest.fixture(autouse=True)
    def some(self, measured):
        measured(row(8), row(8, 256, 8, of=256), row(8, 512, of=64), row(8, 64, filters=1))

    @pytest.mark.parametrize(
        ("size", "n", "tile"),
        [(32, 8, TILES[1]), (20, 8, TILES[1]), (128, 8, TILES[2]), (32, 64, TILES[2])],
    )
    def test_the_most_similar_is_taken(self, size, n, tile):
        assert choose(n, size=size, similar=True) == tile

    def test_both_types_of_16_bits_are_as_fast(self):
        assert choose(dtype="fp16", similar=True) == TILES[1]
        assert choose(dtype="fp32", similar=True) == TILES[0]

    def test_only_if_it_is_asked_for(self):
        assert choose(size=32) == TILES[0]

    def test_a_measurement_of_the_shape_comes_first(self):
        assert choose(4096, size=16, similar=True) == TILES[1]

    def test_not_of_other_filters(self):
        assert choose(size=32, filters=5, similar=True) == TILES[0]

    def test_not_from_afar(self):
        assert choose(size=16 << 10, similar=True) == TILES[0]

    def test_not_between_small_sizes(self):
        """They may be anything: a stride, a number of terms."""
        assert choose(size=8, similar=True) == TILES[0]


class Split(NamedTuple):
    size: int
    splits: int


def test_the_same_tile_has_about_as_many_parts():
    """How many depends on the shape: of a row of another one the nearest number is meant."""
    kernel = Kernel("split", Split, lambda spec, gpu: None, lambda spec, gpu: ())
    listed = [Split(64, 7), Split(64, 14), Split(64, 3), Split(128, 30)]
    assert kernel.meant({"size": 64, "splits": 30}, listed) == Split(64, 14)
    assert kernel.meant({"size": 128, "splits": 1}, listed) == Split(128, 30)
    assert kernel.meant({"size": 256, "splits": 1}, listed) is None
    assert kernel.meant({"size": 64}, listed) is None


@pytest.mark.usefixtures("measured")
class TestSearch:
    def test_each_share_is_compiled_once(self):
        ran = []
        for part in range(2):
            with search.search(part, 2, timed=False):
                for n in (1, 2, 2, 3):
                    choose(n, lambda tile, n=n: ran.append((n, tile)))
        assert sorted(ran) == sorted((n, tile) for n in (1, 2, 3) for tile in TILES)

    def test_wrong_tiles_are_left_out(self, monkeypatch):
        """The fastest one is wrong here, and must not win."""
        times = {64: 3.0, 128: 2.0, 256: 1.0}
        results = {64: 1.0, 128: 1.0, 256: 1.1}

        def run(tile):
            value = torch.tensor([results[tile.size]])
            value.tile = tile.size
            return value

        monkeypatch.setattr(search, "time_call", lambda run, best: times[run().tile])
        with search.search() as found:
            choose(8, run)
        assert found.rows == [row(8)]
        assert [r["config"]["size"] for r in found.rejected] == [256]
        assert len(found.times) == 3 and found.defaults == [row(8, 64)]


def test_saved_measurements_add_up(tmp_path):
    path = tmp_path / "a" / "rows.jsonl"
    rows.save([row(2)], path)
    rows.save([row(3, 256, 8)], path)
    rows.save([row(2, 64)], path)
    assert rows.read(path) == [row(2, 64), row(3, 256, 8)]


def test_a_row_s_fields_are_in_any_order(tmp_path, measured):
    turned = dict(reversed(row(8, 256, 8).items()))
    measured(turned)
    assert choose() == TILES[2]
    path = tmp_path / "rows.jsonl"
    rows.save([turned], path)
    rows.save([row(8)], path)
    assert rows.read(path) == [row(8)]  # replaced


def test_several_may_save_side_by_side(tmp_path):
    path = tmp_path / "rows.jsonl"
    with ThreadPoolExecutor(4) as threads:  # the lock is of a file, and as good for processes
        list(threads.map(lambda n: rows.save([row(n)], path), range(1, 41)))
    assert len(rows.read(path)) == 40 and list(tmp_path.iterdir()) == [path]


def without(name: str) -> dict:
    return {key: value for key, value in row(8, 64).items() if key != name}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "'{' is no JSON"),
        ("\udcff", "is no JSON"),
        ("[1]", "[1] is no object with the fields op, n, kernel, config"),
        (row(8, 64) | {"n": -1}, "n is -1; expected a batch, at least 0"),
        (without("config"), "it has no config; expected the fields of its configuration"),
        (row(8, 64) | {"op": "opp"}, "op is 'opp'; there are attention"),
        (row(8, 64, kernel="tlie"), "kernel is 'tlie'; op has tile, other"),
        (row(8, 64) | {"szie": 16}, "op has no szie; its fields are size, channels, filters"),
        (without("size"), "op needs size; its fields are size, channels, filters, dtype"),
        (
            row(8, 64) | {"config": {"size": 64, "wraps": 4}},
            "of tile has no wraps; its fields are size, warps",
        ),
    ],
)
def test_a_wrong_line_is_named_once_and_the_others_serve(line, said, measured, caplog):
    """File, line, the wrong value and the right ones."""
    path = rows.cache_path(HOPPER)
    path.parent.mkdir(parents=True)
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{json.dumps(row(2))}\n{text}\n", errors="surrogateescape")
    for gpu in (HOPPER, HOPPER._replace(off="other")):  # two tables
        rows.table.cache_clear()
        assert choose(2, gpu=gpu) == choose(8, gpu=gpu) == TILES[1]
    (told,) = caplog.messages
    assert told.startswith(f"{path}:2: this measurement is not used: ") and said in told
    rows.save([row(8, 256, 8)], path)
    assert choose() == TILES[2]


def test_a_file_that_cannot_be_read_counts_as_none(measured, caplog):
    rows.cache_path(HOPPER).mkdir(parents=True)
    rows.table.cache_clear()
    assert choose() == TILES[0] and "IsADirectoryError" in caplog.text


def test_rows_belong_to_a_chip_and_not_to_a_product(measured):
    """An H100 and an H200 have the same multiprocessors, as many of them."""
    measured(row(8))
    twin = HOPPER._replace(tma=True)
    assert rows.table(twin) is not None and choose() == TILES[1]
    assert rows.file_name(HOPPER) == "sm_90-132.jsonl"
    assert not rows.table(HOPPER._replace(num_sms=114)) and not rows.table(AMPERE)
    assert not rows.table(HOPPER._replace(arch=0))  # the interpreter


def test_a_user_s_rows_come_first_and_are_of_one_version(measured, monkeypatch):
    measured(row(8))
    rows.save([row(8, 256, 8)], rows.cache_path(HOPPER))
    assert choose() == TILES[2]
    for module in (rows.triton, torch):
        with monkeypatch.context() as other:
            other.setattr(module, "__version__", "9.9.9")
            rows.table.cache_clear()
            assert choose() == TILES[1]


def test_shipped_rows_are_of_known_kernels():
    """Every row of a fused convolution names a kernel, with its fields, that can do it."""
    (path,) = SHIPPED
    found = rows.read(path)
    assert len(found) > 1000
    for op in (FORWARD, INPUT_GRAD, WEIGHT_GRAD):
        mine = [r for r in found if r["op"] == op.name]
        assert mine
        for r in mine:
            spec = _spec(op, r)
            kernel = op.kernel(r["kernel"])
            assert kernel is not None and kernel.refuse(spec, HOPPER) is None, r
            configs = kernel.configs(spec, HOPPER)
            assert kernel.meant(r["config"], configs) is not None, r


def test_the_row_of_the_documents_is_one_of_them():
    page = (Path(__file__).parents[2] / "docs/choosing.md").read_text()
    assert json.loads(page.split("```json")[1].split("```")[0]) in rows.read(SHIPPED[0])


def _spec(op: Op, r: dict) -> ConvSpec:
    """A spec of that key."""
    given = {key: r[key] for key in op.key if key != "extras"}
    filters = (r["k"], r["c"]) if op is INPUT_GRAD else (r["c"], r["k"])
    if r.get("stride") == 2:
        given |= {"p": r["h"] // 2, "q": r["w"] // 2}
    few = tuple(3 if c == 16 else c for c in filters)
    return ConvSpec(n=r["n"], filters=few, extra=(64,) * r.get("extras", 0), **given)


@pytest.mark.parametrize("splits", [1, 7])
def test_a_weight_gradient_says_how_its_sum_is_cut(splits):
    """The number of parts is a field of the configuration, whichever kernel it is of."""
    spec = ConvSpec(8, "fp32", 16, 16, 64, 128, padding=(1, 1))
    for kernel in WEIGHT_GRAD.kernels:
        assert kernel.config._fields[-1] == "splits"
        if kernel.refuse(spec, HOPPER) is None:
            config = kernel.configs(spec, HOPPER)[0]._replace(splits=splits)
            assert (*config.tile, splits) == tuple(config) and type(config.tile) is kernel.tile


def test_float32_weight_gradients_are_told_by_their_kernel():
    """Six kernels were one, with a number that said which."""
    wide = ConvSpec(8, "fp32", 16, 16, 64, 128, padding=(1, 1))
    can = {k.name for k in WEIGHT_GRAD.kernels if k.refuse(wide, HOPPER) is None}
    assert can == {"mma_wgrad", "fp16_split_wgrad", "gather_wgrad"}
    pointwise = dataclasses.replace(wide, r=1, s=1, padding=(0, 0))
    can = {k.name for k in WEIGHT_GRAD.kernels if k.refuse(pointwise, HOPPER) is None}
    assert can == {"mma_wgrad", "pointwise_wgrad", "gather_wgrad"}
    stem = dataclasses.replace(wide, n=128, k=3, filters=(128, 3))
    can = {k.name for k in WEIGHT_GRAD.kernels if k.refuse(stem, HOPPER) is None}
    assert can == {"im2col_wgrad", "gather_wgrad"}


class TestSelect:
    def spec(self, **changes) -> ConvSpec:
        given = {"n": 32, "dtype": "bf16", "h": 64, "w": 64, "k": 64, "c": 64, "stats": True}
        return ConvSpec(**given | changes)

    @pytest.mark.usefixtures("measured")
    def test_what_nobody_has_measured_is_predicted(self):
        choice = registry.select(FORWARD, self.spec(), HOPPER)
        assert (choice.kernel.name, choice.why) == ("tile_mma", "predicted")

    def test_a_row_decides(self):
        choice = registry.select(FORWARD, self.spec(), HOPPER)
        assert choice.kernel.name == "stationary_weights" and choice.why == "measured"
        choice = registry.select(FORWARD, self.spec(n=20), HOPPER)
        assert choice.why == "like n=16" or choice.why == "like n=32"

    def test_every_kernel_has_a_reason(self):
        """Of what is refused the value that is wrong is named, and what would be right."""
        spec = self.spec(h=18, w=18, k=96, c=96)
        considered = {c.kernel: c for c in registry.explain(FORWARD, spec, HOPPER)}
        assert set(considered) == {kernel.name for kernel in FORWARD.kernels}
        taken = [c for c in considered.values() if c.chosen]
        assert [c.kernel for c in taken] == ["tma"] and taken[0].predicted > 0
        assert "images of 18x18" in considered["tile_mma"].refused
        assert "does not add stats" in considered["narrow_output"].refused

    def test_no_wgmma_no_hopper_kernel(self):
        reasons = {k.name: k.refuse(self.spec(), AMPERE) for k in FORWARD.kernels}
        assert reasons["pointer"] is None and "TMA unit" in reasons["tma"]
        hopper = "stationary_weights", "tile_mma", "narrow_output"
        assert all("wgmma" in reasons[name] for name in hopper)

    @pytest.mark.parametrize("channels", [64, 96, 320, 20, 3])
    @pytest.mark.parametrize("gpu", CHIPS)
    def test_every_chip_has_a_kernel(self, gpu, channels):
        """Of any number of channels, and both passes; what is predicted is some microseconds."""
        forward = self.spec(k=channels, c=channels, h=24, w=20)
        grad = dataclasses.replace(forward, stats=False, activation="silu", first=channels)
        weight = dataclasses.replace(forward, stats=False, p=24, q=20)
        for op, spec in ((FORWARD, forward), (INPUT_GRAD, grad), (WEIGHT_GRAD, weight)):
            choice = registry.select(op, spec, CHIPS[gpu].gpu)
            assert choice.config in choice.kernel.configs(spec, CHIPS[gpu].gpu)
            if choice.why == "predicted":
                assert 1 < choice.kernel.predict(spec, CHIPS[gpu].gpu, choice.config) < 10_000

    def test_masks_are_told_apart(self):
        """A cache of decisions must not hand a layer with dropout what one without it takes."""
        grad = self.spec(n=128, first=64, activation="silu", stats=False)
        plain = registry.select(INPUT_GRAD, grad, HOPPER)
        masked = registry.select(INPUT_GRAD, dataclasses.replace(grad, mask=True), HOPPER)
        assert plain.kernel.name == "stationary_weights" and masked.kernel.name == "tile_mma"
        drawn = dataclasses.replace(grad, mask=True, drawn=True)  # its threads hold no four
        assert registry.select(INPUT_GRAD, drawn, HOPPER).kernel.name == "tma"

    def test_a_row_of_another_shape_is_passed_over_if_it_is_slow(self, measured):
        """Where models were fitted to times they say so; elsewhere the row is all that is known."""
        spec = self.spec(n=8, h=16, w=16, k=1280, c=1280, stats=False)
        small = {"block_c": 64, "block_m": 64, "block_k": 64, "num_warps": 4, "num_stages": 4}
        shape = {"h": 16, "w": 16, "k": 640, "c": 640, "r": 3, "s": 3, "dtype": "bf16"}
        shape |= {"residual": False, "extras": 0, "stats": False}
        named = {"kernel": "tma", "config": small | {"rows": 1}}
        measured({"op": "conv_forward", "n": 8, **shape, **named})
        choice = registry.select(FORWARD, spec, HOPPER)
        assert (choice.kernel.name, choice.why) == ("tile_mma", "predicted")
        named["config"] |= {"block_k": 32, "num_stages": 3}
        measured({"op": "conv_forward", "n": 8, **shape, **named} | {"dtype": "fp32"})
        choice = registry.select(FORWARD, dataclasses.replace(spec, dtype="fp32"), HOPPER)
        assert choice.config.block_k == 32 and choice.why == "like n=8 k=640 c=640"

    @pytest.mark.parametrize(("n", "doubted"), [(256, False), (128, False), (4, True), (1, True)])
    def test_a_row_of_another_batch_is_passed_over_if_it_is_slow(self, measured, n, doubted):
        """A tile of 256 pixels leaves most of the chip idle at four images of 16x16."""
        shape = {"h": 16, "w": 16, "k": 256, "c": 256, "r": 3, "s": 3, "dtype": "bf16"}
        shape |= {"residual": False, "extras": 0, "stats": False}
        config = {"block_m": 256, "filters_with_pixels": False}
        measured({"op": "conv_forward", "n": 64, **shape, "kernel": "tile_mma", "config": config})
        spec = self.spec(n=n, h=16, w=16, k=256, c=256, stats=False)
        choice = registry.select(FORWARD, spec, HOPPER)
        assert choice.why == ("predicted" if doubted else "like n=64")
        assert (choice.config.block_m < 256) == doubted

    @pytest.mark.parametrize(
        ("layer", "kernel"),
        [
            ((1, 8, 256, 256, 3), "early_parts"),
            ((1, 4, 1280, 1280, 1), "early_parts"),
            ((1, 8, 1280, 1280, 3), "split_k"),
            ((1, 16, 1280, 640, 3), "split_k"),
            ((4, 8, 768, 768, 3), "split_k"),
        ],
    )
    @pytest.mark.parametrize("gpu", ["h100", "b200", "rtx5090"])
    def test_long_sums_of_few_images_are_by_tiles(self, gpu, layer, kernel):
        """One round trip to memory is for short ones."""
        n, side, k, c, r = layer
        spec = self.spec(n=n, h=side, w=side, k=k, c=c, r=r, s=r, stats=False)
        assert registry.select(CONV_SPLIT, spec, CHIPS[gpu].gpu).kernel.name == kernel

    def test_nothing_that_can_do_it(self):
        never = Kernel("never", Tile, lambda spec, gpu: "it never does", lambda spec, gpu: TILES)
        with pytest.raises(ValueError, match="never: it never does"):
            registry.select(Op("nothing", ("h",), (never,)), self.spec(stats=False), HOPPER)
