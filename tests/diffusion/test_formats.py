"""Weights of unet.cu and guided-diffusion: read, written, refused."""

import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from diffusion.errors import ConfigError
from diffusion.formats.weights import (
    from_unet_cu_name,
    load_weights,
    read_unet_cu,
    save_guided,
    save_unet_cu,
    stored_image_shape,
    to_unet_cu_name,
)
from diffusion.models.unet import UNet

from .golden_unet import OPTIONS, check_golden

UNET_CU = OPTIONS["unet_cu_small"]
NAME = "unet_cu_small"
SMALL = {**UNET_CU, "model_channels": 4, "num_groups": 2, "num_head_channels": 4, "image_size": 4}


def small(**options) -> UNet:
    return UNet(**{**SMALL, **options})


def write_bin(path, values, *, batch=3, adamw=0, generators=0, magic=12345678, period=1000):
    header = np.zeros(256, "<i4")
    header[:10] = [magic, batch, 3, 4, 3, 4, 4, period, adamw, generators]
    path.write_bytes(header.tobytes() + np.asarray(values, "<f4").tobytes())
    return path


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    theirs = dict(b.named_parameters())
    return all(torch.equal(p, theirs[name]) for name, p in a.named_parameters())


# --- unet.cu .bin ---------------------------------------------------------------------------------


def test_recorded_bin_is_the_recorded_model(golden):
    model = UNet(**UNET_CU)
    assert load_weights(golden / f"{NAME}.bin", model) == "unet.cu weights"
    recorded = load_file(golden / f"{NAME}.weights.safetensors")
    for name, p in model.named_parameters():
        assert torch.equal(p, recorded[to_unet_cu_name(name)].float()), name
    check_golden(golden, NAME, model, {k: to_unet_cu_name(k) for k, _ in model.named_parameters()})


def test_recorded_bin_is_written_byte_for_byte(golden, tmp_path):
    model = UNet(**UNET_CU)
    load_weights(golden / f"{NAME}.bin", model)
    save_unet_cu(tmp_path / "again.bin", model, batch_size=2)
    assert (tmp_path / "again.bin").read_bytes() == (golden / f"{NAME}.bin").read_bytes()


def test_names_map_both_ways(golden):
    recorded = load_file(golden / f"{NAME}.weights.safetensors")
    ours = [name for name, _ in UNet(**UNET_CU).named_parameters()]
    assert {to_unet_cu_name(name) for name in ours} == recorded.keys()
    assert [from_unet_cu_name(to_unet_cu_name(name)) for name in ours] == ours


def test_bin_round_trip(tmp_path):
    model, other = small(), small(image_size=(4, 8))
    save_unet_cu(tmp_path / "weights.bin", model)
    load_weights(tmp_path / "weights.bin", other)
    assert same_parameters(model, other)


@pytest.mark.parametrize("generators", [0, 1], ids=["no_generators", "generators"])
def test_bin_with_moments(tmp_path, generators):
    model = small()
    count = model.num_parameters
    values = np.arange(3 * count)
    path = write_bin(tmp_path / "w.bin", values, adamw=1, generators=generators)
    if generators:
        path.write_bytes(path.read_bytes() + b"\xff" * (48 * 3 * 3 * 4 * 4))
    state = read_unet_cu(path, model)
    assert state.batch_size == 3 and state.max_period == 1000
    for section, tensors in enumerate((state.params, state.exp_avg, state.exp_avg_sq)):
        flat = torch.cat([tensors[name].flatten() for name, _ in model.named_parameters()])
        assert torch.equal(flat, torch.arange(count).float() + section * count)
    load_weights(path, model)
    assert next(model.parameters()).flatten()[1] == 1


def test_bin_without_moments(tmp_path):
    model = small()
    state = read_unet_cu(write_bin(tmp_path / "w.bin", np.ones(model.num_parameters)), model)
    assert state.exp_avg is None and state.exp_avg_sq is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"magic": 20240620}, "data set.*20240620"),
        ({"magic": 7}, "no weights file"),
        ({"period": 10000}, "max_period=10000; the model has 1000"),
        ({"adamw": 1}, "parameters and their moments"),
    ],
)
def test_wrong_header(tmp_path, change, words):
    model = small()
    path = write_bin(tmp_path / "w.bin", np.ones(model.num_parameters), **change)
    with pytest.raises(ConfigError, match=words):
        load_weights(path, model)


@pytest.mark.parametrize("generators", [0, 1], ids=["no_generators", "generators"])
@pytest.mark.parametrize("difference", [-1, 1])
def test_bin_of_another_size_names_both_counts(tmp_path, difference, generators):
    model = small()
    count = model.num_parameters
    path = write_bin(tmp_path / "w.bin", np.ones(count + difference), generators=generators)
    if generators:
        path.write_bytes(path.read_bytes() + bytes(48 * 3 * 3 * 4 * 4))
    with pytest.raises(ConfigError, match=f"{count + difference:,} parameters.*has {count:,}"):
        load_weights(path, model)


def test_truncated_header(tmp_path):
    (tmp_path / "w.bin").write_bytes(struct.pack("<5i", 12345678, 1, 3, 4, 3))
    with pytest.raises(ConfigError, match="truncated: 20 bytes.*1024"):
        load_weights(tmp_path / "w.bin", small())


@pytest.mark.parametrize(
    "option",
    ["conv_resample", "use_scale_shift_norm", "resblock_updown"],
)
def test_bin_cannot_hold_other_structures(tmp_path, option):
    with pytest.raises(ConfigError, match=f"{option}=false; the model has true"):
        save_unet_cu(tmp_path / "w.bin", small(**{option: True}))
    assert not (tmp_path / "w.bin").exists()


