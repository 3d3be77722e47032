"""The 1-D UNet in real time: its plan in float64 against the modules, its kernels against both."""

import logging

import pytest
import torch

import triton_kernels
from diffusion.formats.weights import load_weights
from diffusion.models.layers import set_backend
from diffusion.models.unet1d import UNet1d
from diffusion.plan.graph import PlanError
from diffusion.plan.inference1d import InferenceUNet1d, real_time, real_time_plan
from diffusion.plan.join import stages
from diffusion.plan.printed.memory import Allocations
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32, Backend
from diffusion.sampling.sampler import DDIM, DDPM
from triton_kernels import fused_ops, reference
from triton_kernels.conv1d import conv1d as stream_conv1d
from triton_kernels.reference import fused
from triton_kernels.runtime.device import Device, standing_for

from ..kernels.poison import poison_outputs
from .golden_unet import relative

SMALL = {"input_dim": 2, "global_cond_dim": 10, "diffusion_step_embed_dim": 32}
TINY = {
    "input_dim": 3,
    "global_cond_dim": 5,
    "diffusion_step_embed_dim": 8,
    "down_dims": (16, 32),
    "kernel_size": 3,
    "n_groups": 4,
}
TRITON = Backend("triton", triton_kernels)
EIGHT = Device(tma=True, num_sms=8, shared_memory=232_448)  # multiprocessors
HOPPER = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True, arch=90)
PUBLISHED = {"input_dim": 2, "global_cond_dim": 1028}


