"""The UNet: other implementations' results, every option against an oracle, dropout, errors."""

import copy
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

import triton_kernels
from diffusion.errors import ConfigError
from diffusion.formats.weights import load_weights, to_unet_cu_name
from diffusion.models.blocks import CrossAttentionBlock
from diffusion.models.conditions import Conditions, with_null_token
from diffusion.models.layers import set_backend
from diffusion.models.unet import UNet
from diffusion.runtime.backend import Backend
from triton_kernels import reference

from .golden_unet import OPTIONS, check_golden, check_golden_bf16, relative
from .guided_oracle import expected_shapes, oracle

PRESETS = Path(__file__).resolve().parents[2] / "configs" / "model"

TINY = {
    "image_size": 8,
    "in_channels": 2,
    "model_channels": 8,
    "out_channels": 2,
    "num_res_blocks": 1,
    "attention_resolutions": (2,),
    "dropout": 0.0,
    "channel_mult": (1, 2),
    "conv_resample": True,
    "num_classes": None,
    "num_heads": 1,
    "num_head_channels": -1,
    "num_heads_upsample": -1,
    "num_groups": 4,
    "use_scale_shift_norm": False,
    "resblock_updown": False,
    "use_new_attention_order": False,
    "max_period": 10000,
    "zero_init": False,
}


def tiny(**options) -> UNet:
    torch.manual_seed(0)
    return UNet(**{**TINY, **options})


def preset(name: str, **given) -> UNet:
    settings = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    assert settings.pop("name") == "unet"
    return UNet(**settings, **{"in_channels": 3, "out_channels": 3, **given})


# --- recorded results -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPTIONS)
def test_golden(golden, name, backend):
    model = UNet(**OPTIONS[name])
    load_weights(golden / f"{name}.weights.safetensors", model)
    if backend == "triton":
        model.cuda()
        set_backend(model, Backend("triton", triton_kernels))
    theirs = to_unet_cu_name if name.startswith("unet_cu") else str
    check_golden(golden, name, model, {k: theirs(k) for k, _ in model.named_parameters()})


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_golden_in_bf16(golden, name):
    models = []
    for backend in (
        Backend("triton", triton_kernels, torch.bfloat16, allow_tf32=True),
        Backend("torch", reference, torch.bfloat16),
    ):
        model = UNet(**OPTIONS[name], backend=backend)
        load_weights(golden / f"{name}.weights.safetensors", model)
        models.append(model.cuda())
    theirs = to_unet_cu_name if name.startswith("unet_cu") else str
    names = {k: theirs(k) for k, _ in models[0].named_parameters()}
    check_golden_bf16(golden, name, *models, names)


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [
        ("unet64", 64, 20_494_211),
        ("unet_cu", 64, 20_494_211),
        ("unet_tiny", 32, 954_915),
        ("adm64", 64, 101_664_259),
    ],
)
def test_presets(name, size, count):
    with torch.device("meta"):
        assert preset(name, image_size=size).num_parameters == count


# --- every option against the oracle --------------------------------------------------------------

