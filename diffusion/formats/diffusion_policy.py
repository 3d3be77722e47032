r"""Checkpoints of real-stanford/diffusion_policy: what its workspaces write, read without its code.

    FILE.ckpt            of torch.save, pickled by dill
        cfg              its configuration, OmegaConf's objects
        state_dicts      model, ema_model, optimizer
            model.*                              ConditionalUnet1D, by the names of `UNet1d`
            normalizer.params_dict.obs.scale     of normalised = scale x + offset, and .offset
            normalizer.params_dict.action.scale
        pickles          not read

The configuration is pickled beside the weights, so the file is no plain state dict. PyTorch reads
it with weights_only=True all the same: each class of OmegaConf is replaced by one of this file that
keeps an object's state and has no code, and any other class is refused.

What the network is, its weights say by their shapes; but for the groups of its norms, which are the
configuration's.
"""

import pickle
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.action_chunks import Normaliser, PolicySpec
from ..errors import ConfigError
from .diffusers_schedulers import process_of, sampling_of
from .stored_policy import StoredPolicy

SUFFIX = ".ckpt"
_STEP_LAYER = "diffusion_step_encoder.1.weight"  # [4 E, E]
_CONVENTIONS = (  # options of its policy, their defaults there, and what is the case here
    ("oa_step_convention", False, True),
    ("pred_action_steps_only", False, False),
)
_GROUPS = 8  # of the norms, where the configuration does not say


class _Inert:
    """Stands for an object of a class that is not made: what was pickled of it, as attributes."""

    def __new__(cls, *args: Any) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass


def _no_type(*args: Any) -> type:
    return _Inert


def _no_entries(*args: Any) -> dict:
    return {}


_STAND_INS = {  # by the beginning of a name
    "omegaconf.": _Inert,
    "typing.": _Inert,
    "dill._dill._load_type": _no_type,  # of what an entry is declared to be
    **{f"builtins.{name}": _Inert for name in ("dict", "list", "str", "int", "float", "bool")},
    "collections.defaultdict": _no_entries,
}


@dataclass(frozen=True)
class Workspace:
    """What a checkpoint holds."""

    path: Path
    config: dict[str, Any]  # interpolations as they are written
    states: dict[str, dict[str, Tensor]]  # model and perhaps ema_model, by the file's names

    def state(self, ema: bool) -> dict[str, Tensor]:
        """The averaged weights or those trained, whichever there are, if not both."""
        names = ("ema_model", "model") if ema else ("model", "ema_model")
        return next(self.states[name] for name in names if name in self.states)

    def __getitem__(self, key: str) -> Any:
        """The value at a path of keys such as policy.n_groups, None where there is none.
        ConfigError: it is computed from others."""
        value, told = self._at(key), set()
        while isinstance(value, str) and (other := re.fullmatch(r"\$\{([\w.]+)\}", value)):
            if other[1] in told:
                raise ConfigError(f"{self.path} has {key}={value}, which leads back to itself")
            told.add(other[1])
            value = self._at(other[1])
        if isinstance(value, str) and "${" in value:
            raise ConfigError(f"{self.path} has {key}={value}, which is not computed here")
        return value

    def _at(self, key: str) -> Any:
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def count(self, *keys: str) -> int:
        """The number at the first of these paths where there is one. ConfigError: there is none."""
        value = next((found for key in keys if (found := self[key]) is not None), None)
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"{self.path} has {keys[0]}={value}; expected a whole number of at least 1"
            )
        return value


def is_workspace(path: str | Path) -> bool:
    """Whether a file is such a checkpoint, as far as its name and what it names tell."""
    path = Path(path)
    if path.suffix != SUFFIX or not path.is_file() or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        pickled = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return any(b"state_dicts" in archive.read(name) for name in pickled)


def read_workspace(path: str | Path) -> Workspace:
    """Read a checkpoint. ConfigError: it is damaged, holds other objects than a configuration's, or
    has no state_dicts."""
    path = Path(path)
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins = [
            (stand_in, name)
            for name in unknown
            for start, stand_in in _STAND_INS.items()
            if name.startswith(start)
        ]
        with torch.serialization.safe_globals(stand_ins):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{path} holds more than tensors, which is not unpickled") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).split(". ")[0]  # of several sentences
        raise ConfigError(f"{path} is truncated or no file of torch.save: {reason}") from error
    states = content.get("state_dicts") if isinstance(content, dict) else None
    states = states if isinstance(states, dict) else {}
    states = {name: states[name] for name in ("model", "ema_model") if name in states}
    if not states:
        raise ConfigError(f"{path} has no state_dicts.model; expected one of diffusion_policy's")
    config = _plain(content.get("cfg"))
    return Workspace(path, config if isinstance(config, dict) else {}, states)


def _plain(node: Any) -> Any:
    """Of OmegaConf's nodes what they hold."""
    if isinstance(node, _Inert):
        held = vars(node)
        return _plain(held.get("_content", held.get("_val")))
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return node


