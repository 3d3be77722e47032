"""What the planned network has allocated, counted on a machine without a GPU.

`Shapes` stands in for the kernels: it makes tensors without memory, of the shapes that the kernels
return, and counts the bytes of those that are alive.

    python -m tests.diffusion.plan_memory [batch]    what is alive at the peak of a step of unet64
"""

import sys
import weakref
from collections import Counter

import torch
from torch import Tensor

from triton_kernels.registry.kernel import Kernel, Op

_TILE = 256  # pixels that a row of partial sums describes, about


class Shapes:
    """In place of `triton_kernels.fused_ops`."""

    OPS = {
        op: Op(op, (), (Kernel("any", tuple, lambda *_: None, lambda *_: [()]),))
        for op in ("conv_upsampled", "conv_upsampled_input_grad")
    }

    def __init__(self) -> None:
        self.live: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.bytes, self.peak, self.at_peak = 0, 0, {}

    class RowSums:
        kept = ()

        def __init__(self, grad: Tensor) -> None:
            pass

        def flush(self, last: bool = True) -> None:
            pass

    def made(self, by: str, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device="meta")
        size, key = x.numel() * x.itemsize, (by, tuple(shape))
        self.live[key] += size
        self.bytes += size
        if self.bytes > self.peak:
            self.peak, self.at_peak = self.bytes, dict(self.live)
        weakref.finalize(x.untyped_storage(), self._freed, key, size)
        return x

    def _freed(self, key: tuple, size: int) -> None:
        self.live[key] -= size
        self.bytes -= size

    def tensor_partials(self, x, programs=1):
        n, h, w, c = x.shape
        return self.made("partials", (n, max(1, h * w // _TILE), 2, c), torch.float32)

    def conv_forward(self, x, weight, bias, *, stats=False, width=None, **_):
        y = self.made("y", (*x.shape[:3], width or weight.shape[0]))
        return y, self.tensor_partials(y) if stats else None

    def upsampled_filters(self, weight, channels, dtype):
        co, ci, _, _ = weight.shape
        return self.made("filters", (16, co, channels)), self.made(
            "filters", (co, ci - channels, 3, 3)
        )

    def conv_upsampled(self, a, filters, bias, **_):
        return self.conv_forward(a, filters[1], bias, stats=True)

    def conv_of_upsampled(self, x, filters, bias):
        n, h, w, _ = x.shape
        y = self.made("y", (n, 2 * h, 2 * w, filters[0].shape[1]))
        return y, self.tensor_partials(y)

    def conv_of_upsampled_input_grad(self, dy, filters):
        n, h, w, _ = dy.shape
        return self.made("dx", (n, h // 2, w // 2, filters[0].shape[2]))

    def conv_upsampled_input_grad(self, dy, filters, *, inputs, **_):
        dz1, dz2 = (self.made("dz", x.shape) for x in inputs)
        return dz1, dz2, self.made("partials", (len(dy), 1, 2, 1), torch.float32)

    def conv_plain_input_grad(self, dy, weight):
        return self.made("dx", (*dy.shape[:3], weight.shape[1]))

    def conv_input_grad(self, dy, weight, **_):
        dz = self.made("dz", (*dy.shape[:3], weight.shape[1]))
        return dz, self.tensor_partials(dz)

    def activation_grad(self, da, *_):
        return self.made("dz", da.shape), self.tensor_partials(da)

    def conv_weight_grad(self, x, dy, out, **_):
        pass

    def conv_weight_grads(self, *_, **options):
        pass

    def conv_down(self, x, weight, *_):
        n, h, w, _ = x.shape
        return self.made("y", (n, h // 2, w // 2, weight.shape[0]))

    def conv_down_input_grad(self, dy, weight, *_):
        n, p, q, _ = dy.shape
        return self.made("dx", (n, 2 * p, 2 * q, weight.shape[1]))

    def norm_apply(self, x1, x2, *_, **options):
        a = self.apply(x1, x2)
        return a, self.made("table", (a.shape[0], 4, a.shape[3]), torch.float32)

    def norm_apply_upsampled(self, x1, x2, *arguments):
        large = self.upsample(x1)
        a, table = self.norm_apply(large, x2)
        return a, (table, self.made("table", (len(x2), 4, x2.shape[3]), torch.float32)), large

    def norm_backward(self, dz, x, *_, rows=True, **options):
        dx1, _, rows = self.norm_dx(dz, x, None, None, sums=rows or None, out=options.get("out"))
        return dx1, rows

    def apply(self, x1, x2, *_, **options):
        c = x1.shape[3] + (0 if x2 is None else x2.shape[3])
        return self.made("a", (*x1.shape[:3], c))

    def norm_dx(self, dz, x1, x2, coeff, *, out=None, sums=None, **_):
        dx1 = self.made("dx", x1.shape) if out is None else out
        dx2 = None if x2 is None else self.made("dx of a skip", x2.shape)
        return dx1, dx2, None if sums is None else dx1.new_empty(1, x1.shape[3])

    def skip_backward(self, dy, weight, dz, x1, x2, *_, sums, **options):
        return self.norm_dx(dz, x1, x2, None, sums=sums)

    def bias_grad(self, *_, **options):
        pass

    def linear_grads(self, x, dy, weight, grad_weight, grad_bias, need_dx=True):
        return self.made("dx", x.shape, torch.float32) if need_dx else None

    def tensor_rows(self, x, sums):
        return x.new_empty(1, x.shape[-1])

    def sinusoids(self, t, frequencies, width):
        return self.made("sinusoids", (len(t), width), torch.float32)

    def pad_channels(self, x, width, dtype):
        return self.made("padded", (*x.shape[:-1], width))

    def attention_forward(self, qkv, *_):
        n, t, c = qkv.shape
        return self.made("o", (n, t, c // 3)), self.made("lse", (n, t, c // 96), torch.float32)

    def attention_backward(self, do, qkv, *_):
        return self.made("d_qkv", qkv.shape), qkv.new_empty(1, qkv.shape[2])

    def avg_pool(self, x):
        n, h, w, c = x.shape
        return self.made("pooled", (n, h // 2, w // 2, c))

    def avg_pool_grad(self, dy, *_):
        n, h, w, c = dy.shape
        return self.made("dx", (n, 2 * h, 2 * w, c)), dy.new_empty(1, c)

    def upsample(self, x):
        n, h, w, c = x.shape
        return self.made("upsampled", (n, 2 * h, 2 * w, c))

    def upsample_grad(self, dy):
        n, h, w, c = dy.shape
        return self.made("dx", (n, h // 2, w // 2, c))


def activations(batch: int, recompute: bool = False, **options) -> Shapes:
    """A pass forward and backward of the model of the benchmarks, with other options perhaps."""
    from diffusion.models.flat_parameters import FlatParameters
    from diffusion.models.unet import UNet
    from diffusion.plan.embedding import TOGETHER
    from diffusion.plan.step.network import TrainingUNet
    from diffusion.runtime.backend import Backend
    from triton_kernels import reference

    settings = {
        "image_size": 64,
        "in_channels": 3,
        "model_channels": 64,
        "out_channels": 3,
        "num_res_blocks": 2,
        "attention_resolutions": (4, 8),
        "channel_mult": (1, 2, 3, 4),
        "conv_resample": False,
        "num_head_channels": 32,
        "use_new_attention_order": True,
    } | options
    with torch.device("meta"):
        model = UNet(**settings, backend=Backend("torch", reference, torch.bfloat16)).to("meta")
        kernels = Shapes()
        plan = TrainingUNet(model, FlatParameters(model, together=TOGETHER), kernels, recompute)
        x = torch.empty(batch, *model.image_size, 3)
        y = plan(x, torch.empty(batch), rng=torch.empty(2, dtype=torch.int64))
        y.backward(torch.empty_like(y))
    assert kernels.bytes == 0, "something is still held"
    return kernels


def main() -> None:
    batch = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    for recompute in (False, True):
        found = activations(batch, recompute)
        print(f"recompute={recompute}: {found.peak / 2**20:.0f} MiB at the peak")
        for (by, shape), size in sorted(found.at_peak.items(), key=lambda item: -item[1])[:24]:
            print(f"{size / 2**20:8.0f} MiB  {by} {list(shape)}")


if __name__ == "__main__":
    main()
