"""The planned network against autograd through the layers, in float64."""

import copy
import inspect
from functools import cache

import pytest
import torch

import triton_kernels
from diffusion.models.conditions import Conditions, parts_of, with_null_token
from diffusion.models.flat_parameters import FlatParameters
from diffusion.models.layers import set_backend
from diffusion.models.unet import UNet
from diffusion.plan.embedding import TOGETHER
from diffusion.plan.fuse.rows import ROWS, leaving_out
from diffusion.plan.schedule import streams
from diffusion.plan.schedule.moves import THIRD
from diffusion.plan.step import memory
from diffusion.plan.step.network import TrainingUNet, training_network
from diffusion.plan.step.others import TrainingNetwork
from diffusion.runtime.backend import Backend
from triton_kernels import reference
from triton_kernels.reference import fused as fused_reference
from triton_kernels.runtime import dependent_launch

DOUBLE = Backend("torch", reference, dtype=torch.float64)

MODELS = {
    "three_levels": {"channel_mult": (1, 2, 3), "attention_resolutions": (2, 4)},
    "one_level": {"channel_mult": (1,), "attention_resolutions": (1,)},
    "two_blocks": {"channel_mult": (1, 2), "num_res_blocks": 2, "attention_resolutions": ()},
    "classes": {"channel_mult": (1, 2), "attention_resolutions": (), "num_classes": 3},
    "legacy_attention": {
        "channel_mult": (1, 1),
        "attention_resolutions": (2,),
        "use_new_attention_order": False,
    },
    "learned_variance": {"channel_mult": (1, 2), "attention_resolutions": (), "out_channels": 6},
    "film": {"channel_mult": (1, 2), "use_scale_shift_norm": True},
    "dropout": {"channel_mult": (1, 2), "dropout": 0.3},
    "strided": {"channel_mult": (1, 2, 2), "conv_resample": True},
    "padding_behind": {"channel_mult": (1, 2), "conv_resample": True, "downsample_padding": 0},
    "resampling_blocks": {"channel_mult": (1, 2, 2), "resblock_updown": True},
    "ddpmpp": {  # of EDM
        "channel_mult": (2, 2),
        "num_res_blocks": 2,
        "attention_resolutions": (2,),
        "stem_channels": 32,
        "decoder_attention": "last",
        "resblock_updown": True,
        "resample_projection": True,
        "dropout": 0.1,
    },
    "condition": {"channel_mult": (1, 2), "in_channels": 1, "condition_channels": 2},
    "vector": {"channel_mult": (1, 2), "vector_dim": 5, "num_classes": 3},
    "vector and film": {"channel_mult": (1, 2), "vector_dim": 3, "use_scale_shift_norm": True},
    "context": {"channel_mult": (1, 2), "attention_resolutions": (2,), "context_dim": 6},
    "context and all else": {
        "channel_mult": (1, 2, 2),
        "context_dim": 5,
        "context_resolutions": (1, 4),
        "vector_dim": 2,
        "num_classes": 3,
        "use_scale_shift_norm": True,
        "dropout": 0.1,
    },
    "guided_diffusion": {  # all of them, as in its models for 64x64 images
        "channel_mult": (1, 2),
        "attention_resolutions": (1, 2),
        "use_scale_shift_norm": True,
        "resblock_updown": True,
        "dropout": 0.1,
        "out_channels": 6,
        "num_classes": 3,
    },
}


def make(options: dict, size: tuple[int, int] = (8, 12)) -> UNet:
    torch.manual_seed(0)
    settings = {
        "image_size": size,
        "in_channels": 3,
        "model_channels": 32,
        "out_channels": 3,
        "num_res_blocks": 1,
        "attention_resolutions": (),
        "num_head_channels": 16,
        "num_groups": 8,
        "conv_resample": False,
        "use_new_attention_order": True,
        "zero_init": False,
        "backend": DOUBLE,
    } | options
    return UNet(**settings).double()


def given(model: UNet):
    """What the model wants to be given, of two samples."""
    labels = torch.tensor([2, 0]) if model.num_classes else None
    vectors = None
    if model.vector_dim:
        vectors = torch.linspace(-1, 1, 2 * (model.vector_dim + 1)).double().view(2, -1)
    context = present = None
    if model.context_dim:
        tokens = torch.linspace(-1, 2, 2 * 4 * model.context_dim).view(2, 4, -1)
        context, present = with_null_token(tokens, torch.tensor([4, 2]))
        context = context.double()
    return Conditions(labels, None, vectors, context, present).shortest()


