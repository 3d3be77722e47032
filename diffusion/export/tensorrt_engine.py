"""TensorRT: an engine from an exported ONNX file, and the denoiser of images that runs one.

An engine is for the GPU and the version of TensorRT that built it. Its arithmetic is that of the
ONNX file, float32, on tensor cores as TF32 where `allow_tf32` says so.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError
from .graph import Graph


def require_tensorrt() -> None:
    """ConfigError unless TensorRT and a GPU to build for are there."""
    if find_spec("tensorrt") is None:
        raise ConfigError("an engine needs tensorrt, which is not installed: pip install tensorrt")
    if not torch.cuda.is_available():
        raise ConfigError("an engine needs a CUDA device to be built on; there is none")


def build_engine(
    onnx: Path,
    out: Path,
    graph: Graph,  # that the file is of
    *,
    batch: int = 16,  # that it is made fastest for
    max_batch: int = 64,
    allow_tf32: bool = True,
) -> None:
    """Write the engine of an ONNX file. ConfigError: TensorRT is missing, or cannot read it."""
    require_tensorrt()
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(onnx.read_bytes()):
        raise ConfigError(f"TensorRT {trt.__version__} cannot read {onnx}: {parser.get_error(0)}")
    config = builder.create_builder_config()
    if allow_tf32:
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for name, tensor in zip(graph.names, graph.inputs(1, 0), strict=True):
        sizes = ((n, *tensor.shape[1:]) for n in (1, batch, max_batch))
        profile.set_shape(name, *sizes)
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ConfigError(f"TensorRT {trt.__version__} built no engine of {onnx}")
    out.write_bytes(memoryview(engine))


class TensorRTDenoiser:
    """An engine, called as `UNet.forward_nhwc` on the device that it was built on. It runs in
    PyTorch's current stream."""

    def __init__(self, path: Path, device: torch.device) -> None:
        require_tensorrt()
        import tensorrt as trt

        self.device = device
        self.runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self.engine = self.runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise ConfigError(f"{path} is no engine of this TensorRT ({trt.__version__})")
        self.context = self.engine.create_execution_context()
        self.types = {trt.int64: torch.int64, trt.int32: torch.int32, trt.float32: torch.float32}

    def __call__(
        self,
        x: Tensor,  # [N, H, W, C]
        t: Tensor,  # [N]
        labels: Tensor | None = None,  # int64 [N]
    ) -> Tensor:  # float32 [N, H, W, C or 2C]
        inputs = [x.permute(0, 3, 1, 2).float().contiguous(), self._as_built("t", t)]
        inputs += [] if labels is None else [self._as_built("labels", labels)]
        for name, tensor in zip(("x", "t", "labels"), inputs, strict=False):
            if not self.context.set_input_shape(name, tuple(tensor.shape)):
                raise ValueError(f"the engine was not built for {name} of {list(tensor.shape)}")
            self.context.set_tensor_address(name, tensor.data_ptr())
        output = torch.empty(tuple(self.context.get_tensor_shape("output")), device=self.device)
        self.context.set_tensor_address("output", output.data_ptr())
        if not self.context.execute_async_v3(torch.cuda.current_stream(self.device).cuda_stream):
            raise RuntimeError("TensorRT did not run the engine")
        return output.permute(0, 2, 3, 1).contiguous()

    def _as_built(self, name: str, values: Tensor) -> Tensor:
        return values.to(self.types[self.engine.get_tensor_dtype(name)]).contiguous()