@pytest.fixture(autouse=True)
def without_tf32():
    """The reference on a GPU is float32 throughout, unless a test says otherwise."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def tiny(**options) -> UNet1d:
    torch.manual_seed(0)
    model = UNet1d(**{**TINY, **options})
    for p in model.parameters():
        if p.ndim == 1:  # a norm's are ones and zeros
            torch.nn.init.normal_(p, p.mean().item(), 0.3)
    return model


def inputs(model: UNet1d, n: int = 2, t: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, t, model.input_dim, generator=generator)
    cond = torch.randn(n, model.global_cond_dim or 1, generator=generator)
    return x, torch.arange(n) * 7, cond if model.global_cond_dim else None


def moved(values, *to):
    return [v if v is None or not v.is_floating_point() else v.to(*to) for v in values]


CASES = {
    "default": {},
    "shift_only": {"cond_predict_scale": False},
    "unconditional": {"global_cond_dim": None},
    "one_level": {"down_dims": (16,)},
    "three_levels": {"down_dims": (16, 16, 32), "kernel_size": 5},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_the_plan_in_float64(options):
    """Over the twins of the kernels, which have no rounding to hide behind."""
    model = tiny(**options).double()
    set_backend(model, Backend("torch", reference, torch.float64))
    x, t, cond = moved(inputs(model), torch.float64)
    with torch.no_grad():
        expected = model.forward_nhwc(x, t, cond)
    assert relative(InferenceUNet1d(model, fused)(x, t, cond), expected) < 1e-12


KERNEL_CASES = [
    ("default", 1, 9),
    ("default", 2, 1),
    ("unconditional", 2, 9),
    ("shift_only", 1, 9),
    ("three_levels", 1, 9),
    ("three_levels", 1, 1),
]


def two_launches_from(n, monkeypatch):
    """With so many samples a layer is two launches, however large it is."""
    monkeypatch.setattr(stages, "_BATCHED_FROM", n)
    monkeypatch.setattr(stages, "_LARGE", 2**62)


@pytest.mark.parametrize(("case", "n", "batched_from"), KERNEL_CASES)
def test_the_kernels(device, case, n, batched_from, monkeypatch):
    poison_outputs(monkeypatch)
    two_launches_from(batched_from, monkeypatch)
    model = tiny(**CASES[case]).to(device)
    x, t, cond = (None if v is None else v.to(device) for v in inputs(model, n, 4))
    with torch.no_grad():
        expected = model.forward_nhwc(x, t, cond)
    set_backend(model, TRITON)
    y = InferenceUNet1d(model, gpu=EIGHT)(x, t, cond)
    assert y.dtype == torch.float32
    assert relative(y, expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "n", "batched_from"), KERNEL_CASES)
def test_the_kernels_compiled(case, n, batched_from, monkeypatch):
    """Three levels end at one position, whose tiles the compiler lays out in another order."""
    test_the_kernels(torch.device("cuda"), case, n, batched_from, monkeypatch)


def test_where_two_launches_a_layer_begin(monkeypatch):
    """With four samples, or with one if layers are large and the GPU has the kernel for them."""
    model = tiny(down_dims=(64,), n_groups=8)
    set_backend(model, TRITON)

    def begins() -> int:
        graph = real_time_plan(model, 1, 8, fused_ops, HOPPER).graph
        (found,) = {n.attrs["batched_from"] for n in graph.nodes if n.op == "stage"}
        return found

    assert begins() == 4
    monkeypatch.setattr(stages, "_LARGE", 1)
    monkeypatch.setattr(stream_conv1d.whole, "refuse", lambda *_: None)
    assert begins() == 1
    monkeypatch.setattr(stream_conv1d.whole, "refuse", lambda *_: "it is another's")
    assert begins() == 4


@pytest.mark.parametrize("n", [1, 4])
def test_golden(golden, device, n, monkeypatch):
    from safetensors.torch import load_file

    model = UNet1d(**SMALL, down_dims=(32, 64))
    load_weights(golden / "unet1d_small.weights.safetensors", model)
    set_backend(model.to(device), TRITON)
    io = load_file(golden / "unet1d_small.io.safetensors")
    x, t, cond, y = (io[k][:n].to(device) for k in ("x", "t", "global_cond", "y"))
    two_launches_from(2, monkeypatch)
    streamed = InferenceUNet1d(model)
    assert relative(streamed(x[:, None].contiguous(), t, cond)[:, 0], y) < 1e-4


def test_samples_are_independent_and_an_empty_batch_is_empty():
    model = tiny()
    streamed = InferenceUNet1d(model, fused)
    x, t, cond = inputs(model, 3)
    alone = torch.cat([streamed(x[i : i + 1], t[i : i + 1], cond[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(streamed(x, t, cond), alone)
    assert streamed(x[:0], t[:0], cond[:0]).shape == (0, 1, 8, 3)


@pytest.mark.parametrize("sampler", [DDPM, DDIM], ids=["ddpm", "ddim"])
def test_a_chain_is_that_of_the_modules(sampler):
    """The tables of the step and of the condition add up to the FiLM of both."""
    model = tiny()
    _, _, cond = inputs(model)
    chain = sampler(make_schedule("cosine", 100), TORCH_FP32, steps=5)
    shape, draw = (2, 1, 8, 3), {"seed": 3, "labels": cond}
    with torch.no_grad():
        expected = chain.sample(model.forward_nhwc, shape, **draw)
    ours = chain.sample(InferenceUNet1d(model, fused), shape, **draw)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_the_table_of_the_steps_is_made_once():
    model = tiny(global_cond_dim=None)
    streamed, timesteps = InferenceUNet1d(model, fused), torch.arange(4)
    (table,) = streamed.tabulate(timesteps, None, 2)
    assert streamed.tabulate(timesteps, None, 3)[0] is table
    assert streamed.tabulate(timesteps.flip(0), None, 2)[0] is not table


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"down_dims": (24, 48)}, "24 channels in 4 groups"),
        ({"n_groups": 3, "down_dims": (48, 48)}, "48 channels in 3 groups"),
        ({"down_dims": (8, 16)}, "8 channels"),
        ({"n_groups": 1, "down_dims": (16, 256)}, "256 channels a group"),
        ({"input_dim": 33}, "a first convolution of 99 terms; at most 96"),
        ({"input_dim": 16}, "the residual of a block is the input"),
        ({"down_dims": (32, 16)}, "a concatenation"),
        ({"down_dims": (64, 32, 64)}, "a concatenation"),
        (
            {"down_dims": (1024,), "n_groups": 8},
            "1024 channels in front of the last convolution; at most 512",
        ),
    ],
)
def test_what_does_not_fit_runs_layer_by_layer(options, named, caplog):
    model = tiny(**options)
    set_backend(model, TRITON)
    with pytest.raises(PlanError, match=named + r".*models/\w+\.py:"):
        InferenceUNet1d(model)
    with caplog.at_level(logging.INFO):
        assert real_time(model, 8) is None
    assert named in caplog.text


def test_long_chunks_run_layer_by_layer(caplog):
    model = tiny()
    set_backend(model, TRITON)
    with caplog.at_level(logging.INFO):
        assert real_time(model, 128) is None
    assert "chunks of 128 time steps; at most 64" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_what_is_packed(dtype):
    """Beside the parameters and what evaluations read, there are copies of one layer at a time."""
    backend = Backend("triton", triton_kernels, dtype=dtype)
    model = UNet1d(**SMALL, down_dims=(64, 128, 256), backend=backend)
    with standing_for(HOPPER), Allocations() as made:
        network = InferenceUNet1d(model, gpu=HOPPER)
    kept = {x.untyped_storage()._cdata: x for x in network.evaluation.values.values()}
    read = sum(x.untyped_storage().nbytes() for x in kept.values())
    theirs = {p.untyped_storage()._cdata for p in model.parameters()}
    largest = max(p.nbytes for p in model.parameters())
    assert not theirs & kept.keys(), "what is packed does not follow the parameters"
    assert read <= made.now < 1.1 * read
    assert made.peak - made.now < 3 * largest < sum(p.nbytes for p in model.parameters()) / 3


def test_only_for_the_triton_backend():
    model = tiny()
    assert real_time(model, 8) is None
    set_backend(model, TRITON)
    assert isinstance(real_time(model, 8), InferenceUNet1d)


def test_wrong_inputs():
    model = tiny()
    streamed = InferenceUNet1d(model, fused)
    x, t, cond = inputs(model)
    with pytest.raises(ValueError, match="condition is missing"):
        streamed(x, t)
    with pytest.raises(ValueError, match="condition has shape"):
        streamed.tabulate(t, cond[:1], 2)
    with pytest.raises(ValueError, match="128 time steps"):
        streamed(torch.zeros(1, 1, 128, 3), t[:1], cond[:1])


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    """The network of the published size and its result in float64, by batch."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = UNet1d(**PUBLISHED)
        for p in model.parameters():
            if p.ndim == 1:
                p.data += 0.1 * torch.randn_like(p)
    return model


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "n"),
    [("bf16", 1), ("bf16", 2), ("bf16", 8), ("bf16", 64), ("fp16", 1), ("tf32", 1), ("fp32", 1)]
    + [("tf32", 8), ("fp32", 8), ("bf16", 5), ("fp16", 8), ("tf32", 64), ("fp32", 64)],
)
def test_the_published_size(published, precision, n):
    """At most twice as far from float64 as PyTorch's layers at the same precision, and every time
    the same bits."""
    model, device = published, torch.device("cuda")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    tf32 = precision != "fp32"
    x, t, cond = (v.to(device) for v in inputs(model, n, 16))
    results = []
    with torch.no_grad():
        set_backend(model.double(), Backend("torch", reference, torch.float64))
        exact = model.forward_nhwc(*moved((x, t, cond), torch.float64))
        torch.backends.cudnn.allow_tf32 = tf32  # all of reference is convolutions
        set_backend(model.float(), Backend("torch", reference, dtype, tf32))
        theirs = relative(model.forward_nhwc(x, t, cond).double(), exact)
    set_backend(model, Backend("triton", triton_kernels, dtype, tf32))
    streamed = InferenceUNet1d(model)
    results = [streamed(x, t, cond) for _ in range(4)]
    assert relative(results[0].double(), exact) < 2 * theirs + 1e-5
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "fp32"])
def test_the_published_size_a_launch_a_layer(published, precision, monkeypatch):
    """As on GPUs for which there is no `conv1d.whole`."""
    two_launches_from(9, monkeypatch)
    test_the_published_size(published, precision, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 8, 64])
def test_a_captured_chain_has_the_bits_of_an_eager_one(published, n):
    """Launches that overlap read nothing before it is there. And the chain is no further from
    PyTorch's in float32 than twice what PyTorch's in bf16 is."""
    backend = Backend("triton", triton_kernels, torch.bfloat16, True)
    set_backend(published, backend)
    streamed = InferenceUNet1d(published)
    _, _, cond = inputs(published, n, 16)
    schedule = make_schedule("cosine", 100)
    captured, eager = (
        DDPM(schedule, backend, device="cuda", capture=capture) for capture in (True, False)
    )
    draw = {"seed": 1, "labels": cond.cuda()}
    expected = eager.sample(streamed, (n, 1, 16, 2), **draw)
    for _ in range(3):
        assert torch.equal(captured.sample(streamed, (n, 1, 16, 2), **draw), expected)
    results = []
    for precision in (torch.float32, torch.bfloat16):
        set_backend(published, Backend("torch", reference, precision))
        sampler = DDPM(schedule, published.backend, device="cuda", capture=False)
        with torch.no_grad():
            results.append(sampler.sample(published.forward_nhwc, (n, 1, 16, 2), **draw))
    exact, layers = results
    assert relative(expected, exact) < 2 * relative(layers, exact)
