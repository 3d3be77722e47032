"""Arrays of measured data: read as they lie, learned without units, drawn in them again."""

import zipfile

import numpy as np
import pytest
import torch
import yaml

import diffusion
from diffusion.data import load_dataset
from diffusion.data.batches import Batches
from diffusion.data.packed import load_packed, write_packed
from diffusion.data.stored_images import StoredImages
from diffusion.data.values import Pixels, Units
from diffusion.errors import ConfigError
from diffusion.export.run import export
from diffusion.runs import evaluation
from diffusion.runs.evaluation import EvaluateSettings, evaluate
from diffusion.runs.prepare import prepare
from diffusion.runs.sampling import sample

from ..end_to_end.run import TINY as SETTINGS, run

CPU = torch.device("cpu")
OFFSETS, SCALES = np.array([0.0, 101_325.0, -3e-6]), np.array([2.0, 5.0, 1e-6])
TINY = {
    "name": "unet",
    "model_channels": 32,
    "channel_mult": [1, 2],
    "num_res_blocks": 1,
    "attention_resolutions": [],
}
QUICK = {"batch_size": 4, "sample_every": 0, "tensorboard": False, "precision": "fp32"}
SAMPLE = {"sampler": "ddim", "steps": 2, "device": "cpu", "precision": "fp32"}


def weather(count=10, side=8):
    """float32 [M, H, W, 3]: three quantities of very different size."""
    noise = np.random.default_rng(0).normal(size=(count, side, side, 3))
    return (noise * SCALES + OFFSETS).astype(np.float32)


def written(folder, form, array, labels=None):
    """The array in a file of that form; returns the options of the data set."""
    name = str(folder / "a")
    others = {} if labels is None else {"classes": labels}
    if form == "npy":
        np.save(f"{name}.npy", array)
        return {"path": f"{name}.npy"}
    if form == "zarr":
        zarr = pytest.importorskip("zarr")
        group = zarr.open_group(f"{name}.zarr", mode="w")
        for key, values in {"x": array, **others}.items():
            group.create_array(key, data=values)
    else:
        {"npz": np.savez, "compressed": np.savez_compressed}[form](name, x=array, **others)
    path = f"{name}.zarr" if form == "zarr" else f"{name}.npz"
    return {"path": path, "key": "x"} | ({"labels": "classes"} if others else {})