CASES = {
    "default": {},
    "pool_and_nearest": {"conv_resample": False},
    "updown": {"resblock_updown": True},
    "updown_without_conv_resample": {"resblock_updown": True, "conv_resample": False},
    "scale_shift": {"use_scale_shift_norm": True},
    "adm": {"use_scale_shift_norm": True, "resblock_updown": True, "num_classes": 3},
    "classes": {"num_classes": 3},
    "learned_variance": {"out_channels": 4},
    "two_heads_legacy": {"num_heads": 2},
    "two_heads_new_order": {"num_heads": 2, "use_new_attention_order": True},
    "head_channels_legacy": {"num_head_channels": 4},
    "head_channels_new_order": {"num_head_channels": 4, "use_new_attention_order": True},
    "other_heads_up": {"num_heads": 2, "num_heads_upsample": 4},
    "attention_everywhere": {"attention_resolutions": (1, 2)},
    "attention_in_the_middle_only": {"attention_resolutions": ()},
    "three_levels_two_blocks": {"channel_mult": (1, 2, 3), "num_res_blocks": 2},
    "one_level": {"channel_mult": (2,), "attention_resolutions": ()},
    "fractional_mult": {"model_channels": 16, "channel_mult": (0.5, 1)},
    "equal_widths": {"channel_mult": (1, 1)},
    "odd_embedding": {"model_channels": 9, "num_groups": 3},
    "short_period": {"max_period": 1000},
    "landscape": {"image_size": (4, 8)},
    "portrait": {"image_size": [8, 4], "conv_resample": False},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_names_shapes_and_order(options):
    shapes = {k: tuple(p.shape) for k, p in tiny(**options).named_parameters()}
    assert list(shapes.items()) == list(expected_shapes({**TINY, **options}).items())


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_output_and_gradients(options):
    model = tiny(**options)
    for p in model.parameters():  # affine parameters of norms off one and zero
        torch.nn.init.normal_(p, std=0.3)
    state = {k: p.detach().double().requires_grad_() for k, p in model.named_parameters()}
    x = torch.randn(2, 2, *model.image_size, requires_grad=True)
    t = torch.tensor([3.0, 870.5])
    labels = torch.tensor([2, 0]) if model.num_classes else None
    y = model(x, t, labels)
    dy = torch.randn_like(y)
    y.backward(dy)
    x64 = x.detach().double().requires_grad_()
    y64 = oracle(state, {**TINY, **options}, x64, t.double(), labels)
    y64.backward(dy.double())
    assert y.shape == y64.shape
    assert relative(y, y64) < 1e-5
    assert relative(x.grad, x64.grad) < 1e-5
    for name, p in model.named_parameters():
        assert relative(p.grad, state[name].grad) < 1e-4, name


# --- layout, precision, size ----------------------------------------------------------------------


def test_forward_keeps_channels_last_and_dtype():
    model = tiny()
    x = torch.randn(2, 2, 8, 8, dtype=torch.float64).to(memory_format=torch.channels_last)
    y = model(x, torch.tensor([0, 1]))
    assert y.dtype == torch.float64
    assert y.is_contiguous(memory_format=torch.channels_last)
    nhwc = model.forward_nhwc(x.permute(0, 2, 3, 1), torch.tensor([0, 1]))
    assert nhwc.is_contiguous() and nhwc.dtype == torch.float32
    torch.testing.assert_close(nhwc.permute(0, 3, 1, 2).double(), y)


def test_bf16_activations_on_fp32_parameters():
    model = tiny(use_scale_shift_norm=True)
    x, t = torch.randn(2, 8, 8, 2), torch.tensor([5, 700])
    exact = model.forward_nhwc(x, t)
    set_backend(model, Backend("torch", reference, torch.bfloat16))
    y = model.forward_nhwc(x, t)
    assert y.dtype == torch.bfloat16
    assert relative(y.float(), exact) < 0.03
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_other_image_sizes_than_configured():
    assert tiny()(torch.randn(1, 2, 4, 12), torch.tensor([0])).shape == (1, 2, 4, 12)


def test_empty_batch():
    y = tiny()(torch.randn(0, 2, 8, 8), torch.zeros(0, dtype=torch.long))
    assert y.shape == (0, 2, 8, 8)


def test_zero_init_starts_at_zero():
    assert not tiny(zero_init=True)(torch.randn(2, 2, 8, 8), torch.tensor([0, 1])).any()
    assert tiny(zero_init=False)(torch.randn(2, 2, 8, 8), torch.tensor([0, 1])).any()


def test_samples_have_timesteps_of_their_own():
    model, x = tiny(), torch.randn(1, 2, 8, 8)
    both = model(x.expand(2, -1, -1, -1), torch.tensor([3, 700]))
    torch.testing.assert_close(both[0], model(x, torch.tensor([3]))[0])
    torch.testing.assert_close(both[1], model(x, torch.tensor([700]))[0])
    assert relative(both[0], both[1]) > 1e-3


@pytest.mark.parametrize("options", [{}, {"resblock_updown": True}, {"conv_resample": False}])
def test_flops(options):
    model = tiny(**options, image_size=(8, 4))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(1, 2, 8, 4), torch.tensor([0]))
    counts = counter.get_flop_counts()["Global"]
    attention = sum(v for op, v in counts.items() if "attention" in str(op))
    t, c, blocks = 4 * 2, 16, 4  # attention blocks: one down, one in the middle, two up
    expected = counter.get_total_flops() - attention + blocks * 4 * t * t * c
    assert model.flops_per_image == expected


def test_a_copy_is_independent():
    model = tiny()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.out["2"].bias += 1
    assert not torch.equal(model.out["2"].bias, twin.out["2"].bias)


# --- dropout --------------------------------------------------------------------------------------


