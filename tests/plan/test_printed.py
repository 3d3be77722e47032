"""The page says what would run, without a GPU; wrong settings are named."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from diffusion.errors import ConfigError
from diffusion.plan.__main__ import _page, changes, example, main, settings
from diffusion.plan.build import plan
from diffusion.plan.printed.flops import flops_of
from diffusion.plan.printed.page import lines
from tests.end_to_end.run import run
from tests.plan.pages_of_steps import STEPS
from triton_kernels.registry.chips import chip, floor

OWN = Path(__file__).resolve().parents[2] / "examples"

ROOT = Path(__file__).resolve().parents[2]


def pages(*calls: list[str]) -> list[str]:
    """What the command prints. In a process without the interpreter, which has no kernels."""
    script = (
        f"from diffusion.plan.__main__ import main\nfor call in {calls!r}: main(call), print('=')"
    )
    code, out, err = run("-c", script)
    assert code == 0, err
    return out.split("=\n")


def nodes_of(page: str) -> list[str]:
    """A text for each, of the lines that begin with its number and of what is under it."""
    table = page.split("\n\n")[0]
    return re.split(r"\n(?=\d)", table)[1:]


def test_kernels_of_a_training_step_and_of_a_gpu_without_tma(tmp_path):
    picture = tmp_path / "new" / "plan.png"
    tiny = ["model=unet_tiny", "batch=2", "size=16"]
    train, other, _ = pages(
        [*tiny, "mode=train", "gpu=h100", f"out={picture}"], [*tiny, "gpu=a100"]
    )
    assert max(map(len, train.splitlines())) <= 100
    nodes = nodes_of(train)
    blocks = [node for node in nodes if node.split()[1].startswith("conv_fused")]
    assert blocks and all("_kernel" in node and "(models/layers.py:" in node for node in blocks)
    assert "residual and 1x1 skip in the epilogue" in train.split("rewrites:")[1]
    weights = [node for node in nodes if node.split()[1].startswith("conv_dw")]
    assert weights and all("wgrad" in node for node in weights)
    rows = train.splitlines()
    for said in ("forward: ", "backward: ", "parameters (once", "memory: ", "timeline: "):
        assert any(row.startswith(said) for row in rows), said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "conv_pointer_forward_kernel" in other and "tma" not in other and "tma" in train


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("gpu=h999", "gpu=h999 is unknown; choose one of h100"),
        ("gpu=t4", "the kernels are for compute capability 8.0 and later"),
        ("model=unet65", "model=unet65 is unknown; choose one of adm64"),
        ("batch=0", "batch=0 is no whole number"),
        ("context=77", "context=77; expected TOKENSxNUMBERS, such as 77x768"),
        ("mode=", "mode= is unknown; choose one of train, sample"),
        ("precision=fp8", "precision=fp8 is unknown; choose one of"),
        ("recompute=yes", "recompute=yes is unknown; choose one of true, false"),
        ("recompute=true", "recompute=true is for mode=train of a UNet of images"),
        ("colour=red", "colour=red is unknown; give model=..."),
        (f"model={OWN}/none.py:make", "none.py does not exist"),
        (f"model={OWN}/own_module.py:mak", "own_module.py has no function mak"),
        (
            f"model={OWN}/own_module.py:Block",
            "a function of the number of images (missing",
        ),
        ("model.widht=96", "model.widht=96: unet64 has model_channels"),
        ("model.model_channels=[96", "[96 is no value of YAML"),
        ("model.num_groups=7", "num_groups=7 does not divide"),
        ("model.name=other", "model.name=other: unet64 has model_channels"),
        ("batch=1000000000000", "memory does not suffice for batch=1000000000000; take less"),
        ("out=plan.docx", "out=plan.docx is no picture; it ends in ."),
        (f"out={__file__}/plan.png", "test_printed.py is a file, expected a folder"),
    ],
)
def test_wrong_settings(argument, said):
    with pytest.raises(ConfigError) as error:
        main([argument])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_a_module_launches_and_why():
    """All launches of a residual block, forward and backward, and the registry's answer to each; of
    one node by its name; a name that is nearly right."""
    of = ["model=unet64", "batch=128", "mode=train", "gpu=h100"]
    script = "from diffusion.plan.__main__ import main\n"
    block, node = (f"main({[*of, f'node={n}']!r})" for n in ("input_blocks.5.0", "conv_fused8"))
    code, out, err = run("-c", f"{script}{block}; print('='); {node}; {block[:-3]}1'])")
    assert code == 1 and "node=input_blocks.5.01 is no module that launches, nor a node" in err
    assert "did you mean input_blocks.5.0" in err
    block, node = out.split("=\n", 1)
    assert max(map(len, block.splitlines())) <= 100 and "Spec(" not in block
    nodes = nodes_of(block)
    names = [re.sub(r"\d+$", "", text.split()[1]) for text in nodes]
    forward = ["norm", "conv_fused", "norm", "conv_fused"]
    assert names[:4] == forward and Counter(names[4:]) == Counter(
        {"conv_input_grad": 2, "norm_backward": 2, "conv_dw": 1, "bias_grad": 1}
    )
    launching = [text for text in nodes if "_kernel" in text]
    assert len(launching) == 9
    assert all(
        text.count("\n       -> ") == text.count(": n=128 dtype=bf16") > 0 for text in launching
    )
    assert "stationary_weights   no: rows of 32 pixels; it takes 64" in block
    (only,) = nodes_of(node)
    assert only.split("rewrites")[0] == nodes[1].split("rewrites")[0]


def test_a_network_of_ones_own():
    given = ["model.model_channels=24", "model.num_groups=8", "batch=2"]
    model, (x, *_), _ = example(
        "unet_tiny", 2, "16", "bf16", channels="5", **changes("unet_tiny", given)
    )
    assert x.shape == (2, 5, 16, 16) and model.out_channels == 5
    assert model.state_dict()["input_blocks.0.0.weight"].shape[:2] == (24, 5)


@pytest.mark.long
def test_random_networks_have_launches():
    """On GPUs that are not here, in every precision: launchers get what their kernels have."""
    code, out, err = run("-m", "tests.plan.pages_of_networks")
    assert code == 0, err
    assert not out, out


@pytest.fixture(scope="module")
def steps():
    code, out, err = run("-m", "tests.plan.pages_of_steps")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize(("precision", "context"), STEPS)
def test_the_page_of_a_step_is_what_training_launches(steps, precision, context):
    """Of the kernels of a step, which a rehearsal records, those of the network, in their order."""
    paged, both = steps[f"{precision} {context}"]
    launched = both[: len(both) // 2]  # of two steps
    rest = iter(launched)
    assert len(paged) > 100 and all(kernel in rest for kernel in paged)
    of_attention = "attention_fwd_kernel", "attention_few_keys_fwd_kernel"
    attends = [name for name in paged if name.startswith(of_attention)]
    assert len(attends) == (8 if context else 4)
    others = Counter(launched) - Counter(paged)  # data, noise, loss, norm of the gradient, update
    assert not any("conv" in name or "norm_apply" in name for name in others)


def test_floors():
    """Products are those that the model counts, and those of channels of zeros that the stem reads;
    time is at least that of memory and of products."""
    network, args, _ = example("unet_tiny", 3, "16", "bf16")
    made = plan(network.eval(), args)
    counted = sum(map(flops_of, made.schedule.nodes))
    zeros = 2 * 16 * 16 * network.model_channels * 9 * (16 - 3)
    assert counted == 3 * (network.flops_per_image + zeros)
    gpu = chip("h200")
    for line in lines(made, gpu):
        assert line.floor_us >= 1e6 * line.bytes / gpu.copies * 0.999
        assert line.floor_us >= 1e6 * line.flops / gpu.products * 0.999


def test_products_of_four_bytes_take_twice_as_long():
    gpu = chip("h200")
    assert floor(gpu, 1e12, 0, 4) == 2 * floor(gpu, 1e12, 0)
    network, args, _ = example("unet32", 8, "32", "fp32")
    of_products = [line for line in lines(plan(network.eval(), args), gpu) if line.flops > 1e9]
    bound = [
        line for line in of_products if 2 * line.flops / gpu.products > line.bytes / gpu.copies
    ]
    assert bound
    for line in bound:
        assert line.floor_us == pytest.approx(2e6 * line.flops / gpu.products)


def test_a_policy_has_a_page(capsys):
    """Of what it runs in real time."""
    main(["model=unet1d_small", "batch=2"])
    page = capsys.readouterr().out
    assert "forward: " in page and " stage18 " in page and " head1 " in page
    assert "every block's FiLM, once for the observations" in page
    assert "with the norm, residual, skip connection in front of it" in page


def test_a_policy_trains_in_flat_buffers():
    """As by train.py, where most filters are read in 16 bits as they lie: accelerate's plan casts
    all of them."""
    given = settings(["model=unet1d", "batch=4", "mode=train"])
    found = _page(given, {}, chip("h200"))
    network, *_ = example("unet1d", 4, "", "bf16")
    numbers = sum(p.numel() for p in network.parameters())
    cast = sum(line.bytes for line in found.lines if line.pass_ == "parameters")
    assert {"forward", "backward"} <= {line.pass_ for line in found.lines}
    assert cast < 0.5 * 4 * numbers


def test_a_module_of_the_users(capsys):
    """Of `accelerate`: the same page for the network whether it is planned here or there."""
    model = f"model={OWN}/own_module.py:make"
    for mode in ("train", "sample"):
        main([model, "batch=2", f"mode={mode}", "gpu=a100"])
    train, sample = capsys.readouterr().out.split("memory: ")[:2]
    assert "backward: " in train and "conv_dw" in train and "OwnUNet" not in sample
    assert "backward: " not in sample and "conv" in sample
    for wrong, said in (
        ("size=32", "size=32: the arguments of"),
        ("model.c=32", "own_module.py:make has no settings"),
    ):
        with pytest.raises(ConfigError, match=said):
            main([model, wrong])


MIXES = """
import torch
from torch import nn

