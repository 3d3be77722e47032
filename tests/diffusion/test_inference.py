"""The plan for sampling against the layers, in float64, and in bf16 on the GPU."""

import copy
import inspect
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import triton_kernels
from diffusion.factory import make_sampler
from diffusion.models.conditions import Conditions, with_null_token
from diffusion.models.layers import set_backend
from diffusion.models.unet import UNet
from diffusion.plan.inference import InferenceUNet, sampling_network
from diffusion.plan.join import conv, norm, resample, state
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32, Backend
from diffusion.sampling.guidance import guide
from triton_kernels import fused_ops as fused, reference
from triton_kernels.conv import split as conv_split
from triton_kernels.conv.plain import small_batch as conv_early
from triton_kernels.conv.plain.pointers import pointer_split
from triton_kernels.reference import fused as fused_reference
from triton_kernels.registry.kernel import Op
from triton_kernels.runtime.device import Device

from .test_fused_unet import MODELS, given, make
from .test_fused_unet_kernels import ODD, build, unet64

CALLS = (
    "conv_few",
    "conv_split",
    "norm_of_sums",
    "norm_table",
    "norm_single_cta",
    "projected_attention",
    "resample_parts",
    "sum_parts",
)

LARGE = ("norm_conv", "apply_upsampled")


def replace(monkeypatch, name, function):
    """In the reference and in its files, which call each other."""
    files = [file for file in vars(fused_reference).values() if inspect.ismodule(file)]
    for module in (fused_reference, *files):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, function)


def limited(monkeypatch, name, value):
    """What the rules of `join` compare sizes with."""
    (module,) = (module for module in (conv, norm, resample, state) if name in vars(module))
    monkeypatch.setattr(module, name, value)


def without(monkeypatch, *names):
    """These launches are not joined."""
    for name in names:
        monkeypatch.setitem(fused_reference.OPS, name, Op(name, (), ()))


