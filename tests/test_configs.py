"""Every choice of every group composes and builds."""

import inspect
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException

import diffusion
from diffusion.errors import ConfigError
from diffusion.factory import Process, build_model, build_policy_model
from diffusion.models.blocks import AttentionBlock
from diffusion.policies.task import LOADERS
from diffusion.runtime.backend import TORCH_FP32
from diffusion.runtime.interrupt import Interrupted
from diffusion.settings import construct
from diffusion.training.optimizer import OptimizerSettings
from diffusion.training.trainer import TrainSettings
from triton_diffusion.entry import CONFIGS, describe, exit_codes, explain, plain, run_entry


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def composed(*overrides: str) -> dict:
    """What `train` is called with: the command has taken `plugin` by then."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        settings = plain(compose("train", overrides=list(overrides)))
    settings.pop("plugin")
    return settings


def build(config: dict) -> torch.nn.Module:
    construct(TrainSettings, config["train"], "train")
    construct(OptimizerSettings, config["optim"], "optim")
    process = construct(Process, config["diffusion"], "diffusion")
    dataset = config["dataset"]
    with torch.device("meta"):
        if dataset["name"] in LOADERS:
            options = {key: value for key, value in dataset.items() if key != "name"}
            assert set(options) == set(inspect.signature(LOADERS[dataset["name"]]).parameters)
            return build_policy_model(config["model"], TORCH_FP32, 3, 22, torch.device("meta"))
        size = dataset["size"] or 64
        size = (size, size) if isinstance(size, int) else tuple(size)
        return build_model(
            config["model"], TORCH_FP32, size, 3, process.learns_variance, torch.device("meta")
        )


GROUPS = ("dataset", "model", "diffusion", "optim", "experiment")
POLICY_MODELS = ("unet1d", "unet1d_small")  # these go with rollouts, all others with images
ALL = [(group, choice) for group in GROUPS for choice in choices(group)]


def test_every_group_has_choices():
    assert {group for group, _ in ALL} == set(GROUPS)
    assert all(Path(CONFIGS / group).is_dir() for group in GROUPS)


@pytest.mark.parametrize(("group", "choice"), ALL, ids=[f"{g}={c}" for g, c in ALL])
def test_choice_composes_and_builds(group, choice):
    overrides = [f"{group}={choice}"]
    if group == "model" and choice in POLICY_MODELS:
        overrides.append("dataset=trajectories")
    elif group == "dataset" and choice in LOADERS:
        overrides.append("model=unet1d_small")
    config = composed(*overrides)
    assert sum(p.numel() for p in build(config).parameters()) > 0


# by the papers, in millions; size and channels of an image, whether the variance is learned
PAPERS = {
    "ddpm_cifar10": (35.7, 32, 3, False),  # Ho et al. 2020, appendix B
    "edm_ddpmpp_cifar10": (55.7, 32, 3, False),  # Karras et al. 2022, table 7
    "adm_imagenet64": (296, 64, 3, True),  # Dhariwal and Nichol 2021, table 4
    "adm_imagenet128": (422, 128, 3, True),
    "ldm_churches": (295, 32, 4, False),  # Rombach et al. 2022, table 12
}


def paper_model(name: str, size: int, channels: int, learned: bool) -> torch.nn.Module:
    settings = yaml.safe_load((CONFIGS / "model" / f"{name}.yaml").read_text())
    meta = torch.device("meta")
    with meta:
        return build_model(settings, TORCH_FP32, (size, size), channels, learned, meta)


@pytest.mark.parametrize("name", PAPERS)
def test_models_of_papers_have_as_many_parameters(name):
    millions, *images = PAPERS[name]
    found = paper_model(name, *images).num_parameters
    digits = 1 if millions < 100 else 0
    assert round(found / 1e6, digits) == millions
    assert f"{found:,} parameters" in " ".join(
        (CONFIGS / "model" / f"{name}.yaml").read_text().replace("\n#", "").split()
    )


def test_ddpmpp_has_every_parameter_but_those_of_the_augmentation():
    """EDM's network for CIFAR-10 has 55,733,891, of which a map from 9 labels of the augmentation
    to 128 channels has no bias."""
    found = paper_model("edm_ddpmpp_cifar10", 32, 3, False).num_parameters
    assert found + 9 * 128 == 55_733_891


def test_the_latent_unet_lacks_stable_diffusions_transformers_alone():
    """Stable Diffusion 1 has 859,520,964. Where this network has attention, of 4 c^2 + 6 c
    parameters, it has a transformer over a context of 768: two 1x1 convolutions, self-attention and
    cross-attention without biases in front, a gated layer of 8 c, three layer norms."""
    model = paper_model("ldm_320", 32, 4, False)
    widths = [m.channels for m in model.modules() if isinstance(m, AttentionBlock)]
    assert widths == [320] * 2 + [640] * 2 + [1280] * 6 + [640] * 3 + [320] * 3
    transformer = sum(20 * c**2 + 2 * 768 * c + 21 * c for c in widths)
    attention = sum(4 * c**2 + 6 * c for c in widths)
    assert model.num_parameters - attention + transformer == 859_520_964


@pytest.mark.parametrize("model", POLICY_MODELS)
@pytest.mark.parametrize("diffusion", ["policy", "cosine", "linear"])
def test_policies_compose_and_build(model, diffusion):
    config = composed("dataset=trajectories", f"model={model}", f"diffusion={diffusion}")
    assert build(config).input_dim == 3


@pytest.mark.parametrize(
    ("overrides", "model", "diffusion"),
    [
        (("dataset=trajectories",), "unet1d", "policy"),
        (("dataset=trajectories", "model=unet1d_small"), "unet1d_small", "policy"),
        (("dataset=push_disc",), "unet1d_small", "policy"),
        (("dataset=push_disc", "model=unet1d", "diffusion=cosine"), "unet1d", "cosine"),
        (("experiment=policy",), "unet1d", "policy"),
        (("experiment=push_disc", "dataset=trajectories"), "unet1d_small", "policy"),
        (("dataset=folder",), "unet64", "linear"),
    ],
    ids=str,
)
def test_data_of_actions_bring_what_goes_with_them(overrides, model, diffusion):
    """As the settings say and the help shows."""
    config = composed(*overrides)
    alone = composed("dataset=trajectories", f"model={model}", f"diffusion={diffusion}")
    assert config["diffusion"] == alone["diffusion"]
    if "experiment" not in overrides[0]:  # which changes the network
        assert config["model"] == alone["model"]
    shown = describe("train", overrides)
    assert f"\nmodel={model} " in shown and f"\ndiffusion={diffusion} " in shown


def test_models_know_their_data():
    with pytest.raises(ConfigError, match="unet is not for trajectories; choose one of unet1d"):
        build(composed("dataset=trajectories", "model=unet64"))
    with pytest.raises(ConfigError, match="unet1d is not for images; choose one of unet"):
        build(composed("model=unet1d"))


@pytest.mark.parametrize("during", [None, "an operation failed during capture"])
def test_too_little_memory_is_one_line(capsys, during):
    with pytest.raises(SystemExit) as stopped, exit_codes():
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore")
        finally:
            if during is not None:
                raise RuntimeError(during)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    assert "does not suffice (CUDA out of memory. Tried to allocate 9 GiB.)" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run_dir=runs/a"], "go on with the same command\n"),
        ([], "go on with the same command and run_dir=runs/a\n"),
        (["-m", "train.seed=1,2"], "go on with the same command and run_dir=runs\n"),
    ],
    ids=["named", "not named", "a job of a sweep"],
)
def test_a_run_that_was_stopped_says_how_to_go_on(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as stopped, exit_codes():
        raise Interrupted(signal.SIGTERM, Path("runs/a/checkpoints/step_00000006"))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err.endswith(words)


@pytest.mark.parametrize("kept", [None, Path("runs/a/checkpoints/step_00000006")])
def test_a_run_that_was_stopped_while_it_diverged_says_so(capsys, kept):
    with pytest.raises(SystemExit), exit_codes():
        raise Interrupted(signal.SIGTERM, kept, saved=False)
    said = capsys.readouterr().err
    assert said.startswith("stopped; not saved, since") and "go on with the same" in said
    assert (f"last good checkpoint is {kept}" if kept else "there is no checkpoint") in said


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="a bug"), exit_codes():
        raise RuntimeError("a bug")


def test_a_sweeper_that_cannot_be_made_says_why():
    error = InstantiationException(
        "Error locating target 'optuna.samplers.TPESampler', set env var HYDRA_FULL_ERROR=1 to see"
        " chained exception.\nfull_key: hydra.sweeper.sampler"
    )
    error.__cause__ = ImportError("No module named 'optuna'")
    assert explain(error, "train") == (
        "hydra.sweeper.sampler: Error locating target 'optuna.samplers.TPESampler' (No module named"
        " 'optuna')"
    )


def test_an_interpolation_that_leads_nowhere_is_one_line():
    with pytest.raises(ConfigError, match="Interpolation key 'nothing' not found") as caught:
        composed("train.steps=${nothing}")
    assert "\n" not in str(caught.value)


TOOLS = ("prepare", "export", "benchmark", "rollout", "evaluate", "report", "average")


def test_options_may_stand_between_settings(monkeypatch):
    from triton_diffusion import entry

    given = ["a=1", "-m", "b=~/x", "--config-dir", "d", "c=é", "--cfg", "job"]
    monkeypatch.setenv("HOME", "/home/u")
    assert entry.readable(given) == [
        *("-m", "--config-dir", "d", "--cfg", "job"),
        *("a=1", "b=/home/u/x", "c='é'"),
    ]
    assert entry.with_own(["o=1"], ["--cfg", "job", "a=2"]) == ["--cfg", "job", "o=1", "a=2"]


def test_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--version"])
    with pytest.raises(SystemExit) as stopped:
        run_entry(lambda: None, "train")
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"triton-diffusion {diffusion.__version__}\n"


@pytest.mark.parametrize("script", ["train", "sample", *TOOLS])
def test_help_is_what_the_files_say(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as stopped:
        run_entry(lambda: None, script)
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and said.startswith("# python ")
    assert "defaults" not in said and "hydra:" not in said and "@package" not in said


def test_help_of_what_is_chosen():
    assert "num_head_channels: 32 " in describe("train")
    assert "dataset=folder " in describe("train", ["dataset=folder"])
    demo = describe("train", ["experiment=demo", "-h"])
    assert "model=unet_tiny " in demo and "experiment=demo " in demo and "ema_decay: 0.98" in demo
    assert "model=unet32 " in describe("train", ["experiment=demo", "model=unet32"])
    with pytest.raises(ConfigError, match="model=unet46 is unknown; did you mean unet64?"):
        describe("train", ["model=unet46"])


def test_defaults_in_yaml_are_those_in_the_code():
    """The YAML lists every setting of a constructor, so that --cfg job shows them all."""
    config = composed()
    for group, make in (("train", TrainSettings), ("optim", OptimizerSettings)):
        assert set(config[group]) == set(make.__dataclass_fields__)
    # of a process each choice lists what goes with it
    lists = [composed(f"diffusion={choice}")["diffusion"] for choice in choices("diffusion")]
    assert set().union(*lists) == set(inspect.signature(Process).parameters)


@pytest.mark.parametrize("given", [("--config-dir", "{}"), ("--config-dir={}",), ("-cd", "{}")])
def test_help_knows_the_users_own_files(tmp_path, given):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - override /model: unet32\ntrain:\n  steps: 7\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    folder = [argument.format(tmp_path) for argument in given]
    shown = describe("train", [*folder, "experiment=mine"])
    assert "experiment=mine  # one of demo, mine" in shown and "  steps: 7" in shown
    assert "\nmodel=unet32 " in shown
    with pytest.raises(ConfigError, match="valid: demo, mine, policy"):
        describe("train", [*folder, "experiment=mein"])
