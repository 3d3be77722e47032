"""Checkpoints of real-stanford/diffusion_policy: read without its code, drawn from as it does."""

from importlib.util import find_spec

import pytest
import torch
from omegaconf import OmegaConf

from diffusion.errors import ConfigError
from diffusion.formats.diffusion_policy import is_workspace, read_workspace, stored_policy
from diffusion.formats.trained import is_policy, load_trained
from diffusion.formats.weights import load_weights
from diffusion.models.unet1d import UNet1d
from diffusion.policies.policy import load_policy
from diffusion.sampling.sampler import DDIM, DDPM
from triton_kernels import reference
from triton_kernels.noise.philox import INITIAL, REVERSE

from .policy_oracle import policy_oracle

OBS, ACTION, SEEN, ACTED, HORIZON, STEPS, SEED = 3, 2, 2, 3, 8, 12, 5
NETWORK = {
    "input_dim": ACTION,
    "global_cond_dim": SEEN * OBS,
    "diffusion_step_embed_dim": 8,
    "down_dims": [8, 16],
    "kernel_size": 5,
    "n_groups": 2,  # small groups at few positions amplify rounding from step to step
    "cond_predict_scale": False,
}
SCHEDULER = {
    "_target_": "diffusers.schedulers.scheduling_ddpm.DDPMScheduler",
    "num_train_timesteps": STEPS,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "squaredcos_cap_v2",
    "variance_type": "fixed_small",
    "clip_sample": True,
    "prediction_type": "epsilon",
}
CONFIG = {  # of its training configurations, what says something of the policy
    "horizon": HORIZON,
    "n_obs_steps": SEEN,
    "n_action_steps": ACTED,
    "obs_as_global_cond": True,
    "policy": {
        "_target_": "diffusion_policy.policy.diffusion_unet_lowdim_policy",
        "horizon": "${horizon}",
        "num_inference_steps": STEPS,
        "oa_step_convention": True,
        "model": {
            "input_dim": "${eval: ${action_dim} if ${obs_as_global_cond} else 9}",
            "n_groups": 2,
        },
        "noise_scheduler": SCHEDULER,
    },
}


def network(seed: int = 0, **options) -> UNet1d:
    torch.manual_seed(seed)
    model = UNet1d(**NETWORK | options)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def state_of(model: UNet1d) -> dict[str, torch.Tensor]:
    """A policy's state dict: the network, its normaliser, and an entry without meaning."""
    torch.manual_seed(1)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for key, size in (("obs", OBS), ("action", ACTION)):
        here = f"normalizer.params_dict.{key}"
        state[f"{here}.scale"] = torch.nn.Parameter(0.1 + torch.rand(size))
        state[f"{here}.offset"] = torch.nn.Parameter(torch.randn(size))
        state[f"{here}.input_stats.min"] = torch.zeros(size)
    return state | {"mask_generator._dummy_variable": torch.zeros(0)}


def write(path, model, config=CONFIG, **states):
    """As BaseWorkspace.save_checkpoint does, but for dill, of which its pickles would be."""
    optimizer = torch.optim.AdamW(model.parameters()).state_dict()
    states = {"model": state_of(network(9)), "ema_model": state_of(model)} | states
    states = {name: state for name, state in states.items() if state is not None}
    payload = {
        "cfg": OmegaConf.create(config),
        "state_dicts": states | {"optimizer": optimizer},
        "pickles": {"global_step": b"\x80\x04K\x07."},
    }
    torch.save(payload, path)
    return path


def changed(**options):
    """CONFIG with other values, "policy" for those in it."""
    policy = CONFIG["policy"] | options.pop("policy", {})
    return CONFIG | options | {"policy": policy}


VARIANTS = {
    "default": {},
    "film": {"cond_predict_scale": True},
    "groups": {"n_groups": 4, "kernel_size": 3, "down_dims": [16, 32]},
    "three_levels": {"down_dims": [8, 16, 16], "kernel_size": 7},
    "four_levels": {"down_dims": [8, 16, 32, 16]},
    "one_level": {"down_dims": [16], "cond_predict_scale": True},
}