ODD = {  # sizes of images, and halves of concatenations, that are no powers of two
    "28x28": ({"channel_mult": (1, 2, 2), "attention_resolutions": (4,)}, (28, 28)),
    "6x10": ({"channel_mult": (1, 2), "use_scale_shift_norm": True, "dropout": 0.2}, (6, 10)),
    "3x3 and resampling blocks": ({"channel_mult": (1, 3), "resblock_updown": True}, (6, 6)),
    "2x2 by convolution": ({"channel_mult": (1, 1, 2), "conv_resample": True}, (4, 4)),
    "96 and 96 channels": ({"channel_mult": (1, 2), "model_channels": 96}, (4, 6)),
    "24 channels": ({"channel_mult": (1, 2), "model_channels": 24, "num_head_channels": 8}, (4, 4)),
}


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize(
    ("options", "size"),
    [*((options, (8, 12)) for options in MODELS.values()), *ODD.values()],
    ids=[*MODELS, *ODD],
)
def test_output_and_every_gradient(options, size, recompute):
    check_gradients(options, size, recompute)


# of the fuse table: the network whose step has them, unless it is "three_levels"
IN_OTHERS = {
    "dropout in the norm's pass": "dropout",
    "a convolution that halves the image": "strided",
    "dx of what halves the image": "strided",
    "dx of a convolution alone on the small image": "strided",
}
# those of norms over channels, and of 16 bits beside float32, as under autocast, which
# `tests.plan.test_fuse_casts` leaves out
OF_CASTS = (
    "added behind a norm",
    "concatenations as they are read",
    "copies as they are read",
    "parts cast where they are read",
    "parts read where they lie",
)
# those, of attention as others write it or as a GPU has no kernel for, and of channels that kernels
# want padded
IN_NONE = {
    *OF_CASTS,
    "attention without kernels by PyTorch",
    "q, k and v are one product",
    "k and v are one product",
    "few channels of a result padded",
    "gradients of weights in float32",
}


@pytest.mark.parametrize(
    "row", [name for name, row in ROWS.items() if "step" in row.when and name not in IN_NONE]
)
def test_any_row_of_the_fuse_table_can_be_left_out(row):
    """As `benchmarks.ablate` times a step without it."""
    names = [row]
    if row == "sums for biases together":  # sums of padded channels are shortened there alone
        names.append("few channels of a gradient padded")
    name = IN_OTHERS.get(row, "three_levels")
    assert row in rows_of(name)
    with leaving_out(*names):
        plan = check_gradients(MODELS[name], (8, 8), False)
    assert row not in named_in(plan)


@cache
def rows_of(name):
    return named_in(check_gradients(MODELS[name], (8, 8), False))


def named_in(plan):
    """The rows that a network's plans give as reasons."""
    why = [w for p in plan.plans.values() for reasons in p.graph.why.values() for w in reasons]
    return {row for row in ROWS if any(w.startswith(row) for w in why)}


def check_gradients(options, size, recompute):
    model = make(options, size)
    twin = copy.deepcopy(model)
    flat = FlatParameters(model, together=TOGETHER)
    plan = TrainingUNet(model, flat, fused_reference, recompute)
    x, t = torch.randn(2, *size, 3).double(), torch.tensor([3, 700])
    labels = given(model)
    draws = {"rng": torch.tensor([5, 11]), "first": 7}
    y = plan(x, t, labels, **draws)
    expected = twin.forward_nhwc(x, t, labels, **draws)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    grads = flat.views(flat.grad)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-8, atol=1e-9, msg=name)
    return plan


