"""The denoiser as a graph that runs without this project: ONNX, and PyTorch's exported program.

    of images   x [N, C, H, W], t int64 [N], labels int64 [N] (of a model with classes),
                condition [N, K, H, W], vector [N, D], context [N, L, D] with lengths int64 [N]
                (of a model that is given them)
                    -> output [N, C or 2C, H, W]
    of actions  x [N, T, A], t int64 [N], condition [N, G], normalised observations -> [N, T, A]

N and L are free. The graph holds the weights and PyTorch's operators of the torch backend in
float32; what to do with its output (the process and the schedule) stands in its metadata. A graph
is run against the network on images that it was not traced with, and not written if the two differ.
"""

import copy
import functools
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from triton_kernels import reference
from triton_kernels.noise.philox import INITIAL, NOISE

from ..errors import ConfigError
from ..formats.trained import Trained
from ..models.conditions import Conditions, with_null_token, with_presence
from ..models.layers import set_backend
from ..policies.policy import Policy
from ..process.flow import FlowSchedule
from ..process.schedule import NoiseSchedule
from ..runtime.backend import TORCH_FP32

_TOKENS = 5  # of a context that is traced; another number is compared
_TRACED_BATCH, _CHECKED_BATCHES = 2, (1, 3)
_TOLERANCE = 1e-4  # of the largest output: both sides sum in float32, in another order
_DRAWN = 0.05  # deviation of weights that stand for zeros while a graph is compared
_MAX_BYTES = 2**31 - 2**20  # of the protocol buffers that ONNX's files are


class ImageDenoiser(nn.Module):
    """`UNet` in PyTorch's order of dimensions, with contiguous output; `names` says what its inputs
    are behind x and t."""

    def __init__(self, model: nn.Module, names: tuple[str, ...] = ("labels",)) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(
        self,
        x: Tensor,  # [N, C, H, W]
        t: Tensor,  # int64 [N]
        first: Tensor | None = None,  # labels int64 [N], condition [N, K, H, W], vector [N, D],
        second: Tensor | None = None,  # context [N, L, D], lengths int64 [N]
        third: Tensor | None = None,
        fourth: Tensor | None = None,
        fifth: Tensor | None = None,
    ) -> Tensor:  # [N, C or 2C, H, W]
        parts = dict(zip(self.names, (first, second, third, fourth, fifth), strict=False))
        if "condition" in parts:
            x = torch.cat((x, parts["condition"]), dim=1)
        vector = with_presence(parts["vector"]) if "vector" in parts else None
        tokens = ()
        if "context" in parts:
            tokens = with_null_token(parts["context"], parts["lengths"])
        given = Conditions(parts.get("labels"), None, vector, *tokens)
        return self.model(x, t, given.shortest()).contiguous()


class ChunkDenoiser(nn.Module):
    """`UNet1d` over chunks of actions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        x: Tensor,  # [N, T, A]
        t: Tensor,  # int64 or float32 [N]
        condition: Tensor,  # [N, G]
    ) -> Tensor:  # [N, T, A]
        return self.model.forward_nhwc(x[:, None], t, condition)[:, 0]


@dataclass(frozen=True)
class Graph:
    """What is exported."""

    module: nn.Module  # on the CPU, computing in float32 with the torch backend
    names: tuple[str, ...]  # of its inputs
    inputs: Callable[[int, int], tuple[Tensor, ...]]  # examples, of a batch and a seed
    about: dict[str, Any]  # what to do with the output


_Write = Callable[[Path, Graph], str]


def image_graph(trained: Trained) -> Graph:
    """The denoiser of images."""
    height, width, channels = trained.image_shape
    classes, schedule = trained.model.num_classes, trained.process.schedule
    given = trained.condition

    def pictures(n: int, channels: int, rng: Tensor, stream: int) -> Tensor:
        shape = (n, height, width, channels)
        return reference.normal(shape, rng, stream=stream).permute(0, 3, 1, 2).contiguous()

    def inputs(n: int, seed: int) -> tuple[Tensor, ...]:
        rng = torch.tensor([seed, n])
        found = {"x": pictures(n, channels, rng, NOISE), "t": _told(schedule, rng, n)}
        if classes is not None:
            found["labels"] = torch.arange(n) % classes
        if given is not None:
            found["condition"] = pictures(n, given.channels, rng, INITIAL).clamp(-1, 1)
        if trained.model.vector_dim:
            found["vector"] = reference.normal((n, trained.model.vector_dim), rng, stream=INITIAL)
        if trained.model.context_dim:
            shape = n, _TOKENS + seed, trained.model.context_dim
            found["context"] = reference.normal(shape, rng, stream=INITIAL)
            found["lengths"] = torch.arange(n) % (_TOKENS + 1)
        return tuple(found.values())

    about = {
        "prediction": trained.process.prediction,
        "variance": trained.process.variance,
        **_chain(schedule, trained.process.sigma_data),
        "image_shape": trained.image_shape,
        "values": trained.values.state(),
        "num_classes": classes,
        "null_label": trained.model.null_label,
        **({} if given is None else {"condition": given.state()}),
    }
    names = () if classes is None else ("labels",)
    names = names if given is None else (*names, "condition")
    names = (*names, "vector") if trained.model.vector_dim else names
    names = (*names, "context", "lengths") if trained.model.context_dim else names
    return Graph(_portable(ImageDenoiser(trained.model, names)), ("x", "t", *names), inputs, about)


def policy_graph(policy: Policy) -> Graph:
    """The denoiser of a policy's chunks."""
    spec, sampler = policy.spec, policy.sampler

    def inputs(n: int, seed: int) -> tuple[Tensor, ...]:
        rng = torch.tensor([seed, n])
        x = reference.normal((n, spec.horizon, spec.action_dim), rng)
        condition = reference.normal((n, spec.condition_dim), rng, stream=INITIAL).clamp(-1, 1)
        return x, _told(sampler.schedule, rng, n), condition

    about = {
        "prediction": sampler.prediction,
        "variance": sampler.variance,
        **_chain(sampler.schedule, sampler.sigma_data),
        "policy": spec.state(),
    }
    return Graph(_portable(ChunkDenoiser(policy.model)), ("x", "t", "condition"), inputs, about)


