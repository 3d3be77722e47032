"""The stages of a 1-D UNet at batch 1, against their twins in plain PyTorch."""

import pytest
import torch
from torch.nn.functional import conv1d, conv_transpose1d

from triton_kernels.conv1d import conv1d as stream_conv1d, weights, whole
from triton_kernels.conv1d.operands import Activation, Film, Norm, Stem, Sums
from triton_kernels.conv1d.stage_spec import StageSpec
from triton_kernels.conv1d.weights import pack_conv
from triton_kernels.hopper.descriptors import SUPPORTED
from triton_kernels.reference import conv1d as stream_reference
from triton_kernels.registry.choose import select
from triton_kernels.runtime.device import Device, describe
from triton_kernels.tf32 import rounded_to_tf32


@pytest.fixture(autouse=True)
def exact_reference(monkeypatch):
    """The reference on a GPU is float32 throughout."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def make(
    device,
    n,
    t,
    c,
    *,
    norm=None,
    film=None,
    residual=None,
    stem=False,
    splits=3,
    row=True,
    cond=True,
    last=False,
) -> Activation:
    """An activation of random parts, whose channels are the last dimension in memory if `last`."""

    def randn(*shape):
        return torch.randn(shape, device=device)

    def placed(*shape):
        return randn(*shape).mT.contiguous().mT if last else randn(*shape)

    x = randn(n, t, 3)
    source = Stem(x, randn(3, 5, c), randn(c)) if stem else Sums(placed(splits, n, c, t), randn(c))
    residuals = {
        "tensor": lambda: placed(n, c, t),
        "sums": lambda: Sums(placed(2, n, c, t), randn(c)),
        "stem": lambda: Stem(x, randn(3, 1, c), randn(c)),
        None: lambda: None,
    }
    columns = 16 + 2 * c  # this block's are not the first
    return Activation(
        source,
        None if norm is None else Norm(norm, randn(c), randn(c), 1e-5),
        None
        if film is None
        else Film(
            randn(4 if row else n, columns),
            randn(n, columns) if cond else None,
            16,
            film == "scale",
            torch.tensor([2], device=device) if row else None,
        ),
        residuals[residual](),
    )


INPUTS = {
    "plain": {},
    "norm": {"norm": 4},
    "norm of a group a slice": {"norm": 2, "splits": 1},
    "scale and shift of a row": {"norm": 4, "film": "scale"},
    "scale and shift by sample": {"norm": 4, "film": "scale", "row": False},
    "shift, unconditional": {"norm": 4, "film": "shift", "cond": False},
    "stem": {"stem": True, "norm": 4, "film": "scale"},
    "residual": {"norm": 4, "residual": "tensor"},
    "residual of sums": {"norm": 4, "residual": "sums"},
    "residual of a stem": {"norm": 4, "residual": "stem"},
}


@pytest.mark.parametrize(
    ("way", "t"),
    [("alone", 7), ("alone", 1), ("batched", 7), ("channels last", 7), ("channels last", 2)],
)
@pytest.mark.parametrize("options", INPUTS.values(), ids=INPUTS.keys())
def test_inputs(device, options, way, t):
    """The activation that a stage makes, and the convolution of it, of two samples. How a tile lies
    in a warp, and so which lanes a norm adds up, depends on its length and order."""
    torch.manual_seed(0)
    n, c, co = 2, 32, 16
    batched = way != "alone"
    activation = make(device, n, t, c, last=way == "channels last", **options)
    weight, side = torch.randn(co, c, 3, device=device), torch.randn(co, c, 1, device=device)
    conv = pack_conv(weight, side, torch.float32, slice_channels=16, block=16)
    expected = stream_reference.conv_stage(activation, conv, keep=True)
    ours = stream_conv1d.conv_stage(activation, conv, keep=True, batched=batched)
    assert relative(ours.kept, expected.kept) < 1e-5
    assert relative(ours.partial.sum(0), expected.partial.sum(0)) < 1e-5
    assert relative(ours.side.sum(0), expected.side.sum(0)) < 1e-5


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize("t", [1, 2, 3, 4, 8, 16])
def test_several_groups_in_a_slice(device, t, batched):
    """Whatever the length, and so the lanes that a group's numbers are in."""
    torch.manual_seed(0)
    activation = make(device, 2, t, 64, norm=8)
    weight = torch.randn(16, 64, 3, device=device)
    conv = pack_conv(weight, None, torch.float32, slice_channels=32, block=16)
    expected = stream_reference.conv_stage(activation, conv, keep=True)
    ours = stream_conv1d.conv_stage(activation, conv, keep=True, batched=batched)
    assert relative(ours.kept, expected.kept) < 1e-5