def test_dropout_is_keyed_by_step_and_sample():
    model = tiny(dropout=0.3)
    x, t = torch.randn(4, 8, 8, 2), torch.arange(4)
    rng = torch.tensor([7, 11])
    y = model.forward_nhwc(x, t, rng=rng)
    assert torch.equal(y, model.forward_nhwc(x, t, rng=rng))
    assert not torch.equal(y, model.forward_nhwc(x, t, rng=torch.tensor([7, 12])))
    tail = model.forward_nhwc(x[2:], t[2:], rng=rng, first=2)
    torch.testing.assert_close(tail, y[2:])
    layers = [m.dropout_layer for m in model.modules() if hasattr(m, "dropout_layer")]
    assert layers == list(range(len(layers)))


def test_dropout_sleeps_in_evaluation():
    model = tiny(dropout=0.3).eval()
    x, t = torch.randn(2, 2, 8, 8), torch.arange(2)
    assert torch.equal(model(x, t), tiny()(x, t))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image_size": 10, "channel_mult": (1, 2, 2)}, "(10, 10).*multiples of 4"),
        ({"image_size": (8, 7)}, "(8, 7).*multiples of 2"),
        ({"num_groups": 32}, "num_groups=32.* 8 channels of input_blocks.1.0"),
        ({"channel_mult": (1, 1.25)}, "num_groups=4.* 10 channels of input_blocks.3.0"),
        ({"num_head_channels": 5}, "num_head_channels=5.* 16 channels of input_blocks.3.1"),
        ({"num_heads": 3}, "num_heads=3.* 16 channels of input_blocks.3.1"),
        ({"num_heads_upsample": 0}, "num_heads_upsample=0; expected at least 1, or -1"),
        ({"num_head_channels": -2}, "num_head_channels=-2; expected at least 1, or -1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"num_res_blocks": 0}, "num_res_blocks=0"),
        ({"model_channels": 8.5}, "model_channels=8.5"),
        ({"channel_mult": 4}, "channel_mult=4 is not a list"),
        ({"attention_resolutions": "4,8"}, "attention_resolutions=4,8 is not a list"),
        ({"channel_mult": ()}, "channel_mult"),
        ({"num_classes": 0}, "num_classes=0"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 has to be positive"),
        ({"freq_shift": 4}, "freq_shift=4 has to be below model_channels // 2, 4"),
        (
            {"decoder_attention": "first"},
            "decoder_attention=first is unknown; choose one of all, last",
        ),
        ({"stem_channels": 0}, "stem_channels=0; expected at least 1, or -1"),
        ({"downsample_padding": 2}, "downsample_padding=2; choose one of 0, 1"),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(ConfigError, match=words):
        tiny(**options)


def test_attention_that_no_level_has():
    with pytest.warns(UserWarning, match="attention_resolutions has 16.*1, 2"):
        tiny(attention_resolutions=(16,))


T = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("options", "shape", "t", "labels", "words"),
    [
        ({}, (2, 8, 8, 3), T, None, r"\(2, 8, 8, 3\).*expected \[N, H, W, 2\]"),
        ({}, (2, 8, 8), T, None, r"\(2, 8, 8\)"),
        ({}, (2, 8, 7, 2), T, None, "8x7.*multiples of 2"),
        ({}, (2, 8, 8, 2), T[:, None], None, r"t has shape \(2, 1\); expected \(2,\)"),
        ({}, (2, 8, 8, 2), T[:1], None, r"t has shape \(1,\); expected \(2,\)"),
        ({}, (2, 8, 8, 2), T, T, "num_classes"),
        ({"num_classes": 3}, (2, 8, 8, 2), T, None, "missing.*num_classes=3"),
        ({"num_classes": 3}, (2, 8, 8, 2), T, T[:1], r"labels have shape \(1,\)"),
        ({"num_classes": 3}, (2, 8, 8, 2), T, T + 2, r"\[2, 3\]; expected \[0, 2\]"),
        ({"num_classes": 3}, (2, 8, 8, 2), T, T - 1, r"\[-1, 0\]; expected \[0, 2\]"),
        ({"dropout": 0.5}, (2, 8, 8, 2), T, None, "dropout=0.5.*rng"),
    ],
)
def test_wrong_inputs(options, shape, t, labels, words):
    with pytest.raises(ValueError, match=words):
        tiny(**options).forward_nhwc(torch.randn(shape), t, labels)


def test_strided_input_is_refused():
    with pytest.raises(ValueError, match="contiguous NHWC"):
        tiny().forward_nhwc(torch.randn(2, 2, 8, 8).permute(0, 2, 3, 1), T)


def test_a_wrong_shape_is_said_in_the_order_that_was_given():
    model = UNet(**TINY)
    t = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"x has shape \(1, 3, 8, 8\); expected \[N, 2, H, W\]"):
        model(torch.zeros(1, 3, 8, 8), t)
    with pytest.raises(ValueError, match=r"x has shape \(1, 2, 8, 8\); expected \[N, H, W, 2\]"):
        model.forward_nhwc(torch.zeros(1, 2, 8, 8), t)