def test_bin_is_not_for_other_networks(tmp_path):
    with pytest.raises(ConfigError, match="2-D UNet.*Linear"):
        load_weights(write_bin(tmp_path / "w.bin", [1.0]), nn.Linear(1, 1))


# --- state dicts ----------------------------------------------------------------------------------


def save_safetensors(path, model):
    save_model(model, str(path))


@pytest.mark.parametrize("save", [save_guided, save_safetensors])
def test_state_dict_round_trip(tmp_path, save):
    model, other = small(num_classes=3), small(num_classes=3)
    save(tmp_path / "w", model)
    load_weights(tmp_path / "w", other)
    assert same_parameters(model, other)
    assert other.input_blocks[0][0].weight.permute(0, 2, 3, 1).is_contiguous()


def test_guided_file_is_a_plain_state_dict(tmp_path):
    model = small()
    save_guided(tmp_path / "w.pt", model)
    state = torch.load(tmp_path / "w.pt", weights_only=True)
    assert list(state) == [name for name, _ in model.named_parameters()]
    assert all(tensor.is_contiguous() for tensor in state.values())


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize("names", [str, to_unet_cu_name], ids=["guided", "unet_cu"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_pt_of_others(tmp_path, prefix, names, nested):
    model, other = small(), small()
    state = {prefix + names(k): v.clone() for k, v in model.state_dict().items()}
    if nested:
        state = {"step": 7, "buffers": {"betas": torch.ones(3)}, "model": state, "lr": 1e-4}
    torch.save(state, tmp_path / "w.pt")
    assert load_weights(tmp_path / "w.pt", other) == "state dict"
    assert same_parameters(model, other)


def prefixed(prefix: str, state: dict) -> dict:
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    "content",
    [
        lambda trained, average: {"model": trained, "model_ema": average, "epoch": 3},
        lambda trained, average: {"model": trained, "ema": {"decay": 0.9, "state_dict": average}},
        lambda trained, average: {
            "model": prefixed("module.", trained),
            "ema": prefixed("module.", average) | {"n_averaged": torch.tensor(7)},
        },
        lambda trained, average: {
            "state_dict": prefixed("model.", trained)
            | prefixed("ema_model.module.", average)
            | {"betas": torch.ones(3)},
        },
        lambda trained, average: prefixed("ema.", average) | prefixed("unet.", trained),
    ],
    ids=["model_ema", "deeper", "a count of updates", "as of Lightning", "without a dict"],
)
@pytest.mark.parametrize("ema", [True, False])
def test_the_average_in_a_training_script_s_file(tmp_path, content, ema):
    trained, average, loaded = small(), small(), small()
    torch.save(content(trained.state_dict(), average.state_dict()), tmp_path / "w.pt")
    load_weights(tmp_path / "w.pt", loaded, ema=ema)
    assert same_parameters(loaded, average if ema else trained)


def test_safetensors_of_a_whole_that_the_network_is_part_of(tmp_path):
    model, loaded = small(), small()
    weights = {name: x.contiguous() for name, x in model.state_dict().items()}
    save_file(prefixed("model.", weights), tmp_path / "w.safetensors")
    load_weights(tmp_path / "w.safetensors", loaded)
    assert same_parameters(model, loaded)


def test_state_dict_of_another_width(tmp_path):
    save_guided(tmp_path / "w.pt", small(model_channels=8))
    ours, theirs = small().num_parameters, small(model_channels=8).num_parameters
    words = rf"{theirs:,} parameters, the model has {ours:,}.*time_embed.0.weight is \[32, 8\]"
    with pytest.raises(ConfigError, match=words):
        load_weights(tmp_path / "w.pt", small())


def test_state_dict_with_too_little_and_too_much(tmp_path):
    save_guided(tmp_path / "w.pt", small())
    save_guided(tmp_path / "classes.pt", small(num_classes=3))
    with pytest.raises(ConfigError, match="label_emb.weight .* is not in the file"):
        load_weights(tmp_path / "w.pt", small(num_classes=3))
    with pytest.raises(ConfigError, match="label_emb.weight .* is not in the model"):
        load_weights(tmp_path / "classes.pt", small())


def test_a_refused_file_changes_nothing(tmp_path):
    save_guided(tmp_path / "w.pt", small(num_classes=3))
    model = small()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ConfigError):
        load_weights(tmp_path / "w.pt", model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Arbitrary:
    """Something that a state dict has no business holding."""


def test_objects_are_not_unpickled(tmp_path):
    torch.save({"model": small().state_dict(), "args": Arbitrary()}, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match="not unpickled"):
        load_weights(tmp_path / "w.pt", small())


def test_no_state_dict_inside(tmp_path):
    torch.save({"step": 3, "loss": 0.5}, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match="no state dict; found step, loss"):
        load_weights(tmp_path / "w.pt", small())


@pytest.mark.parametrize("save", [save_guided, save_safetensors])
def test_truncated_state_dict(tmp_path, save):
    save(tmp_path / "w", small())
    (tmp_path / "w").write_bytes((tmp_path / "w").read_bytes()[:1000])
    with pytest.raises(ConfigError, match="truncated"):
        load_weights(tmp_path / "w", small())


def test_missing_empty_and_foreign_files(tmp_path):
    with pytest.raises(ConfigError, match="none.pt cannot be read: No such file"):
        load_weights(tmp_path / "none.pt", small())
    with pytest.raises(ConfigError, match="Is a directory"):
        load_weights(tmp_path, small())
    for content in (b"", b"\x89PNG\r\n\x1a\n" + bytes(100)):
        (tmp_path / "w.pt").write_bytes(content)
        with pytest.raises(ConfigError, match="no weights file"):
            load_weights(tmp_path / "w.pt", small())
        with pytest.raises(ConfigError, match="no weights file"):
            stored_image_shape(tmp_path / "w.pt")