CONVS = {
    "1 tap": {"taps": 1},
    "5 taps, wider than the input": {"taps": 5, "t": 2},
    "7 taps, one a tile": {"taps": 7, "widest": 1},
    "9 taps": {"taps": 9},
    "stride 2": {"stride": 2},
    "stride 2, odd length": {"stride": 2, "t": 5},
    "transposed": {"transposed": True, "taps": 4, "co": 32},
    "skip connection": {"skip": True},
    "one position": {"t": 1},
}


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize("options", CONVS.values(), ids=CONVS.keys())
def test_convolutions(device, options, batched):
    torch.manual_seed(0)
    given = {
        "taps": 3,
        "stride": 1,
        "transposed": False,
        "t": 4,
        "co": 48,
        "skip": False,
        "widest": 4,
    }
    given |= options
    n, c, t, co, taps = 3, 32, given["t"], given["co"], given["taps"]
    activation = make(device, n, t, c)
    skip = torch.randn(n, 16, t, device=device) if given["skip"] else None
    ci = c if skip is None else c + 16
    shape = (ci, co, taps) if given["transposed"] else (co, ci, taps)
    conv = pack_conv(
        torch.randn(shape, device=device), None, torch.float32, slice_channels=16, block=16,
        stride=given["stride"], transposed=given["transposed"], widest=given["widest"],
    )  # fmt: skip
    expected = stream_reference.conv_stage(activation, conv, skip=skip)
    ours = stream_conv1d.conv_stage(activation, conv, skip=skip, batched=batched)
    assert ours.kept is None and ours.side is None
    assert ours.partial.shape[1:] == expected.partial.shape[1:]
    assert relative(ours.partial.sum(0), expected.partial.sum(0)) < 1e-5


def test_the_twin_against_pytorch():
    """Of which the kernels' order of weights is inverted."""
    torch.manual_seed(0)
    x = torch.randn(2, 32, 6, dtype=torch.float64)
    activation = Activation(Sums(x[None], torch.zeros(32, dtype=torch.float64)))
    for transposed, shape in ((False, (16, 32, 5)), (True, (32, 32, 4))):
        weight = torch.randn(shape, dtype=torch.float64)
        conv = pack_conv(
            weight, None, torch.float64, slice_channels=16, block=16, transposed=transposed
        )
        function = torch.nn.functional.conv_transpose1d if transposed else torch.conv1d
        options = {"stride": 2, "padding": 1} if transposed else {"padding": 2}
        y = stream_reference.conv_stage(activation, conv).partial[0]
        torch.testing.assert_close(y, function(x, weight, **options))


@pytest.mark.parametrize("n", [1, 3])
def test_head(device, n):
    torch.manual_seed(0)
    activation = make(device, n, 5, 32, norm=8)
    weight, bias = torch.randn(3, 32, device=device), torch.randn(3, device=device)
    expected = stream_reference.head(activation, weight, bias)
    assert relative(stream_conv1d.head(activation, weight, bias), expected) < 1e-5


