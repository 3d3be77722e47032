"""Which launches an evaluation of unet64 is, as predicted without a GPU. In a process without the
interpreter, which has no kernels of Hopper."""

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.run import run

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import json, torch
from diffusion.plan.__main__ import example
from diffusion.plan.sampling_plan import sampling_plan
from diffusion.plan.printed.flops import flops_of
from diffusion.plan.printed.kernels import launched
from diffusion.plan.step.network import step_kernels
from triton_kernels.registry.chips import chip

found = {}
for key, batch, precision, name in (
    (1, 1, "bf16", "h200"), (16, 16, "bf16", "h200"), ("tf32", 1, "tf32", "h200"),
    ("fp32", 1, "fp32", "h200"), ("a100", 1, "bf16", "a100"),
):
    network, args, _ = example("unet64", batch, "", precision)
    shape, cpu, gpu = torch.Size((batch, 64, 64, 3)), torch.device("cpu"), chip(name)
    ops = step_kernels(network.backend)
    made = sampling_plan(network.eval(), shape, cpu, ops, 0, gpu.gpu)
    nodes = [n for n in made.schedule.nodes if n not in made.schedule.fixed and n.op != "columns"]
    kernels = launched(made, gpu, ops)
    found[key] = {
        "ops": made.graph.count(),
        "launches": sum(len(names) for n in nodes for names in [kernels[n].kernels]),
        "blocks": [[n.op, n.source.split(" of ")[-1], *kernels[n].kernels] for n in nodes],
        "flops": sum(map(flops_of, nodes)) / batch / network.flops_per_image,
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    code, out, err = run("-c", CODE)
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("batch", "launches"), [("1", 137), ("16", 102), ("tf32", 147), ("fp32", 171)]
)
def test_number_of_launches(found, batch, launches):
    """Without what depends on parameters or timesteps alone, and the first: it makes the image."""
    assert found[batch]["launches"] == launches


def test_ops_of_an_evaluation_of_sixteen_images(found):
    expected = {
        "conv_few": 33,
        "conv_norm": 14,
        "conv_upsampled": 3,
        "norm_conv": 7,
        "norm_of_sums": 25,
        "norm_upsampled": 3,
        "norm_single_cta": 2,
        "projected_attention": 11,
    }
    ops = found["16"]["ops"]
    assert {op: count for op, count in ops.items() if op in expected} == expected
    assert set(ops) - set(expected) == {"avg_pool", "cast", "columns", "pad", "reshape", "slice",
                                        "upsampled_filters"}  # fmt: skip


def test_a_residual_block(found):
    """Of large images the norms are made by the convolutions that read them, of the smallest by
    those that write what they read; of one image they add the parts of a convolution."""

    def block(batch, name):
        return [row for row in found[batch]["blocks"] if row[1].startswith(name)]

    assert [row[0] for row in block("16", "input_blocks.1.0")] == ["norm_conv", "norm_conv"]
    # behind an attention
    ops = [row[0] for row in block("16", "input_blocks.8.0")]
    assert ops == ["norm_of_sums", "conv_few"] * 2
    ops = [row[0] for row in block("16", "input_blocks.11.0")]
    assert ops == ["norm_of_sums", "conv_norm", "conv_norm"]
    ops = [row[0] for row in block("1", "input_blocks.1.0")]
    assert ops == ["norm_of_sums", "conv_few", "norm_of_sums", "conv_few"]
    ops = [row[0] for row in block("1", "input_blocks.10.0")]
    assert ops == ["norm_single_cta", "conv_split", "norm_single_cta", "conv_split"]


@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_a_residual_block_of_one_image_in_32_bits(found, precision):
    """As in 16 bits; sums of 32x32 pixels, too many for the norm that follows, are added before."""

    def block(name):
        return [row[0] for row in found[precision]["blocks"] if row[1].startswith(name)]

    assert block("input_blocks.1.0") == ["norm_of_sums", "conv_few"] * 2
    assert block("input_blocks.5.0")[:3] == ["norm_of_sums", "conv_split", "sum_parts"]
    assert block("input_blocks.10.0") == ["norm_single_cta", "conv_split"] * 2


def test_a_residual_block_of_one_image_without_tma(found):
    """In parts, too, through pointers."""
    block = [row for row in found["a100"]["blocks"] if row[1].startswith("input_blocks.10.0")]
    assert [row[0] for row in block] == ["norm_single_cta", "conv_split"] * 2
    assert [row[2] for row in block[1::2]] == ["conv_pointer_forward_kernel"] * 2