def test_upsampled_inputs_may_be_kept_or_made_again(monkeypatch):
    """In a large batch they are made again, or not at all: the same numbers, in less memory."""

    def outcome() -> tuple[torch.Tensor, int]:
        model = make(MODELS["three_levels"])
        flat = FlatParameters(model, together=TOGETHER)
        made = []
        plan = TrainingUNet(model, flat, fused_reference)
        upsample = fused_reference.upsample
        monkeypatch.setattr(fused_reference, "upsample", lambda x: made.append(1) or upsample(x))
        torch.manual_seed(1)
        x, t = torch.randn(2, 8, 12, 3).double(), torch.tensor([3, 700])
        plan(x, t).square().sum().backward()
        monkeypatch.setattr(fused_reference, "upsample", upsample)
        return flat.grad.clone(), len(made)

    kept, once = outcome()
    monkeypatch.setattr(memory, "MUCH", 0)
    again, twice = outcome()
    assert twice == once + 1  # of two, that whose products are not made on the small image
    torch.testing.assert_close(kept, again, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("urgent", [True, False], ids=["urgent", "some are held"])
def test_says_how_far_backward_is(urgent, monkeypatch):
    """What is called complete does not change any more, and is ever more of the filters."""
    monkeypatch.setattr(streams, "LARGE", 0)
    model = make(MODELS["three_levels"] | {"num_res_blocks": 2})
    flat = FlatParameters(model, together=TOGETHER)
    seen = []

    def ready(start: int) -> None:
        seen.append((start, flat.grad.clone()))

    plan = TrainingUNet(model, flat, fused_reference, ready=ready, urgent=urgent)
    x, t = torch.randn(2, 8, 12, 3).double(), torch.tensor([3, 700])
    plan(x, t).square().sum().backward()
    starts = [start for start, _ in seen]
    assert starts == sorted(starts, reverse=True) and len(set(starts)) > (5 if urgent else 1)
    assert 0 < starts[-1] < flat.filters_end // 20  # all but the stem
    for start, grad in seen:
        part = slice(start, flat.filters_end)
        assert torch.equal(grad[part], flat.grad[part]) and grad[part].any()


def test_gradients_add_up_over_micro_batches():
    model = make(MODELS["three_levels"])
    flat = FlatParameters(model, together=TOGETHER)
    plan = TrainingUNet(model, flat, fused_reference)
    x, t = torch.randn(4, 8, 12, 3).double(), torch.arange(4)
    plan(x, t).square().sum().backward()
    whole = flat.grad.clone()
    flat.grad.zero_()
    for part in (slice(0, 1), slice(1, 4)):
        plan(x[part], t[part]).square().sum().backward()
    torch.testing.assert_close(flat.grad, whole)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_held_gradients_are_the_same(options, monkeypatch):
    """Some are made later, none twice or never: in networks of three levels. In others none is
    held, so that there is nothing to compare."""
    model = make(options, (16, 16))
    flat = FlatParameters(model, together=TOGETHER)
    x, t = torch.randn(2, 16, 16, 3).double(), torch.tensor([3, 700])
    draws = {"rng": torch.tensor([5, 11])}
    labels = given(model)
    more = parts_of(labels)
    context = () if more.context is None else (more.context[:, None], more.present)
    levels = len(model.channel_mult)
    held, grads = [], []
    for large in (2**40, 0) if levels >= 3 else (0,):
        monkeypatch.setattr(streams, "LARGE", large)
        plan = TrainingUNet(model, flat, fused_reference)
        moves = plan.plan_of(x, *context).schedule.backward
        held.append(sum(move.stream == THIRD for move in moves if move.nodes))
        if levels >= 3:
            flat.grad.zero_()
            plan(x, t, labels, **draws).square().sum().backward()
            grads.append(flat.grad.clone())
    if levels < 3:
        assert held == [0]
    else:
        assert held[0] == 0 and held[1] > 0 and torch.equal(*grads)


@pytest.mark.parametrize("name", ["three_levels", "guided_diffusion", "strided"])
def test_gradients_of_filters_are_written_once_they_are_forgotten(name):
    model = make(MODELS[name])
    flat = FlatParameters(model, together=TOGETHER)
    plan = TrainingUNet(model, flat, fused_reference)
    inputs = torch.randn(2, 3, 8, 12, 3).double()
    t = torch.tensor([3, 700, 5])
    options = {"labels": t % 3 if model.num_classes else None, "rng": torch.tensor([5, 11])}
    for x in inputs:
        plan(x, t, **options).square().sum().backward()
    twice = flat.grad.clone()
    for grad in flat.views(flat.grad).values():
        grad.fill_(torch.nan)
    plan.forget_gradients()
    for x in inputs:
        plan(x, t, **options).square().sum().backward()
    assert torch.equal(flat.grad, twice)


def test_which_kernels_overlap():
    """Those of the blocks, each by its images. The stem's filters are padded by the previous kernel
    of it."""
    model = make(MODELS["three_levels"])
    seen = []

    class Noting:
        def __getattr__(self, name: str):
            function = getattr(fused_reference, name)

            def noted(*arguments, **options):
                seen.append((name, dependent_launch._batch))
                return function(*arguments, **options)

            return noted if inspect.isfunction(function) else function

    plan = TrainingUNet(model, FlatParameters(model, together=TOGETHER), Noting())
    y = plan(torch.randn(2, 8, 12, 3).double(), torch.tensor([3, 700]))
    stem = [name for name, _ in seen].index("conv_forward")
    assert {pixels for _, pixels in seen[: stem + 1]} == {None}
    assert {pixels for _, pixels in seen[stem + 1 :]} == {2 * 8 * 12}
    seen.clear()
    y.sum().backward()
    assert dict(seen)["conv_input_grad"] is not None and seen[0][1] is None
    assert {pixels for _, pixels in seen} == {None, *(2 * 8 * 12 // 4**i for i in range(3))}


def test_nothing_is_dropped_outside_training():
    model = make(MODELS["dropout"]).eval()
    plan = TrainingUNet(model, FlatParameters(model, together=TOGETHER), fused_reference)
    x, t = torch.randn(2, 8, 12, 3).double(), torch.tensor([3, 700])
    torch.testing.assert_close(plan(x, t), model.forward_nhwc(x, t))


def test_dropout_without_a_seed_is_an_error():
    model = make(MODELS["dropout"])
    plan = TrainingUNet(model, FlatParameters(model, together=TOGETHER), fused_reference)
    with pytest.raises(ValueError, match="needs rng"):
        plan(torch.randn(2, 8, 12, 3).double(), torch.tensor([3, 700]))


def test_says_why_not():
    model = make(
        {"channel_mult": (1, 2), "model_channels": 18, "num_groups": 6, "num_head_channels": 6}
        | {"dropout": 0.1}
    )
    assert "18 channels" in TrainingUNet.refusal(model)
    assert TrainingUNet.refusal(torch.nn.Linear(2, 2)) is not None


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_covers_the_models_it_is_for(options):
    assert TrainingUNet.refusal(make(options)) is None


@pytest.mark.parametrize(
    ("options", "size", "planned"),
    [
        ({"model_channels": 64, "channel_mult": (1, 2, 3, 4)}, (64, 64), True),
        ({"model_channels": 64, "channel_mult": (1, 2, 3, 4)}, (56, 56), True),
        ({"model_channels": 64, "channel_mult": (1, 2, 2), "in_channels": 1}, (28, 28), True),
        ({"model_channels": 32, "channel_mult": (1, 2)}, (30, 330), True),
        ({"model_channels": 24, "channel_mult": (1, 2)}, (32, 32), True),
        ({"model_channels": 20, "channel_mult": (1,), "num_groups": 4}, (32, 32), True),
        (
            {"model_channels": 18, "channel_mult": (1,), "num_groups": 6, "dropout": 0.1},
            (32, 32),
            False,
        ),
    ],
    ids=[
        "unet64",
        "7x7",
        "one channel",
        "halves of 32",
        "24 channels",
        "20 channels",
        "dropout of 18",
    ],
)
def test_which_plan_trains(options, size, planned):
    backend = Backend("triton", triton_kernels, torch.float16, allow_tf32=True)
    heads = {"num_head_channels": options["model_channels"] // 2}
    model = make(options | heads, size).float()
    set_backend(model, backend)
    network = training_network(model, FlatParameters(model, together=TOGETHER))
    assert isinstance(network, TrainingUNet) == planned
    assert planned or isinstance(network, TrainingNetwork)


@pytest.mark.parametrize("tf32", [True, False])
def test_float32_is_planned(tf32, caplog):
    caplog.set_level("INFO")
    backend = Backend("triton", triton_kernels, torch.float32, allow_tf32=tf32)
    model = make({"channel_mult": (1,), "backend": backend}).float()
    network = training_network(model, FlatParameters(model, together=TOGETHER))
    assert isinstance(network, TrainingUNet) and not caplog.records


def test_says_that_there_is_nothing_to_recompute(caplog):
    model = make({"channel_mult": (1,)})  # computed by PyTorch
    flat = FlatParameters(model, together=TOGETHER)
    assert training_network(model, flat) == model.forward_nhwc and not caplog.records
    assert training_network(model, flat, recompute=True) == model.forward_nhwc
    assert "train.recompute has no effect" in caplog.text
