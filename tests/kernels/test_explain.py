"""What `python -m triton_kernels.explain` says."""

import dataclasses

import pytest
import torch

from triton_kernels.conv.configs import ConvOperands
from triton_kernels.conv.forward import spec_of
from triton_kernels.explain import main
from triton_kernels.explain_words import parse
from triton_kernels.registry.chips import CHIPS, chip
from triton_kernels.registry.spec import GRAD_TERMS, TERMS, AttentionSpec, ConvSpec

LINE = "conv forward 128x64x64 64->64 3x3 bf16 residual stats"


def test_words_become_a_spec():
    op, spec = parse("conv2d input_grad 8x16x20 192->320 1x1 fp16 first=128 mask drawn")
    assert op.name == "conv_input_grad"
    given = {"k": 192, "c": 320, "r": 1, "s": 1, "mask": True, "drawn": True}
    assert spec == ConvSpec(8, "fp16", 16, 20, first=128, activation="silu", **given)
    op, spec = parse("conv forward 8x16x20 192->320 3x3 fp16 extra=64 extra=32 emb stats")
    added = {"extra": (64, 32), "emb": True, "stats": True}
    assert op.name == "conv_forward" and spec == ConvSpec(8, "fp16", 16, 20, 192, 320, **added)
    assert str(spec) == "n=8 dtype=fp16 h=16 w=20 k=192 c=320 emb extra=(64,32) stats"


@pytest.mark.parametrize("term", [t for t in TERMS if getattr(ConvSpec, t) is False])
def test_each_term_of_an_epilogue_is_a_word(term):
    given = "input_grad" if term in GRAD_TERMS else "forward"
    words = "mask drawn" if term == "drawn" else term  # which is of a mask
    _, spec = parse(f"conv {given} 8x16x16 64->64 3x3 bf16 {words}")
    assert getattr(spec, term)


