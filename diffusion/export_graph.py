"""The denoiser as a graph that runs without this project: ONNX, and PyTorch's exported program.

    x [N, C, H, W] float32, t [N] int64, labels [N] int64 (of a model with classes)
        -> output [N, C or 2C, H, W] float32

N is free. The graph holds the weights and PyTorch's operators of the torch backend in float32;
what to do with its output (the process and the schedule) stands in its metadata. A graph is run
against the network on images that it was not traced with, and not written if the two differ.
"""

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from triton_kernels import reference

from .backend import TORCH_FP32
from .errors import ConfigError
from .layers import set_backend
from .trained import Trained

INPUTS = ("x", "t", "labels")
_TRACED_BATCH, _CHECKED_BATCHES = 2, (1, 3)
_TOLERANCE = 1e-4  # of the largest output: both sides sum in float32, in another order
_MAX_BYTES = 2**31 - 2**20  # of the protocol buffers that ONNX's files are


class ImageDenoiser(nn.Module):
    """`UNet` in PyTorch's order of dimensions, with contiguous output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        x: Tensor,  # [N, C, H, W]
        t: Tensor,  # int64 [N]
        labels: Tensor | None = None,  # int64 [N]
    ) -> Tensor:  # [N, C or 2C, H, W]
        return self.model(x, t, labels).contiguous()


def example_inputs(trained: Trained, n: int, seed: int = 0) -> tuple[Tensor, ...]:
    """n noisy images with timesteps and, if the model has classes, labels."""
    height, width, channels = trained.image_shape
    rng = torch.tensor([seed, n])
    x = reference.normal((n, height, width, channels), rng).permute(0, 3, 1, 2).contiguous()
    t = reference.draw_timesteps(rng, n, trained.process.schedule.num_timesteps)
    classes = trained.model.num_classes
    return (x, t) if classes is None else (x, t, torch.arange(n) % classes)


def _module(trained: Trained) -> ImageDenoiser:
    """The denoiser on the CPU, its weights in the default order of memory: the trained network's
    are channels_last, which would be stored as strided views."""
    module = ImageDenoiser(copy.deepcopy(trained.model)).eval().cpu()
    set_backend(module, TORCH_FP32)
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    return module


def _any_batch(inputs: tuple[Tensor, ...]) -> tuple[dict[int, torch.export.Dim], ...]:
    batch = torch.export.Dim("batch", min=1, max=2**16)
    return tuple({0: batch} for _ in inputs)


def export_program(path: Path, trained: Trained) -> str:
    """Write the file of torch.export and say by how much its outputs differ."""
    inputs = example_inputs(trained, _TRACED_BATCH)
    with torch.no_grad():
        program = torch.export.export(_module(trained), inputs, dynamic_shapes=_any_batch(inputs))
    metadata = {"denoiser.json": json.dumps(describe(trained))}
    torch.export.save(program, path, extra_files=metadata)
    program = torch.export.load(path).module()
    return _compare(lambda *inputs: program(*inputs), trained, "torch.export")


def export_onnx(path: Path, trained: Trained) -> str:
    """Write the ONNX file and say by how much the outputs of ONNX Runtime differ.

    ConfigError: the packages are not installed, or the model is larger than such a file.
    """
    require_onnx()
    size = sum(p.numel() * p.element_size() for p in trained.model.parameters())
    if size > _MAX_BYTES:
        raise ConfigError(f"the model has {size:,} bytes; an ONNX file holds at most 2 GiB")
    inputs = example_inputs(trained, _TRACED_BATCH)
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            _module(trained),
            inputs,
            dynamic_shapes=_any_batch(inputs),
            input_names=INPUTS[: len(inputs)],
            output_names=["output"],
            dynamo=True,
            verbose=False,
        )
    for key, value in describe(trained).items():
        program.model.metadata_props[key] = json.dumps(value)
    program.save(path, external_data=False)
    session = OnnxDenoiser(path)

    def run(x: Tensor, *rest: Tensor) -> Tensor:
        return session(x.permute(0, 2, 3, 1).contiguous(), *rest).permute(0, 3, 1, 2)

    return _compare(run, trained, "ONNX Runtime")


def describe(trained: Trained) -> dict[str, object]:
    """What to do with the output, and with which images."""
    return {
        "prediction": trained.process.prediction,
        "variance": trained.process.variance,
        "image_shape": trained.image_shape,
        "num_classes": trained.model.num_classes,
        "null_label": trained.model.null_label,
        "betas": trained.process.schedule.betas.tolist(),
    }


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


class OnnxDenoiser:
    """An exported file in ONNX Runtime, called as `UNet.forward_nhwc`. Nothing is copied to or
    from the device. ConfigError: ONNX Runtime cannot use the device."""

    def __init__(self, path: Path, device: torch.device | str = "cpu") -> None:
        import onnxruntime  # an optional dependency, and slow to load

        self.device = torch.device(device)
        provider = "CUDAExecutionProvider" if self.device.type == "cuda" else "CPUExecutionProvider"
        available = onnxruntime.get_available_providers()
        if provider not in available:
            raise ConfigError(
                f"onnxruntime {onnxruntime.__version__} has no {provider}; it has"
                f" {', '.join(available)}"
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(path, options, providers=[provider])
        self.channels = self.session.get_outputs()[0].shape[1]

    def __call__(
        self,
        x: Tensor,  # [N, H, W, C]
        t: Tensor,  # [N]
        labels: Tensor | None = None,  # int64 [N]
    ) -> Tensor:  # float32 [N, H, W, C or 2C]
        inputs = [x.permute(0, 3, 1, 2).float().contiguous(), t.long().contiguous()]
        inputs += [] if labels is None else [labels.long().contiguous()]
        n, h, w, _ = x.shape
        output = torch.empty(n, self.channels, h, w, device=x.device)
        binding = self.session.io_binding()
        for name, tensor in zip(INPUTS, inputs, strict=False):
            binding.bind_input(name, *_place(tensor))
        binding.bind_output("output", *_place(output))
        if x.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # ONNX Runtime has a stream of its own
        self.session.run_with_iobinding(binding)
        return output.permute(0, 2, 3, 1).contiguous()


def _place(tensor: Tensor) -> tuple[str, int, type, list[int], int]:
    """Device, its number, type of an element, shape and address."""
    element = np.float32 if tensor.dtype == torch.float32 else np.int64
    device = tensor.device
    return device.type, device.index or 0, element, list(tensor.shape), tensor.data_ptr()


@torch.no_grad()
def _compare(run: Callable[..., Tensor], trained: Trained, name: str) -> str:
    network, worst = _module(trained), 0.0
    for n in _CHECKED_BATCHES:
        inputs = example_inputs(trained, n, seed=1)
        expected = network(*inputs)
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