@pytest.mark.parametrize("layout", ["nhwc", "nchw", "nhw"])
@pytest.mark.parametrize("form", ["npy", "npz", "compressed", "zarr"])
def test_every_form_and_order_of_axes(tmp_path, form, layout):
    array = weather()[..., :1] if layout == "nhw" else weather()
    stored = {"nhwc": array, "nchw": array.transpose(0, 3, 1, 2), "nhw": array[..., 0]}[layout]
    labels = None if form == "npy" else np.arange(10) % 3
    data = load_dataset("array", **written(tmp_path, form, stored, labels))
    assert data.image_shape == array.shape[1:] and len(data) == 10 and data.values.layout == layout
    expected = (array - array.mean((0, 1, 2), np.float64)) / array.std((0, 1, 2), np.float64)
    seen = data.images[torch.tensor([7, 0, 7])]
    assert seen.dtype == torch.float32 and seen.is_contiguous()
    np.testing.assert_allclose(seen.numpy(), expected[[7, 0, 7]], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(data.values.finish(seen), stored[[7, 0, 7]], rtol=2e-7)
    assert labels is None or np.array_equal(data.labels, labels)


def test_nothing_is_read_to_open_a_file(tmp_path):
    array = np.zeros((3, 8, 8, 2), np.uint8)
    for form in ("npy", "npz"):
        images = load_dataset("array", **written(tmp_path, form, array)).images
        assert isinstance(images._rows, np.memmap)


@pytest.mark.parametrize("resident_bytes", [0, 2**30], ids=["gathered", "resident"])
@pytest.mark.parametrize("form", ["npy", "zarr"])
def test_a_batch_is_the_same_from_disk_and_from_memory(tmp_path, form, resident_bytes):
    data = load_dataset("array", **written(tmp_path, form, weather()))
    batches = Batches(data, 4, 0, CPU, resident_bytes=resident_bytes)
    for step in range(6):
        batches.load(step)
        images, index, _ = batches.part(0, 4)
        seen = images if index is None else images[index]
        assert torch.equal(seen, data.images[torch.from_numpy(batches._indices(step))])


def test_mean_and_deviation_of_large_numbers_and_of_constant_ones(tmp_path):
    array = weather(64)
    array[..., 2] = 7.0
    values = load_dataset("array", **written(tmp_path, "npy", array)).values
    np.testing.assert_allclose(values.mean, array.mean((0, 1, 2), np.float64), rtol=1e-9)
    deviation = array.astype(np.float64).std((0, 1, 2))
    np.testing.assert_allclose(values.deviation, [*deviation[:2], 1.0], rtol=1e-9)


def test_given_mean_and_deviation_are_taken(tmp_path):
    options = written(tmp_path, "npy", weather()) | {"mean": [1, 2, 3], "deviation": [4, 5, 6]}
    assert load_dataset("array", **options).values == Units((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


def test_bytes_are_images_unless_they_are_to_be_standardised(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (6, 12, 8, 8), dtype=np.uint8)
    options = written(tmp_path, "npy", array)
    data = load_dataset("array", **options)
    assert data.values == Pixels("nchw") and data.images[torch.tensor([0])].dtype == torch.uint8
    x = data.images[torch.arange(6)].float() / 127.5 - 1
    assert np.array_equal(data.values.finish(x), array)
    data = load_dataset("array", **options, standardise=True)
    back = data.values.finish(data.images[torch.arange(6)])
    assert back.dtype == np.uint8 and np.array_equal(back, array)


@pytest.mark.parametrize("dtype", ["<f2", ">f4", "<f8", "<i2", "<u2"])
def test_other_numbers_become_float32(tmp_path, dtype):
    array = np.random.default_rng(0).integers(0, 100, (6, 8, 8, 2)).astype(dtype)
    data = load_dataset("array", **written(tmp_path, "npy", array))
    drawn = data.values.finish(data.images[torch.arange(6)])
    assert drawn.dtype == np.float32
    np.testing.assert_allclose(drawn, array.astype(np.float32), atol=1e-4)


WRONG = {
    "no path": (None, {}, "dataset.path is not set"),
    "five axes": (np.zeros((2, 2, 2, 2, 2), "f4"), {}, r"shape \[2, 2, 2, 2, 2\]; expected"),
    "nothing": (np.zeros((0, 8, 8, 2), "f4"), {}, "none of them 0"),
    "text": (np.zeros((2, 8, 8), "U3"), {}, "holds <U3; expected uint8 or float32"),
    "objects": (np.array([[[None]]]), {}, "cannot be read"),
    "65 channels": (np.zeros((2, 128, 128, 65), "u1"), {}, "65 channels; the most is 64"),
    "ambiguous": (np.zeros((2, 8, 8, 8), "f4"), {}, "give dataset.layout=nhwc or nchw"),
    "layout": (np.zeros((2, 8, 8, 3), "f4"), {"layout": "hwc"}, "choose one of nhwc, nchw, nhw"),
    "axes of layout": (np.zeros((2, 8, 8), "f4"), {"layout": "nhwc"}, "expected 4 axes"),
    "size": (weather(), {"size": 16}, "size=16 differs from the 8x8"),
    "channels": (weather(), {"channels": 4}, "channels=4 differs from the 3"),
    "mean": (weather(), {"mean": [0]}, "mean has 1 number; .* has 3 channels"),
    "deviation": (weather(), {"deviation": [1, 0, 1]}, "expected numbers above 0"),
    "both": (weather(), {"standardise": False, "mean": [0, 0, 0]}, "leave one"),
    "key": (weather(), {"key": "x"}, "a single array; leave it out"),
    "labels": (weather(), {"labels": "y"}, "labels=y is no array"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arrays_and_options_are_one_line(tmp_path, case):
    array, options, message = WRONG[case]
    if array is not None:
        np.save(tmp_path / "a.npy", array, allow_pickle=True)
        options = {"path": tmp_path / "a.npy", **options}
    with pytest.raises(ConfigError, match=message) as error:
        load_dataset("array", **options)
    assert "\n" not in str(error.value)


def test_wrong_archives(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=weather(), y=np.arange(10), z=np.arange(9))
    with pytest.raises(ConfigError, match=r"holds 3 arrays \(x, y, z\); say which .* dataset.key"):
        load_dataset("array", path=path)
    with pytest.raises(ConfigError, match="dataset.key=w is no array of .*; did you mean"):
        load_dataset("array", path=path, key="w")
    with pytest.raises(
        ConfigError, match=r"a.npz: z is int64 \[9\]; expected whole numbers \[10\]"
    ):
        load_dataset("array", path=path, key="x", labels="z")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cut off"):
        load_dataset("array", path=path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"nothing")
    with pytest.raises(ConfigError, match="cannot be read as an array"):
        load_dataset("array", path=path)
    (tmp_path / "notes.npy").write_text("no array")
    with pytest.raises(ConfigError, match="it does not begin as a .npy does") as caught:
        load_dataset("array", path=tmp_path / "notes.npy")
    assert "pickle" not in str(caught.value)
    (tmp_path / "folder").mkdir()
    for wrong in ("nowhere.npy", "folder"):
        with pytest.raises(ConfigError, match="give a .npy, a .npz or a zarr"):
            load_dataset("array", path=tmp_path / wrong)


def test_numbers_that_are_not_finite_name_their_image(tmp_path):
    array = weather()
    array[7, 0, 0, 1] = np.nan
    options = written(tmp_path, "npy", array)
    with pytest.raises(ConfigError, match="not finite, first in image 7"):
        load_dataset("array", **options)
    data = load_dataset("array", **options, mean=[0, 0, 0], deviation=[1, 1, 1])
    with pytest.raises(ConfigError, match="not finite, first in image 7"):
        data.images[torch.tensor([3, 7])]


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 5, 64])
def test_any_number_of_channels_on_both_backends(tmp_path, channels):
    array = np.random.default_rng(0).normal(size=(8, channels, 4, 4)).astype(np.float32)
    dataset = {"name": "array", **written(tmp_path, "npy", array), "layout": "nchw"}
    losses = []
    for backend in ("torch", "triton"):
        run = tmp_path / backend
        settings = QUICK | {"batch_size": 1, "steps": 1, "sample_count": 0}
        model = TINY | {"channel_mult": [1]}
        losses.append(
            diffusion.train(run, dataset=dataset, model=model, backend=backend, **settings)
        )
        drawn = diffusion.sample(run, 2, steps=1, device="cpu")
        assert drawn.shape == (2, channels, 4, 4) and drawn.dtype == np.float32
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on three quantities, for three steps."""
    folder = tmp_path_factory.mktemp("array")
    dataset = {"name": "array", **written(folder, "npz", weather(), np.arange(10) % 2)}
    model = TINY | {"num_classes": 2}
    settings = QUICK | {"steps": 3, "sample_every": 2, "sample_count": 2, "sample_steps": 1}
    diffusion.train(folder / "run", dataset=dataset, model=model, device="cpu", **settings)
    return folder


def test_what_is_drawn_is_in_the_data_s_units(trained):
    """A linear function of what the sampler makes, clipped where the data end."""
    ckpt = {"ckpt": str(trained / "run"), "n": 5, **SAMPLE}
    drawn = {}
    for out in ("x.npy", "x.npz", "x.png"):
        sample(ckpt | {"out": str(trained / out)})
    drawn = np.load(trained / "x.npy")
    with np.load(trained / "x.npz") as file:
        assert np.array_equal(file["arr_0"], drawn) and file["arr_1"].tolist() == [0, 1, 0, 1, 0]
    found = diffusion.load(trained / "run", device="cpu", precision="fp32")
    with np.load(trained / "a.npz") as file:
        array = file["x"].astype(np.float64)
    np.testing.assert_allclose(found.values.mean, array.mean((0, 1, 2)), rtol=1e-9)
    sampler = found.sampler(CPU, sampler="ddim", steps=2)
    with np.load(trained / "a.npz") as file:
        apart = np.abs(file["x"] - np.array(found.values.mean)) / found.values.deviation
    assert sampler.clip == pytest.approx(apart.max()) and sampler.clip > 3
    x = sampler.sample(found.model.forward_nhwc, (5, 8, 8, 3), seed=0, labels=torch.arange(5) % 2)
    assert x.abs().max() > 1.5  # what a clip of images would show in
    np.testing.assert_allclose(
        drawn, x.numpy() * array.std((0, 1, 2)) + array.mean((0, 1, 2)), rtol=1e-4, atol=1e-9
    )
    assert diffusion.sample(found, 5, steps=2).tobytes() == drawn.tobytes()


def test_where_measured_numbers_do_not_go(trained):
    ckpt = {"ckpt": str(trained / "run"), "n": 1, **SAMPLE}
    with pytest.raises(ConfigError, match="a PNG does not hold measured numbers; expected a .npy"):
        sample(ckpt | {"out": str(trained / "folder")})
    with pytest.raises(ConfigError, match="decoder=x, but the model was not trained on latents"):
        sample(ckpt | {"decoder": "x"})
    assert sample(ckpt).suffix == ".npz"


def test_a_run_goes_on_with_the_mean_that_its_network_knows(trained, tmp_path, capsys):
    """The file has grown meanwhile: another mean would shift everything that is learned."""
    settings = yaml.safe_load((trained / "run" / "config.yaml").read_text())
    before = diffusion.load(trained / "run", device="cpu").values
    np.savez(tmp_path / "b.npz", x=weather(20) + 1, classes=np.arange(20) % 2)
    dataset = settings["dataset"] | {"path": str(tmp_path / "b.npz")}
    train = settings["train"] | {"steps": 4, "resume": str(trained / "run")}
    run = tmp_path / "run"
    diffusion.train(run, dataset=dataset, model=settings["model"], device="cpu", **train)
    assert diffusion.load(run, device="cpu").values == before
    assert "note: mean and deviation" in capsys.readouterr().out
    np.savez(tmp_path / "b.npz", x=np.zeros((9, 8, 8, 3), np.uint8), classes=np.arange(9) % 2)
    with pytest.raises(ConfigError, match="was trained on mean and deviation .* images of 8 bits"):
        diffusion.train(tmp_path / "c", dataset=dataset, model=settings["model"], **train)


def test_evaluated_with_the_mean_that_the_network_knows(tmp_path):
    """The held-out loss, also of a file that has another mean; no FID."""
    np.save(tmp_path / "a.npy", weather())
    dataset = {"name": "array", "path": str(tmp_path / "a.npy"), "held_out": 4}
    settings = QUICK | {"steps": 1, "sample_count": 0}
    diffusion.train(tmp_path / "run", dataset=dataset, model=TINY, device="cpu", **settings)
    ckpt = {"ckpt": str(tmp_path / "run"), "device": "cpu", "precision": "fp32", "batch_size": 4}
    known = evaluate(ckpt | {"metrics": ["loss"]})
    assert known["images"] == 4 and np.isfinite(known["held_out"])
    np.save(tmp_path / "b.npy", weather() * 3)
    settings = EvaluateSettings(**ckpt, metrics=["loss"], reference=str(tmp_path / "b.npy"))
    found = settings.load(CPU)
    _, data, _ = evaluation._reference(settings, found)
    seen = data.images[torch.arange(10)].double().numpy()
    units = seen * np.array(found.values.deviation) + np.array(found.values.mean)
    np.testing.assert_allclose(units, weather() * 3, rtol=1e-6)
    with pytest.raises(ConfigError, match="metrics=fid are of images of 8 bits; .* metrics=.loss"):
        evaluate(ckpt | {"metrics": ["fid"]})


def test_a_reference_of_several_arrays_is_read_as_the_data_were(tmp_path):
    classes = np.arange(10) % 2
    options = written(tmp_path, "npz", weather(), classes)
    dataset = {"name": "array", **options, "layout": "nhwc", "held_out": 4}
    settings, model = QUICK | {"steps": 1, "sample_count": 0}, TINY | {"num_classes": "auto"}
    diffusion.train(tmp_path / "run", dataset=dataset, model=model, device="cpu", **settings)
    ckpt = {"ckpt": str(tmp_path / "run"), "device": "cpu", "precision": "fp32"}
    np.savez(tmp_path / "b.npz", x=weather(6), classes=classes[:6], other=weather(6))
    row = evaluate(ckpt | {"metrics": ["loss"], "reference": str(tmp_path / "b.npz")})
    assert row["images"] == 6 and np.isfinite(row["held_out"])
    np.save(tmp_path / "c.npy", weather(6))
    with pytest.raises(ConfigError, match="the images for the loss have none; .* dataset.labels"):
        evaluate(ckpt | {"metrics": ["loss"], "reference": str(tmp_path / "c.npy")})


def test_what_is_exported_names_the_units(trained):
    out = trained / "diffusers"
    with pytest.warns(UserWarning, match="has to be brought back from mean and deviation"):
        export({"ckpt": str(trained / "run"), "format": "diffusers", "out": str(out)})


def test_from_the_command_line(tmp_path):
    np.save(tmp_path / "a.npy", weather().transpose(0, 3, 1, 2))
    tiny = [setting for setting in SETTINGS if not setting.startswith(("dataset", "experiment"))]
    command = ["train.py", *tiny, "dataset=array", "dataset.path=a.npy", "train.steps=1"]
    command += ["model=unet_tiny", "run_dir=run"]
    code, out, err = run(*command, cwd=tmp_path)
    assert code == 0 and "10 images 8x8x3" in out, err
    command = ["sample.py", "ckpt=run", "n=2", "steps=2", "device=cpu"]
    assert run(*command, "out=x.npy", cwd=tmp_path)[0] == 0
    drawn = np.load(tmp_path / "x.npy")
    assert drawn.shape == (2, 3, 8, 8) and np.abs(drawn[:, 1] - 101_325).max() < 50
    code, _, err = run(*command, "out=folder", cwd=tmp_path)
    assert code == 2 and "expected a .npy" in err and "Traceback" not in err


@pytest.mark.parametrize("kind", ["npz", "zarr"])
def test_one_array_of_several_is_packed_with_its_classes(tmp_path, kind):
    array, classes = weather().transpose(0, 3, 1, 2), np.arange(len(weather())) % 3
    path, out = tmp_path / f"several.{kind}", str(tmp_path / "a.packed")
    if kind == "npz":
        np.savez(path, fields=array, classes=classes, other=array)
    else:
        group = pytest.importorskip("zarr").open_group(str(path), mode="w")
        for name, values in (("fields", array), ("classes", classes), ("other", array)):
            group.create_array(name, shape=values.shape, dtype=values.dtype)[:] = values
    with pytest.raises(ConfigError, match="holds 3 arrays .* say which one is learned by key"):
        prepare(src=str(path), out=out)
    with pytest.raises(ConfigError, match="^key=nothing is no array"):
        prepare(src=str(path), out=out, key="nothing")
    settings = {"key": "fields", "layout": "nchw"}
    prepare(src=str(path), out=out, label="classes", **settings)
    packed, direct = load_packed(out), load_dataset("array", path=str(path), **settings)
    assert packed.values == direct.values and packed.labels.tolist() == classes.tolist()
    assert torch.equal(packed.images.to(CPU), direct.images.to(CPU))


def test_packed_keeps_numbers_units_and_digests(tmp_path):
    array = weather().transpose(0, 3, 1, 2)
    options = written(tmp_path, "npy", array)
    out = tmp_path / "a.packed"
    prepare(src=options["path"], out=str(out))
    direct, packed = load_dataset("array", **options), load_packed(out)
    packed.check()
    assert packed.values == direct.values and isinstance(packed.images, StoredImages)
    assert torch.equal(packed.images.to(CPU), direct.images.to(CPU))
    write_packed(tmp_path / "b.packed", packed)
    assert (tmp_path / "b.packed").read_bytes() == out.read_bytes()
    with pytest.raises(ConfigError, match="holds images of 8 bits; give out=FILE.packed"):
        write_packed(tmp_path / "b.bin", packed)
    content = bytearray(out.read_bytes())
    content[4096 + 768 * 3] ^= 1
    out.write_bytes(content)
    with pytest.raises(ConfigError, match="image 3 is not as it was written"):
        load_packed(out).check()
    damaged = content.replace(b'"mean"', b'"meen"')
    out.write_bytes(damaged)
    with pytest.raises(ConfigError, match="is damaged"):
        load_packed(out)