class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.time = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(4, 8, 1)

    def forward(self, x, t):
        angles = torch.outer(t, torch.arange(4.0, device=t.device))
        return self.conv(x) + self.time(angles.cos()[:, :, None, None])

def make(batch):
    return Timed(), (torch.randn(batch, 3, 8, 8), torch.rand(batch))
"""


def test_a_module_that_mixes_types_is_evaluated_under_autocast(capsys, tmp_path):
    (tmp_path / "timed.py").write_text(MIXES)
    main([f"model={tmp_path}/timed.py:make", "batch=2", "mode=sample"])
    first, *page = capsys.readouterr().out.splitlines()
    assert first.startswith("under autocast, since in bfloat16 Timed cannot be traced: ")
    assert "timed.py:12 of time" in first and any("conv" in line for line in page)
    main([f"model={OWN}/own_module.py:make", "batch=2", "mode=sample"])
    assert "under autocast" not in capsys.readouterr().out


def test_a_step_that_accelerate_plans(capsys):
    """As train.py does, where a `UNet` has no plan of its own."""
    channels = ("model_channels=18", "num_groups=6", "num_head_channels=18", "dropout=0.1")
    main(["model=unet_tiny", "batch=2", "size=8", "mode=train", *(f"model.{o}" for o in channels)])
    page = capsys.readouterr().out
    assert "backward: " in page and "dropout" in page


def test_defaults():
    assert settings([])["model"] == "unet64"