NUMBERS = """
import json, torch
from diffusion.plan.build import plan
from diffusion.plan.printed.kernels import launched
from tests.plan.strangers import SumsOfOneVariance
from triton_kernels import fused_ops
from triton_kernels.registry.chips import chip

found = []
for gpu, images, side in (
    ("h200", 1, 16), ("h200", 64, 16), ("h200", 16, 64), ("a100", 1, 16), ("rtx5090", 16, 64)
):
    x, emb = torch.empty(images, 3, side, side).bfloat16(), torch.empty(images, 6).bfloat16()
    for number in (1, 0.5**0.5):
        network = SumsOfOneVariance(64, 6, number).bfloat16().eval()
        made = plan(network, (x, emb), kernels=(fused_ops, chip(gpu).gpu))
        kernels = launched(made, chip(gpu), fused_ops)
        of_nodes = [[n.op, "factor" in n.attrs, *kernels[n].kernels] for n in made.schedule.nodes]
        found.append([row for row in of_nodes if row[0] != "upsample"])
print(json.dumps(found))
"""


def test_a_number_behind_a_sum_is_no_launch():
    """An evaluation launches what it launches without the number, on any GPU."""
    code, out, err = run("-c", NUMBERS)
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    scaled = set()
    for plain, times in zip(found[::2], found[1::2], strict=True):
        assert [[op, *kernels] for op, _, *kernels in times] == [
            [op, *kernels] for op, _, *kernels in plain
        ]
        assert sum(is_scaled for _, is_scaled, *_ in times) == 8
        scaled |= {op for op, is_scaled, *_ in times if is_scaled}
    assert scaled >= {"conv_few", "conv_norm", "norm_conv", "norm_single_cta"}


def test_products(found):
    """As many as the model counts, or fewer: what is upsampled is multiplied on the small image."""
    assert found["1"]["flops"] == pytest.approx(1.0046, abs=1e-4)  # the stem has 16 channels
    assert 0.8 < found["16"]["flops"] < 0.95


# of blocks without a concat, with 16 images on an H100: by pixels, as docs/design.md writes them
ONE, INLINE = "(table pass), conv; twice", "input gradient, (coefficients dx); twice"
APART = "input gradient, coefficients, dx; twice"
TRAINING = {
    "input_blocks.1.0": ("64x64", "(table pass), conv, table, pass, conv", APART),
    "input_blocks.5.0": ("32x32", ONE, APART),
    "input_blocks.8.0": ("16x16", ONE, INLINE),
    "input_blocks.11.0": ("8x8", ONE, INLINE),
}
KERNELS = {
    "table": "norm_table_kernel",
    "pass": "norm_apply_kernel",
    "(table pass)": "norm_apply_kernel",
    "coefficients": "norm_grad_table_kernel",
    "dx": "norm_dx_kernel",
    "(coefficients dx)": "norm_dx_inline_kernel",
}


def test_a_residual_block_in_training():
    """What docs/design.md lets its readers predict."""
    settings = ["model=unet64", "batch=16", "mode=train", "gpu=h100"]
    code, out, err = run("-c", f"from diffusion.plan.__main__ import main; main({settings})")
    assert code == 0, err
    page = (ROOT / "docs" / "design.md").read_text()
    ops = ("norm", "conv_fused"), ("conv_input_grad", "norm_backward")
    for block, (pixels, *passes) in TRAINING.items():
        (row,) = re.findall(rf"^\| [^|]*\b{pixels}\b.*$", page, re.MULTILINE)
        entries = [e for e in re.split(r"\n(?=\d+ )", out) if f" {block}." in e]
        for words, mine in zip(passes, ops, strict=True):
            said, _, times = words.partition("; ")
            assert said in row or "the same" in row, row
            names = said.split(", ") * (2 if times else 1)
            nodes = [e for e in entries if re.match(rf"\d+ +({'|'.join(mine)})\d+ ", e)]
            found = [kernel for e in nodes for kernel in re.findall(r"\w+_kernel\b", e)]
            assert [name if name.startswith("norm") else "conv" for name in found] == [
                KERNELS.get(name, "conv") for name in names
            ], block


def test_the_worked_example_of_the_page():
    """docs/plan.md: the nodes of a block, and what each launches."""
    page = (ROOT / "docs" / "plan.md").read_text()
    section = page.split("### A worked example")[1].split("\n**")[0]
    (settings,) = re.findall(r"`python -m diffusion.plan ([^`]+)`", section)
    code, out, err = run(
        "-c", f"from diffusion.plan.__main__ import main; main({settings.split()})"
    )
    assert code == 0, err
    said = []
    for node, launches in re.findall(r"^\| (\w+)[^|]* \| ([^|]*) \|", section, re.MULTILINE)[1:]:
        kernels = re.findall(r"\w+_kernel\b", launches) * (2 if "each twice" in launches else 1)
        said.append((node, [kernel.lstrip("_") for kernel in kernels]))
    printed = []
    for entry in re.split(r"\n(?=\d+ )", out)[1:]:
        head = re.split(r"\n {5}\w", entry)[0]  # without the registry's answers
        op = re.match(r"\d+ +([a-z_]+)\d+ ", head)[1]
        printed.append((op, re.findall(r"\w+_kernel\b", head)))
    assert sorted(printed) == sorted(said)