@pytest.mark.skipif(not find_spec("diffusers"), reason="needs diffusers")
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(
    ("sampler", "prediction", "steps"),
    [("ddpm", "epsilon", STEPS), ("ddpm", "sample", 5), ("ddim", "epsilon", 5)],
)
def test_actions_are_those_of_its_policy(
    tmp_path, monkeypatch, options, sampler, prediction, steps
):
    """predict_action of its DiffusionUnetLowdimPolicy in float64, with this project's noise."""
    from diffusers import DDIMScheduler, DDPMScheduler
    from diffusers.schedulers import scheduling_ddpm

    model = network(**options)
    settings = {"n_groups": options.get("n_groups", 2)}
    name = f"scheduling_{sampler}.{sampler.upper()}Scheduler"
    scheduler_config = SCHEDULER | {
        "_target_": f"diffusers.schedulers.{name}",
        "prediction_type": prediction,
    }
    config = changed(
        policy={
            "model": settings,
            "noise_scheduler": scheduler_config,
            "num_inference_steps": steps,
        }
    )
    path = write(tmp_path / "latest.ckpt", model, config)
    policy = load_policy(path, device="cpu")
    assert policy.sampler.num_steps == steps
    observations = torch.randn(3, SEEN, OBS)

    state = {k: v.detach().double() for k, v in state_of(model).items()}
    weights = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}

    def affine(key):
        return (state[f"normalizer.params_dict.{key}.{name}"] for name in ("scale", "offset"))

    scale, offset = affine("obs")
    condition = (observations.double() * scale + offset).reshape(3, -1)
    known = {k: v for k, v in scheduler_config.items() if k not in ("_target_", "variance_type")}
    scheduler = {"ddpm": DDPMScheduler, "ddim": DDIMScheduler}[sampler](**known)
    scheduler.set_timesteps(steps)
    shape, rng = (3, 1, HORIZON, ACTION), torch.tensor([SEED, 0])
    x = reference.normal(shape, rng, stream=INITIAL).double()[:, 0]
    for k, t in enumerate(scheduler.timesteps):
        z = reference.normal(shape, rng + torch.tensor([0, k]), stream=REVERSE).double()[:, 0]
        monkeypatch.setattr(scheduling_ddpm, "randn_tensor", lambda *_, z=z, **__: z)
        output = policy_oracle(weights, settings["n_groups"], x, t.expand(3), condition)
        x = scheduler.step(output, t, x).prev_sample
    scale, offset = affine("action")
    expected = ((x - offset) / scale)[:, SEEN - 1 : SEEN - 1 + ACTED]
    torch.testing.assert_close(
        policy.act(observations, seed=SEED).double(), expected, rtol=2e-5, atol=2e-5
    )


def same_parameters(a: UNet1d, b: UNet1d) -> bool:
    return all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))


def test_which_weights(tmp_path):
    """The averaged ones unless told otherwise, and those that are there."""
    model, trained, found = network(), network(9), network(3)
    path = write(tmp_path / "a.ckpt", model)
    assert is_workspace(path) and is_policy(path)
    for ema, expected in ((True, model), (False, trained)):
        load_weights(path, found, ema=ema)
        assert same_parameters(found, expected)
        assert same_parameters(load_policy(path, device="cpu", ema=ema).model, expected)
    write(path, model, ema_model=None)
    load_weights(path, found)
    assert same_parameters(found, trained)


@pytest.mark.parametrize("prefix", ["", "model.", "noise_pred_net.", "module.model."])
@pytest.mark.parametrize("nested", [False, True])
def test_plain_state_dicts(tmp_path, prefix, nested):
    """Of its notebooks, and of others who took the network."""
    model, found = network(), network(3)
    state = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    if prefix:
        state["vision_encoder.conv1.weight"] = torch.zeros(2)
    torch.save({"ema": state, "step": 3} if nested else state, tmp_path / "a.ckpt")
    assert not is_workspace(tmp_path / "a.ckpt")
    load_weights(tmp_path / "a.ckpt", found)
    assert same_parameters(model, found)


def test_the_configuration_is_read(tmp_path):
    workspace = read_workspace(write(tmp_path / "a.ckpt", network()))
    assert workspace.config == CONFIG
    assert workspace["policy.horizon"] == HORIZON and workspace["policy.nothing"] is None
    workspace = read_workspace(write(tmp_path / "a.ckpt", network(), changed(policy={"model": {}})))
    assert stored_policy(workspace).settings["n_groups"] == 8  # as ConditionalUnet1D by itself