@pytest.fixture
def calls(monkeypatch):
    """How often the kernels of inference were asked for."""
    counts = dict.fromkeys((*CALLS, *LARGE), 0)

    def counting(name):
        files = fused_reference, fused_reference.norms
        original = next(getattr(file, name) for file in files if hasattr(file, name))

        def counted(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        return counted

    for name in counts:
        replace(monkeypatch, name, counting(name))
    return counts


@pytest.mark.parametrize("size", [(8, 12), (16, 24)], ids=["small", "larger"])
@pytest.mark.parametrize("name", MODELS)
def test_output(name, size):
    options = MODELS[name]
    if size != (8, 12) and name not in ("two_blocks", "film"):
        pytest.skip("two models will do")
    model = make(options, size).eval()
    twin = copy.deepcopy(model)
    plan = InferenceUNet(model, fused_reference)
    x, t = torch.randn(2, *size, 3).double(), torch.tensor([3, 700])
    labels = given(model)
    y = plan(x, t, labels)
    torch.testing.assert_close(y, twin.forward_nhwc(x, t, labels), rtol=1e-10, atol=1e-10)
    assert not y.requires_grad


def test_every_way_of_a_norm_is_taken(calls):
    model = make(MODELS["three_levels"], (16, 24))
    plan = InferenceUNet(model, fused_reference)
    for images in (2, 3):
        plan(torch.randn(images, 16, 24, 3).double(), torch.arange(images))
    assert all(calls[name] for name in CALLS), calls


@pytest.mark.parametrize("name", ["two_blocks", "film", "three_levels"])
def test_norms_in_the_launch_of_a_convolution(name, monkeypatch):
    kept, beside, original = [], [], fused_reference.conv_norm

    def once(*args, **kwargs):
        kept.append(args[3].keep)
        beside.append(kwargs.get("x2") is not None)
        return original(*args, **kwargs)

    monkeypatch.setattr(fused_reference, "conv_norm", once)
    limited(monkeypatch, "_NORM_NEXT_PIXELS", 96)
    model = make(MODELS[name], (8, 12)).eval()
    twin = copy.deepcopy(model)
    x, t = torch.randn(2, 8, 12, 3).double(), torch.tensor([3, 700])
    labels = torch.tensor([2, 0]) if model.num_classes else None
    plan, exact = InferenceUNet(model, fused_reference), twin.forward_nhwc(x, t, labels)
    for _ in range(2):  # the second takes what it wants of one tensor
        torch.testing.assert_close(plan(x, t, labels), exact, rtol=1e-10, atol=1e-10)
    assert True in kept and (name == "film" or False in kept)  # with FiLM, between blocks alone
    assert any(beside)


@pytest.mark.parametrize("name", ["two_blocks", "film", "three_levels"])
def test_as_in_a_large_batch(name, calls, monkeypatch):
    """Norms that upsample on their way, or within a convolution; whole tiles."""
    for limit in ("WHOLE_PIXELS", "_FEW_TILES", "_VERY_FEW_TILES"):
        limited(monkeypatch, limit, 0)
    without(monkeypatch, "conv_split", "projected_attention")
    model = make(MODELS[name], (16, 24)).eval()
    twin = copy.deepcopy(model)
    x, t = torch.randn(2, 16, 24, 3).double(), torch.tensor([3, 700])
    labels = torch.tensor([2, 0]) if model.num_classes else None
    y = InferenceUNet(model, fused_reference)(x, t, labels)
    torch.testing.assert_close(y, twin.forward_nhwc(x, t, labels), rtol=1e-10, atol=1e-10)
    taken = {call for call, count in calls.items() if count}
    assert taken == {"conv_few", "norm_of_sums", "norm_table", *LARGE}


@pytest.mark.parametrize("dim", [0, 5], ids=["no context", "a context"])
def test_the_kernels_themselves(dim, device, monkeypatch):
    """In float16, small convolutions in parts."""
    large = Device(tma=True, num_sms=132, shared_memory=232_448)  # no wgmma: it is not interpreted
    for module in (conv_early, conv_split):
        monkeypatch.setattr(module, "describe", lambda _: large)
    monkeypatch.setattr(conv_split, "_MAX_PIXELS", 64)
    options = {"channel_mult": (1, 2), "attention_resolutions": (2,), "context_dim": dim}
    model = make(options | {"use_scale_shift_norm": True}, (8, 32)).to(device).eval()
    x, t = torch.randn(1, 8, 32, 3, device=device), torch.tensor([300], device=device)
    more = None
    if dim:
        tokens = torch.randn(1, 4, dim, device=device)
        more = Conditions(None, None, None, *with_null_token(tokens, torch.tensor([3]).to(device)))
    with torch.no_grad():
        exact = model.forward_nhwc(x.double(), t, more)
        set_backend(model.float(), Backend("torch", reference, torch.float16))
        low = model.forward_nhwc(x.half(), t, more)
    set_backend(model, Backend("triton", triton_kernels, torch.float16))
    y = InferenceUNet(model, fused)(x, t, more)
    assert (y - exact).norm() <= 2 * (low - exact).norm()


@pytest.mark.parametrize(
    "options",
    [{}, {"model_channels": 18, "num_groups": 6, "num_head_channels": 9}],
    ids=["", "18 channels"],
)
@pytest.mark.parametrize("tma", [True, False], ids=["", "no TMA unit"])
def test_other_kernels_themselves(options, tma, device, request, monkeypatch):
    """In float16, of any number of channels, with and without a TMA unit; small convolutions in
    parts."""
    if not tma:
        request.getfixturevalue("no_tma")
    forward, through_pointers = pointer_split.pointer.forward, []

    def noted(*given, **options):
        through_pointers.append(options)
        forward(*given, **options)

    monkeypatch.setattr(pointer_split, "pointer", SimpleNamespace(forward=noted))
    pointers = not tma or "model_channels" in options  # TMA addresses channels by 8
    options = {"channel_mult": (1, 2), "attention_resolutions": (2,)} | options
    model = make(options, (4, 6)).to(device).eval()
    x, t = torch.randn(1, 4, 6, 3, device=device), torch.tensor([300], device=device)
    with torch.no_grad():
        exact = model.forward_nhwc(x.double(), t)
        set_backend(model.float(), Backend("torch", reference, torch.float16))
        low = model.forward_nhwc(x.half(), t)
    set_backend(model, Backend("triton", triton_kernels, torch.float16))
    y = InferenceUNet(model, fused)(x, t)
    assert (y - exact).norm() <= 2 * (low - exact).norm()
    assert bool(through_pointers) == pointers


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, in Triton's interpreter")
def test_who_gets_the_plan(caplog):
    caplog.set_level("INFO", "diffusion.plan")
    model = make({"model_channels": 64, "channel_mult": (1, 2)}, (16, 16)).float()
    assert sampling_network(model) == model.forward_nhwc  # PyTorch's backend
    assert not caplog.messages
    for dtype, tf32 in ((torch.float16, True), (torch.float32, True), (torch.float32, False)):
        set_backend(model, Backend("triton", triton_kernels, dtype, allow_tf32=tf32))
        assert isinstance(sampling_network(model), InferenceUNet)
    assert caplog.messages == ["sampling with the fused plan"] * 3


def test_dropout_of_channels_that_training_has_no_plan_for():
    """An evaluation drops nothing."""
    channels = {"model_channels": 18, "num_groups": 6, "num_head_channels": 9}
    model = make({"channel_mult": (1, 2), "dropout": 0.3, **channels}, (4, 6)).eval()
    x, t = torch.randn(2, 4, 6, 3).double(), torch.tensor([3, 700])
    y = InferenceUNet(model, fused_reference)(x, t)
    torch.testing.assert_close(y, model.forward_nhwc(x, t), rtol=1e-10, atol=1e-10)
    set_backend(model.float(), Backend("triton", triton_kernels, torch.float16))
    assert isinstance(sampling_network(model), InferenceUNet)
    assert sampling_network(model.train()) == model.forward_nhwc


def test_the_model_is_left_alone():
    model = make({"channel_mult": (1,)})
    before = [p.data_ptr() for p in model.parameters()]
    plan = InferenceUNet(model, fused_reference)
    assert [p.data_ptr() for p in model.parameters()] == before
    x, t = torch.randn(1, 8, 12, 3).double(), torch.tensor([5])
    y = plan(x, t)
    model.input_blocks[0][0].weight.data.zero_()
    assert torch.equal(plan(x, t), y)


# --- on the GPU -----------------------------------------------------------------------------------


def triton_backend():
    return Backend("triton", triton_kernels, torch.bfloat16, allow_tf32=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *(("64x64", batch) for batch in (1, 2, 3, 8, 16, 64)),
        *((name, 1) for name in ("28x28", "24 channels")),
        ("96 and 96 channels", 40),
    ],
)
def test_as_good_as_the_layers_of_pytorch(name, batch):
    """In bf16, against float64: within twice the error of PyTorch's layers in bf16."""
    options, size = {"64x64": ({}, (64, 64)), **ODD}[name]

    def network(backend: Backend) -> UNet:
        return build(backend, options, size, torch.device("cuda"))

    exact = network(Backend("torch", reference, torch.float64)).double()
    theirs = network(Backend("torch", reference, torch.bfloat16))
    plan = sampling_network(network(triton_backend()))
    assert isinstance(plan, InferenceUNet)
    x = torch.randn(batch, *size, 3, device="cuda")
    t = torch.randint(0, 1000, (batch,), device="cuda")
    with torch.no_grad():
        expected = exact.forward_nhwc(x.double(), t)
        budget = (theirs.forward_nhwc(x.bfloat16(), t) - expected).norm()
        for _ in range(3):
            y = plan(x, t)
            assert (y - expected).norm() <= 2 * budget
    others = [plan(x, t) for _ in range(8)]  # none is waited for: the GPU has them all at once
    assert all(torch.equal(other, y) for other in others)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("name", ["ddpm", "dpmpp_2m"])