@pytest.mark.parametrize(("r", "e", "f", "bias"), [(1, 5, 70, True), (17, 100, 64, False)])
def test_project(device, r, e, f, bias):
    torch.manual_seed(0)
    z = torch.randn(r, e, device=device)
    weight = torch.randn(f, -(-e // 64) * 64, device=device)
    weight[:, e:] = 0
    b = torch.randn(f, device=device) if bias else None
    expected = stream_reference.project(z, weight, b)
    assert relative(stream_conv1d.project(z, weight, b), expected) < 1e-5


def test_float16(device):
    """Rounded where it is multiplied, and nowhere else: as far from exact as the twin."""
    torch.manual_seed(0)
    activation = make(device, 1, 8, 32, norm=4, film="scale")
    weight = torch.randn(16, 32, 3, device=device)
    options = {"slice_channels": 16, "block": 16}
    exact = stream_reference.conv_stage(
        activation, pack_conv(weight, None, torch.float32, **options)
    ).partial.sum(0)
    conv = pack_conv(weight, None, torch.float16, **options)
    theirs = relative(stream_reference.conv_stage(activation, conv).partial.sum(0), exact)
    assert relative(stream_conv1d.conv_stage(activation, conv).partial.sum(0), exact) < 2 * theirs


def test_rounding_to_tf32():
    ulp = 2.0**-10  # of TF32 at 1
    x = torch.tensor([1.0, 1 + 0.49 * ulp, 1 + ulp / 2, -1 - ulp / 2, 0.0, torch.inf])
    expected = torch.tensor([1.0, 1.0, 1 + ulp, -1 - ulp, 0.0, torch.inf])
    assert torch.equal(rounded_to_tf32(x), expected)
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert rounded_to_tf32(nan).isnan().all()
    x = torch.randn(1000)
    error = (rounded_to_tf32(x) - x) / x
    assert error.abs().max() <= ulp / 2 and abs(error.mean()) < ulp / 20


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
def test_tf32_multiplies_rounded_operands(device, batched):
    """So that products of the tensor cores, which cut operands off, are exact."""
    torch.manual_seed(0)
    rounded = rounded_to_tf32
    activation = make(device, 2, 7, 32, norm=4, film="scale")
    weight = rounded(torch.randn(16, 32, 3, device=device))
    conv = pack_conv(weight, None, torch.float32, slice_channels=16, block=16)
    a = rounded(stream_reference.make(activation))
    expected = stream_reference.conv_stage(Activation(Sums(a[None], a.new_zeros(32))), conv)
    ours = stream_conv1d.conv_stage(activation, conv, batched=batched, allow_tf32=True)
    # activations are off by 1e-6, which makes the other of two neighbours nearer in one of the 448,
    # and each such moves the whole by 2^-10 / sqrt(448) = 5e-5
    assert relative(ours.partial.sum(0), expected.partial.sum(0)) < 1e-4
    exact = stream_reference.conv_stage(activation, conv)
    assert relative(ours.partial.sum(0), exact.partial.sum(0)) > 1e-4


def test_tf32_projects_rounded_operands(device):
    torch.manual_seed(0)
    rounded = rounded_to_tf32
    z, weight = torch.randn(3, 64, device=device), rounded(torch.randn(70, 64, device=device))
    expected = rounded(torch.nn.functional.mish(z)).double() @ weight.double().T
    assert relative(stream_conv1d.project(z, weight, allow_tf32=True), expected) < 1e-4


def test_a_skip_of_another_length():
    weight, side = torch.randn(16, 32, 3), torch.randn(16, 32, 1)
    with pytest.raises(ValueError, match="keeps the length"):
        pack_conv(weight, side, torch.float32, slice_channels=16, block=16, stride=2)


def test_weights_that_do_not_divide():
    with pytest.raises(ValueError, match="24 x 32 channels"):
        pack_conv(torch.randn(24, 32, 3), None, torch.float32, slice_channels=16, block=16)


# --- many samples on a Hopper GPU -----------------------------------------------------------------

H200 = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True)

# samples, length, channels in and out, taps, skip, stride, transposed; the cut, or None: as chosen
WHOLE = {
    "as chosen": (64, 4, 256, 128, 5, True, 1, False, None),
    "samples that do not fill a program": (5, 4, 128, 64, 5, True, 1, False, (8, 4, 2, 2)),
    "odd length": (9, 7, 128, 128, 5, False, 1, False, (8, 4, 1, 1)),
    "pieces of the length": (20, 8, 64, 64, 3, True, 1, False, (16, 2, 1, 1)),
    "one time a program": (17, 5, 128, 64, 5, False, 1, False, (32, 1, 2, 2)),
    "channels in two slots": (12, 4, 512, 64, 5, True, 1, False, (8, 4, 4, 2)),
    "1 tap": (8, 16, 64, 64, 1, False, 1, False, (8, 16, 1, 1)),
    "stride 2": (9, 8, 128, 64, 3, False, 2, False, (8, 2, 1, 1)),
    "stride 2, odd length": (20, 7, 128, 128, 5, False, 2, False, (16, 4, 2, 2)),
    "transposed": (9, 4, 128, 128, 4, False, 2, True, (8, 4, 1, 1)),
    "transposed, pieces of the length": (64, 8, 128, 64, 4, False, 2, True, (64, 2, 2, 2)),
}


def whole_case(device, precision, case):
    """(activation, packed convolution, its result and that of the 1x1 skip from operands as they
    are multiplied)."""
    n, t, c, co, taps, side, stride, transposed, _ = WHOLE[case]
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)

    def rounded(x):
        return rounded_to_tf32(x) if precision == "tf32" else x.to(dtype).float()

    activation = make(device, n, t, c, splits=1)  # its sum is the same float32 for everybody
    weight = rounded(torch.randn((c, co, taps) if transposed else (co, c, taps), device=device))
    skip = rounded(torch.randn(co, c, 1, device=device)) if side else None
    conv = pack_conv(
        weight, skip, dtype, slice_channels=32, block=32, transposed=transposed,
        stride=1 if transposed else stride,
    )  # fmt: skip
    a = rounded(stream_reference.make(activation)).double()
    options = {"stride": stride, "padding": 1 if transposed else taps // 2}
    expected = (conv_transpose1d if transposed else conv1d)(a, weight.double(), **options)
    return activation, conv, expected, conv1d(a, skip.double()) if side else None


def check_whole(precision, case, activation, conv, expected, expected_side):
    """Tensor cores cut a sum off where rounding would be right to half as much, in every product of
    16 terms, or of 8 of 32 bits; of float32 there are three."""
    cut = WHOLE[case][-1]
    options = {"batched": True, "allow_tf32": precision != "fp32"}
    ours = stream_conv1d.conv_stage(
        activation, conv, keep=True, **options, config=cut and whole.Cut(*cut)
    )
    terms = conv.taps * activation.shape[1]
    products = {"bf16": terms / 16, "fp16": terms / 16, "tf32": terms / 8, "fp32": 3 * terms / 8}
    limit = 1e-5 + products[precision] * 2**-24
    assert relative(ours.partial.sum(0), expected) < limit
    assert torch.equal(ours.kept, stream_reference.make(activation))
    if expected_side is not None:
        assert relative(ours.side.sum(0), expected_side) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "fp32"])