class Arbitrary:
    """Something that a configuration has no business holding."""

    def __reduce__(self):
        return print, ("unpickled",)


def test_objects_are_not_made(tmp_path, capsys):
    path = tmp_path / "a.ckpt"
    torch.save({"cfg": Arbitrary(), "state_dicts": {"model": state_of(network())}}, path)
    for read in (read_workspace, load_policy, lambda path: load_weights(path, network())):
        with pytest.raises(ConfigError, match="not unpickled"):
            read(path)
    assert capsys.readouterr().out == ""


CYCLE = changed(horizon="${n_obs_steps}", n_obs_steps="${horizon}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(n_obs_steps=None), "has n_obs_steps=None; expected a whole number"),
        (changed(horizon="${eval: 2 * 4}"), r"horizon=\$\{eval: 2 \* 4\}, which is not computed"),
        (CYCLE, "leads back to itself"),
        (changed(n_obs_steps=1), "under a condition of 6; expected 2, an action, and 3"),
        (changed(policy={"oa_step_convention": False}), "oa_step_convention=False"),
        (changed(policy={"oa_step_convention": None}), "oa_step_convention=False"),  # its default
        (changed(policy={"pred_action_steps_only": True}), "pred_action_steps_only=True"),
        (changed(horizon=7), "has horizon=7; its network needs a multiple of 2"),
        (changed(n_action_steps=8), "n_action_steps=8; a chunk of 8 has 7 from the last of 2"),
        (changed(policy={"noise_scheduler": None}), "noise_scheduler=None"),
        (changed(policy={"noise_scheduler": {"beta_schedule": "odd"}}), "beta_schedule=odd"),
        (changed(policy={"model": {"n_groups": 3}}), "multiples of n_groups=3"),
    ],
)
def test_what_is_no_policy_here(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_policy(write(tmp_path / "a.ckpt", network(), config), device="cpu")
    assert "\n" not in str(caught.value)


def test_samplers(tmp_path):
    """What its scheduler is, unless another is chosen; what none does here is said."""
    ddim = SCHEDULER | {"_target_": "diffusers.DDIMScheduler", "steps_offset": 1}
    path = write(tmp_path / "a.ckpt", network(), changed(policy={"noise_scheduler": ddim}))
    with pytest.warns(UserWarning, match="says steps_offset=1 for sampling, which is not done"):
        assert isinstance(load_policy(path, device="cpu").sampler, DDIM)
        assert isinstance(load_policy(path, device="cpu", sampler="ddpm").sampler, DDPM)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("normalizer.params_dict.obs.scale", torch.zeros(OBS), "no scale of 0"),
        ("normalizer.params_dict.action.offset", torch.full((ACTION,), torch.nan), "offset .nan"),
        ("normalizer.params_dict.obs.offset", torch.zeros(5), "as many finite numbers"),
        ("model.local_cond_encoder.0.blocks.0.block.0.bias", torch.zeros(8), "obs_as_local_cond"),
    ],
)
def test_entries_that_are_wrong(tmp_path, name, value, message):
    path = write(tmp_path / "a.ckpt", network(), ema_model=state_of(network()) | {name: value})
    with pytest.raises(ConfigError, match=message):
        load_policy(path, device="cpu")


def test_other_files(tmp_path):
    path = write(tmp_path / "a.ckpt", network())
    with pytest.raises(ConfigError, match="is a policy: .*tools/rollout.py"):
        load_trained(path, torch.device("cpu"))
    with pytest.raises(ConfigError, match="ema=0.9, but .* has one average"):
        load_policy(path, device="cpu", ema=0.9)
    images = {k: v for k, v in state_of(network()).items() if "params_dict.obs" not in k}
    write(path, network(), ema_model=images)
    with pytest.raises(ConfigError, match="no normalizer.params_dict.obs"):
        load_policy(path, device="cpu")
    write(path, network(), ema_model={"obs_encoder.weight": torch.zeros(1)})
    with pytest.raises(ConfigError, match="no ConditionalUnet1D"):
        load_policy(path, device="cpu")
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ConfigError, match="truncated|no checkpoint"):
        load_policy(path, device="cpu")
