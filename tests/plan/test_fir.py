"""Convolutions of channels by known numbers are FIR filters; those of blocks, means and copies."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion.plan.trace import trace
from tests.plan.test_transposed import BUDGET, difference

SMOOTH = torch.outer(torch.tensor([1.0, 3.0, 3.0, 1.0]), torch.tensor([1.0, 2.0, 3.0, 2.0])) / 64


class Filtered(nn.Module):
    """Each channel, as NVIDIA's EDM has it, or as an image of its own, as StyleGAN2's ops have."""

    def __init__(self, filters: Tensor, transposed=False, alone=False, **how) -> None:
        super().__init__()
        self.register_buffer("filters", filters)
        self.first, self.how = nn.Conv2d(4, 4, 1), how
        self.transposed, self.alone = transposed, alone

    def forward(self, x):
        x = self.first(x)
        filters = self.filters[None, None].to(x.dtype)
        if self.alone:
            y = F.conv2d(x.reshape(-1, 1, *x.shape[2:]), filters, **self.how)
            return y.reshape(*x.shape[:2], *y.shape[2:])
        op = F.conv_transpose2d if self.transposed else F.conv2d
        return op(x, filters.tile(x.shape[1], 1, 1, 1), groups=x.shape[1], **self.how)


@pytest.mark.parametrize(
    ("op", "filters", "how"),
    [
        ("fir", SMOOTH, {"stride": 2, "padding": 1}),
        ("fir", SMOOTH, {"stride": 1, "padding": 1}),
        ("fir", SMOOTH, {"stride": 2, "padding": 1, "transposed": True}),
        ("fir", SMOOTH, {"stride": 2, "output_padding": 1, "transposed": True}),
        ("fir", SMOOTH, {"stride": 3, "transposed": True}),
        ("fir", SMOOTH, {"padding": 2, "alone": True}),
        ("fir", SMOOTH, {"stride": 2, "padding": 1, "alone": True}),
        ("fir", torch.ones(2, 2), {"stride": 2, "padding": 1}),
        ("avg_pool", torch.ones(2, 2) / 4, {"stride": 2}),
        ("avg_pool", torch.full((1, 3), 1 / 3), {"stride": (1, 3)}),
        ("upsample", torch.ones(3, 1), {"stride": (3, 1), "transposed": True}),
        ("upsample", torch.ones(2, 2), {"stride": 2, "transposed": True}),
    ],
)
def test_of_known_numbers(op, filters, how):
    module, x = Filtered(filters, **how), torch.randn(2, 4, 8, 7)
    ops = trace(module, (x,)).graph.count()
    assert ops[op] == 1 and not {"conv", "conv_dx", "arith"} & set(ops)
    assert difference(module, x) < BUDGET


OTHERS = {
    "of their own for each channel": (torch.stack([SMOOTH * k for k in range(1, 5)]), 2),
    "a stride of their own for rows": (SMOOTH.expand(4, 4, 4), (1, 2)),
    "too many numbers": (torch.full((4, 5, 13), 1 / 65), 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_not(name):
    each, stride = OTHERS[name]

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("filters", each[:, None].clone())
            self.first = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return F.conv2d(self.first(x), self.filters, stride=stride, groups=4)

    x = torch.randn(2, 4, 8, 15)
    assert "fir" not in trace(Own(), (x,)).graph.count()
    assert difference(Own(), x) < BUDGET


class Spread(nn.Module):
    """Zeros between and around pixels, a filter over channels that are images, and every so many
    pixels of that, as StyleGAN2's ops do it without kernels of their own."""

    def __init__(self, up: int, down: int, before: int, behind: int) -> None:
        super().__init__()
        self.up, self.down, self.pads = up, down, (before, behind) * 2
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))

    def forward(self, x):
        x = self.convs[0](x)
        n, c, h, w = x.shape
        z = F.pad(x.reshape(-1, h, 1, w, 1, 1), (0, 0, 0, self.up - 1, 0, 0, 0, self.up - 1))
        z = F.pad(z.view(-1, h * self.up, w * self.up, 1), (0, 0, *self.pads))
        y = F.conv2d(z.permute(0, 3, 1, 2), torch.tensor(SMOOTH.tolist()).to(x)[None, None])
        y = y.permute(0, 2, 3, 1)[:, :: self.down, :: self.down]
        return self.convs[1](y.reshape(n, c, *y.shape[1:3]))