def _chain(schedule: NoiseSchedule | FlowSchedule, sigma_data: float) -> dict[str, Any]:
    """The noise of every level, what the network is told there, and the unit of x_0."""
    flow = isinstance(schedule, FlowSchedule)
    levels = {"flow_times": schedule.times} if flow else {"betas": schedule.betas}
    return {
        **{name: values.tolist() for name, values in levels.items()},
        "timesteps": schedule.timestep_map.tolist(),
        "sigma_data": sigma_data,
    }


def _told(
    schedule: NoiseSchedule | FlowSchedule, rng: Tensor, n: int
) -> Tensor:  # int64 or float32 [N]
    """What the network is told of n levels."""
    told = torch.tensor(schedule.timestep_map)[
        reference.draw_timesteps(rng, n, schedule.num_timesteps)
    ]
    return told.float() if told.is_floating_point() else told


def _portable(module: nn.Module) -> nn.Module:
    """A copy with weights in the default order of memory: the trained network's are channels_last,
    which would be stored as strided views."""
    module = copy.deepcopy(module).eval().cpu()
    set_backend(module, TORCH_FP32)
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    return module


def _with_weights_that_tell(write: _Write) -> _Write:
    """A fresh network begins with layers of zeros and gives zeros, which any graph does: its graph
    is first written and compared with weights drawn in their place."""

    @functools.wraps(write)
    def written(path: Path, graph: Graph) -> str:
        zeros = [n for n, p in graph.module.named_parameters() if p.ndim > 1 and not p.any()]
        if not zeros:
            return write(path, graph)
        module, generator = copy.deepcopy(graph.module), torch.Generator().manual_seed(0)
        for name in zeros:
            module.get_parameter(name).data.normal_(0, _DRAWN, generator=generator)
        drawn = path.with_name(f"drawn_{path.name}")
        said = write(drawn, replace(graph, module=module))
        drawn.unlink()
        write(path, graph)
        return f"{said}, with weights drawn for {len(zeros)} that are zero"

    return written


@_with_weights_that_tell
def export_program(path: Path, graph: Graph) -> str:
    """Write the file of torch.export and say by how much its outputs differ."""
    inputs = graph.inputs(_TRACED_BATCH, 0)
    with torch.no_grad():
        program = torch.export.export(graph.module, inputs, dynamic_shapes=_free(graph, inputs))
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"denoiser.json": json.dumps(graph.about)})
    path.write_bytes(file.getbuffer())  # given a path, PyTorch ends the process on a full disk
    return _compare(torch.export.load(path).module(), graph, "torch.export")


