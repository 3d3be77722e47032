"""Directories of diffusers: its models here, ours there, and what cannot be either."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    HeunDiscreteScheduler,
    PNDMScheduler,
    UNet2DModel,
)
from safetensors.torch import load_file, save_file

from diffusion.errors import ConfigError
from diffusion.factory import Process
from diffusion.formats.diffusers_directory import read_diffusers, save_diffusers
from diffusion.formats.diffusers_schedulers import scheduler_config
from diffusion.formats.trained import load_trained
from diffusion.models.unet1d import UNet1d
from diffusion.process.schedule import NoiseSchedule

from .diffusers_models import CPU, OURS, THEIRS, TOLERANCE, ours, perturbed, theirs, written


@torch.no_grad()
def difference(their_model: UNet2DModel, our_model: torch.nn.Module) -> float:
    size = their_model.config.sample_size
    size = (size, size) if isinstance(size, int) else size
    x, t = torch.randn(3, 3, *size), torch.tensor([0, 17, 999])
    labels = None if our_model.num_classes is None else torch.tensor([0, 2, 1])
    return (their_model(x, t, labels).sample - our_model(x, t, labels)).abs().max().item()


# --- their model here -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", THEIRS.values(), ids=THEIRS.keys())
def test_their_model_computes_the_same_here(tmp_path, options):
    model = theirs(**options)
    model.save_pretrained(tmp_path)
    assert difference(model, load_trained(tmp_path, CPU).model) < TOLERANCE


def test_an_objective_that_is_assumed_is_said(tmp_path, recwarn):
    """A network without its scheduler may predict something else, and would draw no picture."""
    theirs().save_pretrained(tmp_path)
    load_trained(tmp_path, CPU, diffusion={})
    assert not [w for w in recwarn if "what it was trained for" in str(w.message)]
    with pytest.warns(UserWarning, match="does not say what it was trained for: taken is"):
        load_trained(tmp_path, CPU)


def test_old_directories(tmp_path):
    """The parts at the top, weights that are pickled, and attention by its first names."""
    model = theirs()
    model.save_pretrained(tmp_path)
    DDPMScheduler(num_train_timesteps=50, variance_type="fixed_large").save_pretrained(tmp_path)
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "DDPMPipeline", "scheduler": ["diffusers", "DDPMScheduler"],'
        ' "unet": ["diffusers", "UNet2DModel"]}'
    )
    weights = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for new, name in old.items():
        weights = {key.replace(f".{new}.", f".{name}."): x for key, x in weights.items()}
    assert any(".query." in key for key in weights)
    torch.save(weights, tmp_path / "diffusion_pytorch_model.bin")
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    found = load_trained(tmp_path, CPU)
    assert difference(model, found.model) < TOLERANCE
    assert found.process.schedule.num_timesteps == 50
    assert found.process.variance == "fixed_large"


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "fp16"},
        {"max_shard_size": "20KB"},
        {"safe_serialization": False, "max_shard_size": "20KB"},
        {"variant": "fp16", "max_shard_size": "20KB"},
    ],
    ids=lambda o: ", ".join(map(str, o.items())),
)
def test_weights_of_other_names(tmp_path, options):
    model = theirs()
    model.save_pretrained(tmp_path, **options)
    assert not (tmp_path / "diffusion_pytorch_model.safetensors").exists()
    assert difference(model, load_trained(tmp_path, CPU).model) < TOLERANCE


def test_an_index_of_files_that_are_not_there(tmp_path):
    theirs().save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    shard = sorted(tmp_path.glob("*-of-*"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"names {shard.name}, which is not there"):
        load_trained(tmp_path, CPU)
    for content in ("{}", '{"weight_map": {"a": "../b.safetensors"}}', '{"weight_map": ["a"]}'):
        index.write_text(content)
        with pytest.raises(ConfigError, match="does not say in which files"):
            load_trained(tmp_path, CPU)


@pytest.mark.parametrize("ema", [True, False])
def test_a_checkpoint_of_their_training_scripts(tmp_path, ema):
    """unet/ and unet_ema/ without a model_index.json."""
    models = {"unet": theirs(), "unet_ema": perturbed(theirs())}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    found = load_trained(tmp_path, CPU, ema=ema).model
    assert difference(models["unet_ema" if ema else "unet"], found) < TOLERANCE


def test_options_that_a_file_leaves_out(tmp_path):
    """Have the defaults of UNet2DModel, and of the scheduler."""
    torch.manual_seed(0)
    model = UNet2DModel(sample_size=16, block_out_channels=(32, 32, 64, 64)).eval()
    DDPMPipeline(model, DDIMScheduler()).save_pretrained(tmp_path)
    given = {"sample_size": 16, "block_out_channels": [32, 32, 64, 64]}
    (tmp_path / "unet/config.json").write_text(json.dumps(given))
    scheduler = tmp_path / "scheduler/scheduler_config.json"
    scheduler.write_text('{"_class_name": "DDIMScheduler"}')
    found = load_trained(tmp_path, CPU)
    assert difference(model, found.model) < TOLERANCE
    assert found.process.prediction == "epsilon"
    betas = DDIMScheduler().betas
    np.testing.assert_allclose(found.process.schedule.betas, betas.double(), rtol=1e-4)
    scheduler.write_text('{"_class_name": "EDMEulerScheduler"}')
    with pytest.raises(ConfigError, match="EDMEulerScheduler, which has no betas"):
        load_trained(tmp_path, CPU)


@pytest.mark.parametrize(
    "kind",
    [DDPMScheduler, PNDMScheduler, DPMSolverMultistepScheduler, HeunDiscreteScheduler],
    ids=lambda kind: kind.__name__,
)
def test_options_that_a_scheduler_s_file_leaves_out(tmp_path, kind):
    """As those do that older versions wrote: each class has defaults of its own."""
    DDPMPipeline(theirs(), kind()).save_pretrained(tmp_path)
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({"_class_name": kind.__name__}))
    there, found = kind.from_pretrained(path.parent), read_diffusers(tmp_path)
    assert found.spacing == there.config.timestep_spacing
    np.testing.assert_allclose(found.process.schedule.betas, there.betas.double(), rtol=1e-4)


@pytest.mark.parametrize(
    ("scheduler", "option"),
    [
        (DDPMScheduler, {"thresholding": True}),
        (DDPMScheduler, {"steps_offset": 1}),
        (DDIMScheduler, {"set_alpha_to_one": False}),
        (DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
        (DPMSolverMultistepScheduler, {"solver_order": 3}),
        (DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}),
        (DPMSolverMultistepScheduler, {"final_sigmas_type": "sigma_min"}),
        (HeunDiscreteScheduler, {"use_karras_sigmas": True, "clip_sample": True}),
    ],
    ids=str,
)
def test_what_is_done_in_sampling_there_alone_is_said(tmp_path, scheduler, option):
    DDPMPipeline(theirs(), scheduler(**option)).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=next(iter(option))):
        load_trained(tmp_path, CPU)


@pytest.mark.parametrize(
    ("scheduler", "clip"),
    [
        (DDPMScheduler(), 1.0),
        (DDPMScheduler(clip_sample=False), None),
        (DDIMScheduler(clip_sample_range=0.5), 0.5),
        (DPMSolverMultistepScheduler(), None),
        (HeunDiscreteScheduler(clip_sample=True), 1.0),
        (HeunDiscreteScheduler(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_limit_of_x_0(tmp_path, recwarn, scheduler, clip):
    """Schedulers that cannot clip do not; whoever does not draw as they do is told."""
    DDPMPipeline(theirs(), scheduler).save_pretrained(tmp_path)
    assert read_diffusers(tmp_path).clip == clip
    load_trained(tmp_path, CPU)
    warned = [w for w in recwarn if "clip=" in str(w.message)]
    assert bool(warned) == (clip != 1)


@pytest.mark.parametrize(
    "options",
    [
        {"beta_start": 0.001, "beta_end": 0.01},
        {"beta_schedule": "scaled_linear"},
        {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"},
        {"beta_schedule": "sigmoid", "prediction_type": "sample"},
        {"trained_betas": [0.1, 0.2, 0.3], "num_train_timesteps": 3},
    ],
    ids=lambda o: o.get("beta_schedule", next(iter(o))),
)
@pytest.mark.parametrize("kind", [DDPMScheduler, PNDMScheduler, DPMSolverMultistepScheduler])
def test_their_process(tmp_path, kind, options):
    if kind is PNDMScheduler and options.get("prediction_type") == "sample":
        pytest.skip("PNDMScheduler has no sample prediction")
    if kind is not DDPMScheduler and options.get("beta_schedule") == "sigmoid":
        pytest.skip(f"{kind.__name__} has no sigmoid betas")
    scheduler = kind(**options)
    DDPMPipeline(theirs(), scheduler).save_pretrained(tmp_path)
    process = read_diffusers(tmp_path).process
    assert process.prediction == options.get("prediction_type", "epsilon")
    np.testing.assert_allclose(process.schedule.betas, scheduler.betas.double(), rtol=1e-4)


# --- ours there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options, process", OURS.values(), ids=OURS.keys())
def test_our_model_computes_the_same_there(tmp_path, options, process):
    trained = ours(options, process)
    pipeline = DDPMPipeline.from_pretrained(written(tmp_path, trained))
    # a period becomes a shift, which rounds the frequencies anew: 1e-7 of angles up to 1000
    tolerance = TOLERANCE if trained.model.max_period == 10000 else 1e-4
    assert difference(pipeline.unet, trained.model) < tolerance
    for option in ("prediction_type", "variance_type"):
        assert pipeline.scheduler.config[option] == getattr(
            trained.process, option.removesuffix("_type")
        )
    betas = torch.from_numpy(trained.process.schedule.betas)
    torch.testing.assert_close(pipeline.scheduler.betas.double(), betas, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("options, process", OURS.values(), ids=OURS.keys())
def test_round_trip(tmp_path, options, process):
    trained = ours(options, process)
    again = load_trained(written(tmp_path / "a", trained), CPU)
    x, t = torch.randn(2, 3, 8, 8), torch.tensor([3, 40])
    with torch.no_grad():
        torch.testing.assert_close(again.model(x, t), trained.model(x, t), rtol=0, atol=1e-4)
    assert again.model.conv_resample == trained.model.conv_resample or options.get(
        "resblock_updown"
    )
    assert (again.process.prediction, again.process.variance) == (
        trained.process.prediction,
        trained.process.variance,
    )
    np.testing.assert_array_equal(again.process.schedule.betas, trained.process.schedule.betas)
    second = written(tmp_path / "b", again)
    names = [path.relative_to(second) for path in second.rglob("*") if path.is_file()]
    assert len(names) == 4
    for name in names:
        assert (second / name).read_bytes() == (tmp_path / "a" / name).read_bytes(), name


def test_classes_and_the_null_class_come_back(tmp_path):
    trained = ours({"num_classes": 3, "label_dropout": 0.2})
    found = load_trained(written(tmp_path, trained, class_names=("a", "b", "c")), CPU)
    assert found.class_names == ("a", "b", "c")
    assert found.model.num_classes == 3 and found.model.null_label == 3
    pipeline = DDPMPipeline.from_pretrained(tmp_path)
    assert pipeline.unet.config.num_class_embeds == 4
    assert difference(pipeline.unet, trained.model) < TOLERANCE


def test_betas_without_a_name_are_written_out():
    process = Process()
    process.schedule = NoiseSchedule([0.1, 0.15, 0.3])
    assert scheduler_config(process)["trained_betas"] == [0.1, 0.15, 0.3]


# --- what cannot be said --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"channel_mult": [2, 3]}, "channel_mult=[2, 3] begins with 2"),
        ({"stem_channels": 8}, "stem_channels=8; UNet2DModel has -1 alone"),
        ({"decoder_attention": "last"}, "decoder_attention=last; UNet2DModel has all alone"),
        ({"num_head_channels": -1, "num_heads": 2, "attention_resolutions": [1]}, "num_heads=2"),
        ({"max_period": 1}, "max_period=1"),
    ],
)
def test_options_that_diffusers_has_not(tmp_path, options, words):
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, ours(options))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_policy_is_no_unet2dmodel(tmp_path):
    model = UNet1d(2, down_dims=(8, 16), diffusion_step_embed_dim=8)
    with pytest.raises(ConfigError, match="UNet2DModel cannot be"):
        save_diffusers(tmp_path, model, Process())


@pytest.mark.parametrize(
    "file, change, words",
    [
        ("unet/config.json", {"mid_block_type": None}, "mid_block_type=None"),
        ("unet/config.json", {"act_fn": "relu"}, "act_fn=relu"),
        ("unet/config.json", {"center_input_sample": True}, "center_input_sample=True"),
        ("unet/config.json", {"down_block_types": ["SkipDownBlock2D"] * 2}, "SkipDownBlock2D"),
        ("unet/config.json", {"up_block_types": ["UpBlock2D"] * 2}, "attention at"),
        ("unet/config.json", {"downsample_type": "resnet", "up_block_types": 0}, "resamples by"),
        ("unet/config.json", {"_class_name": "UNet2DConditionModel"}, "expected a UNet2DModel"),
        (
            "unet/config.json",
            {"attention_head_dim": 8},
            "attention_head_dim=8; expected a number that",
        ),
        ("unet/config.json", {"attention_head_dim": "x"}, "divides the 12 channels"),
        ("unet/config.json", {"layers_per_block": 2}, "the file lacks"),
        ("unet/config.json", {"layers_per_block": 10**7}, "at 2 levels; expected at most 500"),
        ("unet/config.json", {"block_out_channels": [8, 16]}, "is (12, 8, 3, 3) there"),
        ("unet/config.json", {"num_class_embeds": 2}, "the file lacks label_emb.weight"),
        ("unet/config.json", {"out_channels": 6}, "variance=fixed_small"),
        ("unet/config.json", {"out_channels": None}, "out_channels=null; expected a whole"),
        ("unet/config.json", {"layers_per_block": [1, 1]}, "layers_per_block=[1, 1]; expected"),
        ("unet/config.json", {"block_out_channels": "8"}, "block_out_channels=8; expected a list"),
        ("unet/config.json", {"block_out_channels": [8, 8, 8]}, "expected 3 of them"),
        ("unet/config.json", {"sample_size": "8"}, "size=8 is wrong"),
        ("unet/config.json", {"num_class_embeds": "2"}, "num_class_embeds=2; expected a whole"),
        ("unet/config.json", {"down_block_types": [None, None]}, "expected 2 of them"),
        (
            "unet/config.json",
            {"upsample_type": ["conv"]},
            "upsample_type=['conv']; expected a name",
        ),
        ("scheduler/scheduler_config.json", {"_class_name": []}, "_class_name=[]; expected a name"),
        ("scheduler/scheduler_config.json", {"variance_type": [1]}, "variance_type=[1]; expected"),
        ("scheduler/scheduler_config.json", {"beta_schedule": {}}, "beta_schedule={}; expected a"),
        ("model_index.json", {"vqvae": ["diffusers", "VQModel"]}, "a pipeline of scheduler, unet"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "laplace"}, "laplace"),
        (
            "scheduler/scheduler_config.json",
            {"variance_type": "learned"},
            "variance_type=learned; choose one of",
        ),
        ("scheduler/scheduler_config.json", {"rescale_betas_zero_snr": True}, "no signal"),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": "x"}, "expected a whole"),
        (
            "scheduler/scheduler_config.json",
            {"timestep_spacing": "x"},
            "timestep_spacing=x; choose",
        ),
        ("scheduler/scheduler_config.json", {"trained_betas": "x"}, "trained_betas=x; expected"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_models_that_this_is_not(tmp_path, file, change, words):
    folder = written(tmp_path, ours())
    config = json.loads((folder / file).read_text())
    if change.get("up_block_types") == 0:  # attention on top, where the kinds of resampling differ
        change = change | {
            "down_block_types": ["AttnDownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "AttnUpBlock2D"],
        }
    (folder / file).write_text(json.dumps(config | change))
    with pytest.raises(ConfigError) as caught:
        load_trained(folder, CPU)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_directories(tmp_path):
    folder = written(tmp_path, ours())
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)
    save_file(tensors | {"down_blocks.0.extra.weight": torch.zeros(2)}, weights)
    with pytest.raises(ConfigError, match=r"down_blocks.0.extra.weight \[2\] is in the weights"):
        load_trained(folder, CPU)
    weights.write_bytes(whole[:-10])
    with pytest.raises(ConfigError, match="may be truncated"):
        load_trained(folder, CPU)
    weights.unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        load_trained(folder, CPU)
    torch.save({"a": Path("x")}, weights.with_suffix(".bin"))
    with pytest.raises(ConfigError, match="not unpickled"):
        load_trained(folder, CPU)
    torch.save({"a": 1}, weights.with_suffix(".bin"))
    with pytest.raises(ConfigError, match="holds no state dict"):
        load_trained(folder, CPU)
    (folder / "unet" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json cannot be read"):
        load_trained(folder, CPU)
    (folder / "unet" / "config.json").unlink()
    with pytest.raises(ConfigError, match="has no network; expected unet/config.json"):
        load_trained(folder, CPU)