def network_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries of the 1-D UNet, by the names of `UNet1d`, of a policy's state dict: "model." is
    in front of them in a workspace's, "noise_pred_net." in that of the paper's notebooks. As it is
    if there is no such network."""
    layer = next((name for name in state if name.endswith(f".{_STEP_LAYER}")), _STEP_LAYER)
    prefix = layer.removesuffix(_STEP_LAYER)
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def stored_policy(
    workspace: Workspace,
    ema: bool = True,  # the averaged weights, where there are both
) -> StoredPolicy:
    """The policy in a checkpoint, which is told low-dimensional observations (obs_as_global_cond).
    ConfigError: it is another kind of policy."""
    path, whole = workspace.path, workspace.state(ema)
    state = {name: tensor.float() for name, tensor in network_state(whole).items()}
    groups = workspace["policy.model.n_groups"] or workspace["policy.n_groups"] or _GROUPS
    settings = _network_settings(path, state, groups)
    if any(name.startswith("local_cond_encoder.") for name in state):
        raise ConfigError(
            f"{path} is told its observations by obs_as_local_cond; expected obs_as_global_cond"
        )
    for option, default, expected in _CONVENTIONS:
        value = workspace[f"policy.{option}"]
        if (default if value is None else value) is not expected:
            raise ConfigError(
                f"{path} has policy.{option}={not expected}: its actions begin at another step"
                " than here"
            )
    spec = PolicySpec(
        workspace.count("horizon", "policy.horizon"),
        workspace.count("n_obs_steps", "policy.n_obs_steps"),
        workspace.count("n_action_steps", "policy.n_action_steps"),
        _normaliser(path, whole, "obs"),
        _normaliser(path, whole, "action"),
    )
    inputs = state["down_modules.0.0.blocks.0.block.0.weight"].shape[1]
    condition = state["down_modules.0.0.cond_encoder.1.weight"].shape[1]
    condition -= settings["diffusion_step_embed_dim"]
    if (inputs, condition) != (spec.action_dim, spec.condition_dim):
        raise ConfigError(
            f"{path} denoises {inputs} numbers under a condition of {condition}; expected"
            f" {spec.action_dim}, an action, and {spec.condition_dim}, {spec.observation_steps}"
            " observations, as of policies with obs_as_global_cond"
        )
    _check_steps(path, spec, 2 ** (len(settings["down_dims"]) - 1))
    scheduler = workspace["policy.noise_scheduler"]
    if not isinstance(scheduler, dict):
        raise ConfigError(f"{path} has policy.noise_scheduler={scheduler}; expected its options")
    name = str(scheduler.get("_target_", "DDPMScheduler")).rpartition(".")[2]
    process, clip = process_of(scheduler | {"_class_name": name}, path)
    spacing, remarks = sampling_of(scheduler, path)
    steps = workspace["policy.num_inference_steps"]
    if steps is not None:
        steps = workspace.count("policy.num_inference_steps")
    return StoredPolicy(
        settings,
        state,
        spec,
        process,
        clip,
        steps,
        spacing,
        sampler="ddim" if name.startswith("DDIM") else "ddpm",
        as_diffusers=True,
        remarks=remarks,
    )


def _check_steps(path: Path, spec: PolicySpec, factor: int) -> None:
    """ConfigError unless the network can draw such a chunk, and what is acted out is in it."""
    if spec.horizon % factor:
        raise ConfigError(
            f"{path} has horizon={spec.horizon}; its network needs a multiple of {factor}"
        )
    if spec.action_steps > spec.most_action_steps:
        raise ConfigError(
            f"{path} has n_action_steps={spec.action_steps}; a chunk of {spec.horizon} has"
            f" {spec.most_action_steps} from the last of {spec.observation_steps} observations on"
        )


def _network_settings(path: Path, state: dict[str, Tensor], n_groups: int) -> dict[str, Any]:
    """The group `model` of a network whose weights these are."""
    kernel = "down_modules.{}.0.blocks.0.block.0.weight"  # [CO, CI, S]
    film = state.get("down_modules.0.0.cond_encoder.1.weight")  # [CO or 2 CO, E + G]
    first = state.get(kernel.format(0))
    if _STEP_LAYER not in state or film is None or first is None:
        raise ConfigError(f"{path} has no ConditionalUnet1D among its weights")
    levels = len({name.split(".")[1] for name in state if name.startswith("down_modules.")})
    return {
        "name": "unet1d",
        "diffusion_step_embed_dim": state[_STEP_LAYER].shape[1],
        "down_dims": [state[kernel.format(level)].shape[0] for level in range(levels)],
        "kernel_size": first.shape[2],
        "n_groups": n_groups,
        "cond_predict_scale": film.shape[0] == 2 * first.shape[0],
    }


def _normaliser(path: Path, state: dict[str, Tensor], key: str) -> Normaliser:
    scale, offset = (
        state.get(f"normalizer.params_dict.{key}.{name}") for name in ("scale", "offset")
    )
    if scale is None or offset is None:
        raise ConfigError(
            f"{path} has no normalizer.params_dict.{key}; expected a policy of low-dimensional"
            " observations"
        )
    usable = scale.isfinite().all() and offset.isfinite().all() and (scale != 0).all()
    if scale.numel() != offset.numel() or not usable:
        raise ConfigError(
            f"{path} has normalizer.params_dict.{key} with scale {scale.tolist()} and offset"
            f" {offset.tolist()}; expected as many finite numbers, and no scale of 0"
        )
    centre, half = -offset.double() / scale.double(), 1 / scale.double()
    return Normaliser((centre - half).float().flatten(), (centre + half).float().flatten())