# --- a context ------------------------------------------------------------------------------------


def context_of(n=2, length=3, dim=5, lengths=(3, 1)):
    tokens = torch.randn(n, length, dim, generator=torch.Generator().manual_seed(7))
    return Conditions(None, None, None, *with_null_token(tokens, torch.tensor(lengths)))


def test_what_lies_behind_a_sequence_changes_nothing():
    model = tiny(context_dim=5).eval()
    x, t, short = torch.randn(2, 8, 8, 2), torch.tensor([3, 700]), context_of()
    tokens = torch.cat((short.context[:, 1:], torch.full((2, 4, 5), torch.nan)), dim=1)
    longer = Conditions(None, None, None, *with_null_token(tokens, torch.tensor([3, 1])))
    with torch.no_grad():
        found, expected = (model.forward_nhwc(x, t, given) for given in (longer, short))
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found, expected)
        other = Conditions(None, None, None, 1.5 * short.context, short.present)
        assert (model.forward_nhwc(x, t, other) - expected).abs().amax((1, 2, 3)).min() > 1e-3


def test_without_a_context_the_null_token_is_attended_to():
    """Which is learned, and is the same for a sequence of no tokens."""
    model = tiny(context_dim=5).eval()
    x, t = torch.randn(2, 8, 8, 2), torch.tensor([3, 700])
    nothing = context_of(lengths=(0, 0))
    dropped = context_of().dropped(torch.tensor([1, 2]), 1.0)
    results = [model.forward_nhwc(x, t, g) for g in (nothing, dropped, context_of().none())]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    zeros = Conditions(
        None, None, None, *with_null_token(torch.zeros(2, 3, 5), torch.tensor([3, 3]))
    )
    torch.testing.assert_close(model.forward_nhwc(x, t, zeros), results[0])
    results[0].sum().backward()
    assert model.middle_block[2].kv.bias.grad.abs().max() > 0


def test_where_a_context_is_attended_to():
    def blocks(model):
        found = model.named_modules()
        return [name for name, m in found if isinstance(m, CrossAttentionBlock)]

    assert blocks(tiny(context_dim=5)) == [
        *("input_blocks.3.2", "middle_block.2", "output_blocks.0.2", "output_blocks.1.2")
    ]
    assert blocks(tiny(context_dim=5, context_resolutions=[])) == ["middle_block.2"]
    everywhere = blocks(tiny(context_dim=5, context_resolutions=[1, 2]))
    assert len(everywhere) == 7 and everywhere[0] == "input_blocks.1.1"
    assert blocks(tiny(context_resolutions=[1, 2])) == []  # there is none
    with pytest.warns(UserWarning, match="context_resolutions has 8, which is none"):
        tiny(context_dim=5, context_resolutions=[8])


def test_a_context_that_does_not_fit():
    x, t, given = torch.randn(2, 8, 8, 2), torch.tensor([3, 700]), context_of()
    with pytest.raises(ValueError, match="a context is missing; the model has context_dim=5"):
        tiny(context_dim=5).forward_nhwc(x, t)
    with pytest.raises(ValueError, match="a context is given; the model has context_dim=0"):
        tiny().forward_nhwc(x, t, given)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 5\); expected \(2, 1 \+ L, 6\)"):
        tiny(context_dim=6).forward_nhwc(x, t, given)
    with pytest.raises(ValueError, match=r"present has shape \(2, 3\); expected \(2, 4\)"):
        part = Conditions(None, None, None, given.context, given.present[:, 1:])
        tiny(context_dim=5).forward_nhwc(x, t, part)
    with pytest.raises(ConfigError, match="context_dim=-1; expected at least 0"):
        tiny(context_dim=-1)
    with pytest.raises(ConfigError, match="context_resolutions=2 is not a list"):
        tiny(context_dim=5, context_resolutions=2)