@pytest.mark.parametrize(
    ("up", "down", "before", "behind"),
    [(1, 1, 2, 1), (2, 1, 2, 1), (1, 2, 1, 1), (3, 1, 0, 4), (2, 3, 2, 2)],
)
def test_zeros_and_what_is_left_out_belong_to_the_filter(up, down, before, behind):
    module, x = Spread(up, down, before, behind), torch.randn(2, 4, 8, 7)
    graph = trace(module, (x,)).graph
    (fir,) = (node for node in graph.nodes if node.op == "fir")
    assert (fir.attrs["up"], fir.attrs["down"]) == (up, down) and fir.out.shape[3] == 4
    assert fir.attrs["start"] == (before, before) and "pad" not in graph.count()
    assert graph.count()["layout"] == 2, "of the input and the output"
    assert difference(module, x) < BUDGET


class Mirrored(nn.Module):
    """As k-diffusion and diffusers' K blocks resample: mirrored pixels around the image, and a
    filter of all channels, which multiplies each channel alone."""

    def __init__(self, pads, transposed=False, beside=0.0, **how) -> None:
        super().__init__()
        self.register_buffer("kernel", SMOOTH)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))
        self.pads, self.transposed, self.beside, self.how = pads, transposed, beside, how

    def forward(self, x):
        x = F.pad(self.convs[0](x), self.pads, "reflect")
        weight = x.new_zeros(4, 4, *self.kernel.shape)
        channels = torch.arange(4, device=x.device)
        weight[channels, channels] = self.kernel.to(weight)[None].expand(4, -1, -1)
        weight[0, 1] = self.beside
        op = F.conv_transpose2d if self.transposed else F.conv2d
        return self.convs[1](op(x, weight, **self.how))


@pytest.mark.parametrize(
    ("how", "start"),
    [
        ({"pads": (1, 1, 1, 1), "stride": 2}, (1, 1)),
        ({"pads": (1, 1, 1, 1), "stride": 2, "padding": 3, "transposed": True}, (2, 2)),
        ({"pads": (1, 1, 1, 1), "stride": 2, "padding": 2, "transposed": True}, (3, 3)),
        ({"pads": (6, 1, 4, 2)}, (4, 6)),
        ({"pads": (4, 6, 2, 1), "stride": 3, "padding": 5, "transposed": True}, (4, 10)),
    ],
)
def test_mirrored_pixels_belong_to_the_filter(how, start):
    module, x = Mirrored(**how), torch.randn(2, 4, 5, 7)
    for dtype in torch.bfloat16, torch.float32:
        graph = trace(module.to(dtype), (x.to(dtype),)).graph
        assert graph.count() == {"layout": 2, "reshape": 2, "linear": 2, "fir": 1}
        (fir,) = (node for node in graph.nodes if node.op == "fir")
        assert (fir.attrs["start"], fir.attrs["border"]) == (start, "reflect")
        assert fir.inputs["x"].shape == (2, 5, 7, 4)
    with torch.autocast("cpu", torch.bfloat16):
        graph = trace(module, (x,)).graph
    assert graph.count()["fir"] == 1 and not {"conv", "conv_dx", "arith"} & set(graph.count())
    assert difference(module, x) < BUDGET


def test_zeros_around_mirrored_pixels_do_not():
    for how in {"padding": 1}, {"stride": 2, "padding": 1, "transposed": True}:
        module, x = Mirrored((1, 1, 1, 1), **how), torch.randn(2, 4, 5, 7)
        assert trace(module, (x,)).graph.count()["fir"] == 2
        assert difference(module, x) < BUDGET


def test_filters_of_several_channels_are_convolutions():
    module, x = Mirrored((1, 1, 1, 1), beside=1.0), torch.randn(2, 4, 5, 7)
    ops = trace(module, (x,)).graph.count()
    assert (ops["conv"], ops["fir"]) == (1, 1) and difference(module, x) < BUDGET


@pytest.mark.parametrize(
    "layer",
    [nn.ReflectionPad2d((1, 2, 0, 3)), nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect")],
)
def test_mirrored_pixels_of_other_layers_are_a_launch(layer):
    module, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), layer), torch.randn(2, 3, 5, 7)
    ops = trace(module, (x,)).graph.count()
    assert (ops["fir"], ops["layout"]) == (1, 2) and "arith" not in ops
    assert difference(module, x) < BUDGET