def test_a_captured_chain_has_the_bits_of_the_loop(name, batch):
    plan, shape = sampling_network(unet64(triton_backend())), (batch, 64, 64, 3)
    chains = [
        make_sampler(
            make_schedule("linear", 1000), triton_backend(), name, steps=10, device="cuda",
            capture=capture,
        ).sample(plan, shape, seed=3)
        for capture in (True, False)
    ]  # fmt: skip
    assert torch.isfinite(chains[0]).all() and torch.equal(*chains)


@pytest.mark.gpu
def test_backends_and_batches_draw_the_same_images():
    """bf16 moves a chain: ours, in whole or in parts, by no more than twice PyTorch's bf16."""
    shape, steps = (4, 64, 64, 3), 20
    chains = {}
    for name, backend in (
        ("exact", TORCH_FP32),
        ("torch", Backend("torch", reference, torch.bfloat16)),
        ("triton", triton_backend()),
    ):
        network = sampling_network(unet64(backend))
        sampler = make_sampler(
            make_schedule("linear", 1000), backend, "ddim", steps=steps, device="cuda"
        )
        chains[name] = sampler.sample(network, shape, seed=1)
    parts = [
        sampler.sample(network, (n, *shape[1:]), seed=1, first=first)
        for n, first in ((1, 0), (3, 1))
    ]
    budget = 2 * (chains["torch"] - chains["exact"]).norm()
    for chain in (chains["triton"], torch.cat(parts)):
        assert (chain - chains["exact"]).norm() <= budget