@_with_weights_that_tell
def export_onnx(path: Path, graph: Graph) -> str:
    """Write the ONNX file and say by how much the outputs of ONNX Runtime differ.

    ConfigError: the packages are not installed, or the model is larger than such a file.
    """
    require_onnx()
    size = sum(p.nbytes for p in graph.module.parameters())
    if size > _MAX_BYTES:
        raise ConfigError(f"the model has {size:,} bytes; an ONNX file holds at most 2 GiB")
    inputs = graph.inputs(_TRACED_BATCH, 0)
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            graph.module,
            inputs,
            dynamic_shapes=_free(graph, inputs),
            input_names=graph.names,
            output_names=["output"],
            dynamo=True,
            verbose=False,
        )
    for key, value in graph.about.items():
        program.model.metadata_props[key] = json.dumps(value)
    program.save(path, external_data=False)
    return _compare(OnnxGraph(path), graph, "ONNX Runtime")


def _free(graph: Graph, inputs: tuple[Tensor, ...]) -> tuple[dict[int, torch.export.Dim], ...]:
    """The batch of every input, and the tokens of a context."""
    batch = torch.export.Dim("batch", min=1, max=2**16)
    tokens = torch.export.Dim("tokens", min=1, max=2**16)
    return tuple(
        {0: batch, 1: tokens} if name == "context" else {0: batch}
        for name, _ in zip(graph.names, inputs, strict=True)
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on packages that it could do without and on itself."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def require_onnx() -> None:
    """ConfigError unless what writes and runs ONNX files is installed."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"format=onnx needs {', '.join(missing)}: pip install -e '.[export]'")


def onnx_provider(device: torch.device) -> str:
    """What runs ONNX Runtime's operators on a device. ConfigError: this one has none for it."""
    require_onnx()
    import onnxruntime  # an optional dependency, and slow to load

    provider = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise ConfigError(
            f"onnxruntime {onnxruntime.__version__} has no {provider}; it has"
            f" {', '.join(available)}"
        )
    return provider


class OnnxGraph:
    """An exported file in ONNX Runtime. Inputs and output stay on the device. ConfigError: as of
    `onnx_provider`."""

    def __init__(self, path: Path, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        provider = onnx_provider(self.device)
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(path, options, providers=[provider])
        inputs = self.session.get_inputs()
        self.names = [item.name for item in inputs]
        self.types = [torch.float32 if "float" in item.type else torch.int64 for item in inputs]
        self.sizes = self.session.get_outputs()[0].shape[1:]  # behind the batch

    def __call__(self, *inputs: Tensor) -> Tensor:  # contiguous, on the device
        output = torch.empty(len(inputs[0]), *self.sizes, device=self.device)
        binding = self.session.io_binding()
        for name, tensor in zip(self.names, inputs, strict=True):
            binding.bind_input(name, *_place(tensor))
        binding.bind_output("output", *_place(output))
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # ONNX Runtime has a stream of its own
        self.session.run_with_iobinding(binding)
        return output


class OnnxDenoiser:
    """An exported denoiser of images, called as `UNet.forward_nhwc`."""

    def __init__(self, path: Path, device: torch.device | str = "cpu") -> None:
        self.graph = OnnxGraph(path, device)

    def __call__(
        self,
        x: Tensor,  # [N, H, W, C]
        t: Tensor,  # [N]
        labels: Tensor | None = None,  # int64 [N]
    ) -> Tensor:  # float32 [N, H, W, C or 2C]
        t = t.to(self.graph.types[1]).contiguous()
        inputs = [x.permute(0, 3, 1, 2).float().contiguous(), t]
        inputs += [] if labels is None else [labels.long().contiguous()]
        return self.graph(*inputs).permute(0, 2, 3, 1).contiguous()


def _place(tensor: Tensor) -> tuple[str, int, type, list[int], int]:
    """Device, its number, type of an element, shape and address."""
    element = np.float32 if tensor.dtype == torch.float32 else np.int64
    device = tensor.device
    return device.type, device.index or 0, element, list(tensor.shape), tensor.data_ptr()


@torch.no_grad()
def _compare(run: Callable[..., Tensor], graph: Graph, name: str) -> str:
    worst = 0.0
    for n in _CHECKED_BATCHES:
        inputs = graph.inputs(n, 1)
        expected = graph.module(*inputs)
        difference = (run(*inputs) - expected).abs().max().item()
        scale = max(1.0, expected.abs().max().item())
        if not difference <= _TOLERANCE * scale:
            raise RuntimeError(
                f"{name} differs from the torch backend by {difference:.1e} at batch {n}, of"
                f" outputs up to {scale:.1f}; nothing was written"
            )
        worst = max(worst, difference)
    batches = " and ".join(map(str, _CHECKED_BATCHES))
    return f"run by {name} at batch {batches}: largest difference {worst:.1e}"