def test_a_weight_gradient_has_its_own_kernels(capsys):
    assert main(["conv weight_grad 32x64x64 64->64 3x3 bf16", "gpu=h100"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    (taken,) = (line for line in lines if line.startswith("  ->"))
    assert "measured" in taken and "splits=" in said.split(taken)[1].splitlines()[1]
    assert any("pointwise_wgrad" in line and "1x1 filters" in line for line in lines)


def test_public_convolutions_have_kernels_of_their_own(capsys):
    for line, kernel in (
        ("conv unfused forward 32x8x8 512->256 3x3 bf16", "tile_mma"),
        ("conv unfused forward 32x32x32 256->128 3x3 tf32", "tile_mma"),
        ("conv unfused forward 32x16x16 192->576 1x1 bf16", "unfused_"),
        ("conv unfused input_grad 32x8x8 768->256 3x3 fp32", "tf32x3"),
    ):
        assert main([line, "gpu=h200"]) == 0
        lines = capsys.readouterr().out.splitlines()
        (taken,) = (text for text in lines if text.startswith("  ->"))
        assert kernel in taken and "taken: " in taken
        assert any("tma_stride2" in text and "stride 2" in text for text in lines)
    assert main(["conv unfused forward 32x8x8 64->64 3x3 bf16", "gpu=a100"]) == 0
    assert "-> pointer" in capsys.readouterr().out
    assert main(["conv unfused forward 16x24x24 336->336 3x3 bf16 stride=2", "gpu=h100"]) == 0
    assert "odd sides and stride 1, not 3x3 of stride 2\n" in capsys.readouterr().out


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("which", "filters"), [("forward", 3), ("forward", 1), ("input_grad", 3)])
def test_specs_are_those_of_conv2d(which, filters, stride):
    grad = which == "input_grad"
    image, result = torch.empty(2, 6, 10, 64), torch.empty(2, 6 // stride, 10 // stride, 32)
    weight = torch.empty(32, 64, filters, filters)
    x, y = (result, image) if grad else (image, result)
    padding = filters // 2, filters // 2
    called = spec_of(ConvOperands(x, weight, None, y, stride, padding, "tf32", dgrad=grad))
    size, channels = "x".join(map(str, x.shape[:3])), f"{x.shape[3]}->{y.shape[3]}"
    words = f"conv unfused {which} {size} {channels} {filters}x{filters} stride={stride} tf32"
    _, spec = parse(words)
    assert dataclasses.replace(spec, filters=(32, 64)) == called


def test_norms_over_channels(capsys):
    op, spec = parse("channel_norm forward 2x8x16 192 bf16 silu centred")
    assert (op.name, spec.centred, spec.pixels) == ("channel_norm", True, 128)
    assert main(["channel_norm input_grad 32x64x64 128 bf16 silu", "gpu=h100"]) == 0
    assert "-> whole_rows" in capsys.readouterr().out
    assert main(["channel_norm weight_grad 2x8x8 16 bf16"]) == 2
    assert "choose forward or backward" in capsys.readouterr().err


def test_backward_is_a_word_where_there_is_one_pass():
    for line in (
        "attention {} 32x256 6x32 bf16",
        "attention {} 32x256 6x32 keys=78 bf16",
        "norm {} 2x8x16 192 bf16 silu",
        "channel_norm {} 2x8x16 192 bf16",
    ):
        op, spec = parse(line.format("backward"))
        assert (op, spec) == parse(line.format("input_grad")) and spec.grad
    with pytest.raises(ValueError, match="two backward passes; choose input_grad or weight_grad"):
        parse("conv backward 8x16x16 64->64 3x3 bf16")
    with pytest.raises(ValueError, match="choose forward$"):
        parse("stage backward 64x16 256->512 taps=5 bf16")


def test_strides(capsys):
    for line, kernel in (
        ("conv unfused forward 16x24x24 336->336 3x3 bf16 stride=2", "-> gather"),
        ("conv unfused forward 16x24x24 320->320 3x3 bf16 stride=2", "-> tma_stride2"),
        ("conv weight_grad 16x24x24 336->336 3x3 bf16 stride=2", "-> tma_stride2_wgrad"),
    ):
        assert main([line, "gpu=h100"]) == 0
        assert kernel in capsys.readouterr().out
    assert main(["conv forward 16x24x24 320->320 3x3 bf16 stride=2", "gpu=h100"]) == 2
    assert "unfused" in capsys.readouterr().err


def test_what_one_launch_may_do_as_well(capsys):
    """The kernels, and why launches one after the other are faster."""
    op, spec = parse("conv forward 16x8x8 192->192 3x3 bf16 op=conv_norm groups=24")
    assert (op.name, spec.groups) == ("conv_norm", 24)
    for line, said in (
        ("conv forward 16x8x8 192->192 3x3 bf16 op=conv_norm groups=24", "-> tile_mma"),
        ("conv forward 16x8x8 192->192 3x3 bf16 op=conv_norm", "several launches: tile_mma: 192"),
        ("conv forward 1x8x8 256->256 3x3 bf16 op=conv_split", "-> early_parts"),
        ("conv forward 128x8x8 256->256 3x3 bf16 op=conv_split", "several launches: 512 whole"),
        ("conv forward 16x64x64 64->64 3x3 bf16 op=norm_conv", "-> stationary_weights"),
    ):
        assert main([line, "gpu=h100"]) == 0
        assert said in capsys.readouterr().out
    assert main(["conv forward 16x8x8 64->64 3x3 bf16 op=all", "gpu=h100"]) == 2


def test_stages(capsys):
    for line, kernel, gpu in (
        ("stage forward 1x16 256->512 taps=5 bf16", "stage", "h100"),
        ("stage forward 64x16 256->512 taps=5 bf16 side batched", "whole", "h100"),
        ("stage forward 64x16 256->512 taps=5 bf16 side batched", "multiply", "a100"),
    ):
        assert main([line, f"gpu={gpu}"]) == 0
        assert f"-> {kernel} " in capsys.readouterr().out
    assert main(["stage input_grad 1x16 256->512 taps=5 bf16"]) == 2


def test_norms_and_attention(capsys):
    op, spec = parse("norm forward 16x32x32 192 first=128 tiles=4 tiles=16 bf16 silu")
    assert (op.name, spec.c1, spec.c2, spec.tiles) == ("norm_of_sums", 128, 64, (4, 16))
    op, spec = parse("attention input_grad 32x256 6x32 fp16")
    assert (op.name, spec) == ("attention_bwd", AttentionSpec(192, "fp16", 256, 32, grad=True))
    op, spec = parse("attention forward 32x256 6x32 keys=78 masked bf16")
    crossed = AttentionSpec(192, "bf16", 256, 32, keys=78, masked=True)
    assert (op.name, spec) == ("cross_attention", crossed)
    for line, kernel, gpu in (
        ("norm forward 128x64x64 64 bf16", "cluster", "h100"),
        ("norm input_grad 128x64x64 64 bf16", "cluster", "h100"),
        ("norm forward 128x64x64 64 bf16", "multi_pass", "a100"),
        ("norm forward 8x8x8 256 fp32 silu", "single_program", "rtx4090"),
        ("norm forward 16x32x32 128 tiles=4 bf16", "from_partials", "h100"),
        ("attention forward 32x256 6x32 bf16", "head", "h100"),
        ("attention forward 32x4096 8x64 bf16", "streamed", "h100"),
        ("attention forward 32x1024 5x64 bf16", "kept", "h100"),
        ("attention forward 32x1024 5x36 bf16", "tiles", "h100"),
        ("attention input_grad 32x256 6x32 bf16", "tiles", "a100"),
    ):
        assert main([line, f"gpu={gpu}"]) == 0
        lines = capsys.readouterr().out.splitlines()
        (taken,) = (text for text in lines if text.startswith("  ->"))
        assert f"-> {kernel}" in taken, lines


@pytest.mark.parametrize("gpu", CHIPS)
def test_every_kernel_is_there_and_one_is_taken(gpu, capsys):
    assert main([LINE, f"gpu={gpu}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    kernels = "tma", "pointer", "stationary_weights", "tile_mma", "narrow_output"
    assert all(any(name in line for line in lines) for name in kernels)
    assert sum("->" in line[:6] for line in lines) == 1
    said = [line for line in lines[3:] if line[5:6] != " "]  # and not what is folded under it
    assert all("no: " in line or "can" in line or "taken" in line for line in said)
    assert max(map(len, lines)) <= 100


def test_a_measured_row_is_named(capsys):
    main([LINE, "gpu=H200"])
    (taken,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  ->"))
    assert "stationary_weights" in taken and "measured" in taken


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["conv forward 128x64x64 64->64 3x3 bf16 residue"], "'residue' means nothing"),
        (["conv forward 8x8x8 64->64 bf16 residul"], "here; did you mean residual? valid: forward"),
        (["attention forward 8x64 6x32 bf16 keyz=3"], "did you mean keys=N? valid: forward"),
        (
            ["stage forward 8x64 6->32 bf16 x"],
            "NxN, N->N, taps=N, stride=N, side, transposed, batched",
        ),
        (["conv forward 64->64 3x3 bf16"], "128x64x64 is missing"),
        (["conv 8x8x8 64->64 bf16"], "the pass is missing"),
        ([LINE, "gpu=gtx1080"], "gpu=gtx1080 is unknown; choose one of h100"),
        ([], "usage"),
        (["pool forward 8x8x8 64"], "'pool' is no operation; choose one of conv"),
        (["norm forward 8x8x8 64 groups=24 bf16"], "64 channels are not divided by groups=24"),
        (["norm forward 8x8x8 64 groups=0 bf16"], "groups=0: numbers of at least 1 are expected"),
        (["norm forward 8x8x8 64 first=65 bf16"], "first=65 of 64 channels; expected fewer"),
        (["norm weight_grad 8x8x8 64 bf16"], "choose forward or backward"),
        (["norm forward 8x8x8 bf16"], "something like 128 is missing"),
        (
            ["norm forward 8x8x8 64 bf16 tiles=1 tiles=2"],
            "2 numbers of tiles=, and 1 tensors to norm",
        ),
        (["conv forward 0x8x8 64->64 bf16"], "0x8x8: numbers of at least 1 are expected"),
        (["conv forward 8x8x8 64->64 bf16 fp16"], "bf16 and fp16: one of these is too many"),
        (["conv forward 8x8x8 4x4x4 64->64 bf16"], "8x8x8 and 4x4x4: one of these is too many"),
        (["conv forward 8x8 64->64 3x3 bf16"], "8x8 and 3x3: one of these is too many"),
        (["conv forward input_grad 8x8x8 64->64 bf16"], "forward and input_grad: one of these"),
        (["conv forward 8x8x8 8->8 bf16 extra=8 extra=8 extra=8"], "extra=8: one of these is"),
        (
            ["conv input_grad 8x8x8 64->64 bf16 activation=sulu"],
            "activation=sulu is unknown; choose",
        ),
        (["conv input_grad 8x8x8 64->64 bf16 first=65"], "first=65 of 64 channels"),
        (["conv input_grad 8x8x8 64->64 bf16 drawn"], "no mask; give mask as well"),
        (
            ["conv forward 8x8x8 64->64 bf16 mask"],
            "mask is no term of forward; it has emb, residual",
        ),
        (["conv weight_grad 8x8x8 64->64 bf16 emb"], "emb is no term of weight_grad"),
        (["conv unfused forward 8x8x8 64->64 bf16 stats"], "stats is no term of unfused forward"),
        (["conv forward 8x8x8 64->64 bf16 groups=8"], "groups is no term of forward without op="),
        (["conv forward 8x8x8 64->64 bf16 op=conv_nrom"], "op=conv_nrom is unknown; choose one of"),
        (["conv weight_grad 8x8x8 64->64 bf16 op=conv_norm"], "op=conv_norm is forward"),
        (["stage forward 8x64 6->32 taps=3 stride=0 bf16"], "stride=0: numbers of at least 1"),
        (["attention forward 8x64 bf16"], "something like 6x32 is missing"),
        (["attention weight_grad 8x64 4x32 bf16"], "attention has no weights"),
        (["attention forward 8x64 4x32 bf16 masked"], "give keys=N as well"),
    ],
)
def test_what_is_not_understood_ends_with_2(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("conv forward 8x8x8 64->64 2x2 bf16", "not 2x2"),
        ("channel_norm forward 2x8x8 100000 bf16", "100000 channels; at most 8192"),
    ],
)
def test_what_no_kernel_can_do_has_the_reason_of_each_and_ends_with_1(words, reason, capsys):
    assert main([words]) == 1
    said = capsys.readouterr().out
    assert reason in said and "->" not in said.split(words)[1] and "Spec(" not in said


def test_help(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "the channels multiplied and those of the result" in out and "gpu: h100, " in out


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("h100_sxm5", "h100"),
        ("NVIDIA RTX A6000", "rtxa6000"),
        ("a6000", "rtxa6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),  # which has fewer multiprocessors
        ("6000", None),
        ("", None),
    ],
)
def test_chips_by_the_names_of_their_drivers(written, name):
    assert len({id(chip(known)) for known in CHIPS}) == len(CHIPS)
    if name is None:
        with pytest.raises(ValueError, match="is unknown; choose one of h100"):
            chip(written)
    else:
        assert chip(written) is CHIPS[name]