@pytest.mark.parametrize("case", WHOLE)
def test_whole(precision, case):
    device = torch.device("cuda")
    if not (SUPPORTED and describe(device).hopper):
        pytest.skip("for Hopper")
    activation, conv, *expected = whole_case(device, precision, case)
    assert conv.by_tap is not None
    for _ in range(3):
        check_whole(precision, case, activation, conv, *expected)


@pytest.mark.parametrize(
    ("precision", "case"),
    [
        ("tf32", "as chosen"),
        ("fp32", "odd length"),
        ("tf32", "1 tap"),
        ("fp32", "stride 2, odd length"),
        ("tf32", "transposed"),
        ("fp32", "transposed"),
    ],
)
def test_what_surrounds_whole(device, monkeypatch, precision, case):
    """The kernel is for Hopper. Something else stands in for it here: a product a tap."""

    def launch(a, weight, partial, side, shape, cut, *, overlap):
        a = a.double().unflatten(2, (shape.parts, -1)).sum(2)
        t = a.shape[1]
        times = torch.arange(shape.positions, device=a.device)
        out = partial.double().zero_()
        for i, w in enumerate(weight[: shape.taps].double()):
            for odd, rows in enumerate(w.chunk(2) if shape.transposed else (w,)):
                if shape.transposed:
                    at = times + i * (2 * odd - 1)
                else:
                    at = times * shape.stride + i - shape.taps // 2
                seen = a[:, at.clamp(0, t - 1)] * ((at >= 0) & (at < t))[:, None]
                out[0, :, odd :: 1 + shape.transposed] += seen @ rows.T
        partial.zero_()
        partial[0] = out[0]
        if side is not None:
            side.zero_()
            side[0] = a @ weight[shape.taps].double().T

    monkeypatch.setattr(whole, "launch", launch)
    monkeypatch.setattr(whole, "SUPPORTED", True)
    for module in (stream_conv1d, weights):
        monkeypatch.setattr(module, "describe", lambda _: H200)
    activation, conv, *expected = whole_case(device, precision, case)
    assert conv.by_tap is not None
    check_whole(precision, case, activation, conv, *expected)


@pytest.mark.parametrize("n", [4, 8, 64, 1000])
@pytest.mark.parametrize("dtype", ["bf16", "tf32", "fp32"])
def test_cuts_fit(n, dtype):
    """Every convolution of the published network finds one."""
    for rows, channels, taps, side, stride, transposed, t in (
        (256, 256, 5, False, 1, False, 16), (512, 256, 5, True, 1, False, 8),
        (1024, 1024, 5, False, 1, False, 4), (512, 2048, 5, True, 1, False, 4),
        (256, 1024, 5, True, 1, False, 8), (1024, 512, 2, False, 1, True, 4),
        (512, 512, 3, False, 2, False, 8),
    ):  # fmt: skip
        shape = StageSpec(
            n, dtype, t, rows, channels, taps, side, stride, transposed, batched=True, by_tap=True
        )  # fmt: skip
        choice = select(stream_conv1d.CONV_STAGE, shape, H200)
        assert choice.kernel.name == "whole"
        cut = choice.config
        assert channels % (cut.blocks * shape.width) == 0
        assert cut.samples % 8 == 0 and 16 <= cut.samples * cut.times <= (128 if side else 256)
        assert whole.splits(shape, cut) * cut.blocks * shape.width == channels


def test_parts_of_an_activation_in_two_orders():
    activation = make(torch.device("cpu"), 2, 4, 32, residual="tensor")
    conv = pack_conv(torch.randn(16, 32, 3), None, torch.float32, slice_channels=16, block=16)
    with pytest.raises(ValueError, match="order of dimensions"):
        stream_conv1d.conv_stage(
            activation._replace(residual=activation.residual.mT.contiguous().mT), conv
        )