@pytest.mark.gpu
def test_guided_labels_on_the_gpu():
    model = make(
        {"model_channels": 64, "channel_mult": (1, 2), "num_classes": 3, "label_dropout": 0.1},
        (32, 32),
    )
    model = model.float().cuda().eval()
    labels = torch.tensor([2, 0, 1, 1, 0], device="cuda")

    def chain(backend: Backend) -> torch.Tensor:
        set_backend(model, backend)
        network = sampling_network(model) if backend.name == "triton" else model.forward_nhwc
        schedule = make_schedule("linear", 1000)
        sampler = make_sampler(schedule, backend, "ddim", steps=5, device="cuda")
        return sampler.sample(guide(network, 2.0, 3), (5, 32, 32, 3), seed=1, labels=labels)

    exact = chain(TORCH_FP32)
    low = chain(Backend("torch", reference, torch.bfloat16))
    assert (chain(triton_backend()) - exact).norm() <= 2 * (low - exact).norm()


@pytest.mark.gpu
def test_the_kernels_are_those_of_fused():
    assert sampling_network(unet64(triton_backend())).kernels is fused


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [16, 64])
def test_chains_of_two_threads_have_the_bits_of_one(batch):
    shape, rounds = (batch, 64, 64, 3), 5
    plans = [sampling_network(unet64(triton_backend())) for _ in range(2)]
    schedule, given = make_schedule("linear", 1000), {"steps": 10, "device": "cuda"}
    samplers = [make_sampler(schedule, triton_backend(), "ddim", **given) for _ in plans]
    alone = [s.sample(p, shape, seed=3) for s, p in zip(samplers, plans, strict=True)]
    assert torch.equal(*alone)
    torch.cuda.synchronize()

    def draw(sampler, plan):
        with torch.cuda.stream(torch.cuda.Stream()):
            chains = [sampler.sample(plan, shape, seed=3) for _ in range(rounds)]
            return all(torch.equal(chain, alone[0]) for chain in chains)

    with ThreadPoolExecutor(len(plans)) as threads:
        assert list(threads.map(draw, samplers, plans)) == [True, True]
