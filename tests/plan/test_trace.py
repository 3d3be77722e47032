"""Modules become graphs of the plan's ops, which compute what the modules do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion.plan.execute import run
from diffusion.plan.graph import PlanError
from diffusion.plan.ops import FORWARD
from diffusion.plan.trace import trace
from tests.plan.compare import compare
from tests.plan.networks import NAMES, network


def evaluate(module, args, kwargs):
    traced = trace(module, args, kwargs)
    graph = traced.graph
    values = dict(zip(graph.inputs, traced.leaves(args, kwargs), strict=True)) | graph.constants
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    values |= {value: tensors[name].detach() for name, value in graph.parameters.items()}
    with torch.no_grad():
        run(graph.nodes, values)
    return graph, traced.assemble([values[v] for v in graph.outputs])


@pytest.mark.parametrize("name", NAMES)
def test_networks(name):
    module, args, kwargs = network(name)
    graph, result = evaluate(module, args, kwargs)
    with torch.no_grad():
        expected = module(*args, **kwargs)
    assert type(result) is type(expected)
    y, z = (getattr(r, "sample", r) for r in (result, expected))
    assert y.shape == z.shape and y.dtype == z.dtype
    assert (y - z).abs().max() <= 5e-6 * z.abs().max()
    assert set(graph.count()) <= set(FORWARD)
    images = [n for n in graph.nodes if n.op == "layout" and n.out.numel >= args[0].numel()]
    if "policy" not in name:  # whose actions are NHWC already
        assert len(images) == 2, "one permute at each end"
    for node in graph.nodes:
        assert ".py:" in node.source


def test_norms_take_activations_and_film():
    module, args, kwargs = network("diffusers: film, residual blocks resample")
    graph, _ = evaluate(module, args, kwargs)
    norms = [node for node in graph.nodes if node.op == "group_norm"]
    assert sum("scale" in node.inputs and "shift" in node.inputs for node in norms) == 10
    assert sum(node.attrs["activation"] == "silu" for node in norms) == 21
    # silu of the embedding, which every block computes, is computed once
    assert graph.count()["act"] == 2


class AdaGroupNorm(nn.Module):
    """As k-diffusion's, in one call of PyTorch."""

    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(6, 8), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x, emb):
        scale, shift = self.linear(emb)[..., None, None].chunk(2, dim=1)
        y = torch.addcmul(shift, F.group_norm(x, 2), scale + 1)
        return torch.addcmul(x, F.gelu(y), self.conv(x))


def test_a_norm_takes_what_addcmul_adds_and_multiplies():
    graph, y = evaluate(AdaGroupNorm(), (torch.randn(2, 4, 5, 3), torch.randn(2, 6)), {})
    (norm,) = [node for node in graph.nodes if node.op == "group_norm"]
    assert {"scale", "shift"} <= set(norm.inputs) and norm.attrs["activation"] == "gelu"
    assert graph.count()["arith"] == 1 and "mul" not in graph.count()


class Concats(nn.Module):
    """An image of a layer that is PyTorch's beside one of ours."""

    def __init__(self, c):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, c, 2, 2, groups=2)
        self.skip, self.out = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(c + 8, 4, 3, padding=1)

    def forward(self, x, skip):
        return self.out(torch.cat([self.up(x), self.skip(skip)], 1))


@pytest.mark.parametrize("c", [8, 24])
def test_a_concat_is_in_the_order_of_convolutions(c):
    """Also where most of it is in the other."""
    args = torch.randn(2, 4, 4, 4), torch.randn(2, 4, 8, 8)
    graph, _ = evaluate(Concats(c), args, {})
    (cat,) = [node for node in graph.nodes if node.op == "cat"]
    assert cat.out.shape == (2, 8, 8, c + 8)
    assert graph.count()["layout"] == 3  # of the second argument, of one half, of the result


BY_PYTORCH = {
    "bilinear": nn.Upsample(scale_factor=2.0, mode="bilinear"),
    "nearest, no whole number": nn.Upsample(scale_factor=1.5),
    "the largest": nn.MaxPool2d(2),
    "windows that overlap": nn.AvgPool2d(3, 2, 1),
    "replicated": nn.ReplicationPad2d(1),
    "transposed, dilated": nn.ConvTranspose2d(8, 8, 4, 2, 1, dilation=2),
    "dilated": nn.Conv2d(8, 8, 3, padding=2, dilation=2),
}


@pytest.mark.parametrize("name", BY_PYTORCH)
def test_layers_of_pytorch_read_and_write_images_as_ours_do(name):
    """Between two of ours nothing is copied, and a norm over channels is one."""

    class Between(nn.Sequential):
        def forward(self, x):
            first, layer, last = self
            return last(F.normalize(layer(first(x)), dim=1))

    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), BY_PYTORCH[name], nn.Conv2d(8, 3, 1)
    compared = compare(Between(*layers).double(), (torch.randn(2, 3, 8, 10).double(),))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    nodes = trace(Between(*layers), (torch.randn(2, 3, 8, 10).double(),)).graph.count()
    assert (nodes["layout"], nodes["arith"], nodes["channel_norm"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("layer", "op"),
    [
        (nn.ConvTranspose2d(8, 6, 2, 2), "linear"),
        (nn.ConvTranspose2d(8, 6, (3, 2), (3, 2), bias=False), "linear"),
        (nn.AdaptiveAvgPool2d((3, 4)), "avg_pool"),
        (lambda x: F.interpolate(x, scale_factor=0.5, mode="area"), "avg_pool"),
    ],
)
def test_layers_that_are_ours_by_another_name(layer, op):
    """Blocks of pixels that do not overlap are rows of a product, or have means."""

    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = nn.Conv2d(3, 8, 3, padding=1), layer

        def forward(self, x):
            return self.layer(self.first(x))

    torch.manual_seed(0)
    compared = compare(Between().double(), (torch.randn(2, 3, 6, 8).double(),))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    nodes = compared.graph.count()
    assert nodes[op] == 1 and not {"arith", "arith_grad"} & set(nodes)


class Video(nn.Module):
    """A layer of images, one of frames, and norms of both."""

    def __init__(self):
        super().__init__()
        self.norm, self.image = nn.GroupNorm(2, 4), nn.Conv3d(4, 6, (1, 3, 3), padding=(0, 1, 1))
        self.frames = nn.Conv3d(6, 4, (3, 1, 1), padding=(1, 0, 0))
        self.out = nn.Conv3d(4, 4, 1)

    def forward(self, x):  # [N, C, F, H, W]
        return x + self.out(self.frames(F.silu(self.image(F.silu(self.norm(x))))))


def test_layers_of_videos_are_convolutions_of_images():
    """In one order of memory, so that nothing between them is a copy."""
    args = (torch.randn(2, 4, 3, 5, 6).double(),)
    module = nn.Sequential(nn.Conv3d(4, 4, 1), Video(), Video()).double()
    compared = compare(module, args)
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    graph = trace(module, args).graph
    nodes = graph.count()
    assert (nodes["conv"], nodes["linear"], nodes["layout"]) == (4, 3, 2)  # layouts: in and out
    images = [node.inputs["x"].shape for node in graph.nodes if node.op == "conv"][:2]
    assert images == [(6, 5, 6, 4), (2, 3, 30, 6)]


@pytest.mark.parametrize("new_order", [False, True])
def test_attention_of_packed_heads(new_order):
    module, args, kwargs = network("ours: unet.cu's")
    from tests.diffusion.diffusers_models import ours

    module = ours({"use_new_attention_order": new_order}).model
    graph, _ = evaluate(module, args, kwargs)
    found = [node for node in graph.nodes if node.op == "attention"]
    assert len(found) == 4
    order = "qkv_heads" if new_order else "heads_qkv"
    assert all(set(n.inputs) == {"qkv"} and n.attrs["order"] == order for n in found)


def test_attention_of_a_context():
    """k and v stay side by side, and the mask is made once."""
    from tests.diffusion.test_fused_unet import MODELS, given, make

    model = make(MODELS["context"] | {"num_res_blocks": 2})
    more, emb = given(model), torch.zeros(2, 128).double()
    body = Embedded(model)
    arguments = torch.zeros(2, 8, 12, 3).double(), emb, more.context, more.present
    found = [n for n in trace(body, arguments).graph.nodes if n.op == "attention"]
    crossing = [n for n in found if "qkv" not in n.inputs]
    assert len(found) == 12 and len(crossing) == 6
    assert all(set(n.inputs) == {"q", "kv", "mask"} for n in crossing)
    assert len({n.inputs["mask"] for n in crossing}) == 1


class Embedded(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *arguments):
        return self.model.forward_embedded(*arguments)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.recurrent = nn.LSTM(8, 4)

    def forward(self, x):
        return self.function(self, x)


REFUSED = {
    "a draw that writes": (lambda net, x: F.rrelu(x, training=True), "rrelu"),
    "an op that reads memory": (lambda net, x: x.as_strided((2, 2), (1, 8)), "as_strided"),
    "a layer's op": (lambda net, x: net.recurrent(x[0])[0], "lstm"),
    "attention of groups that drops": (
        lambda net, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, enable_gqa=True),
        "scaled_dot_product_attention with dropout_p=0.5",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_op_and_its_line(case):
    function, said = REFUSED[case]
    with pytest.raises(PlanError) as error:
        trace(Net(function), (torch.randn(1, 4, 8, 8),))
    assert said in str(error.value)
    assert "plan/test_trace.py:" in str(error.value) or "modules/rnn.py:" in str(error.value)


def test_a_module_that_looks_at_numbers_is_refused():
    net = Net(lambda net, x: x + 1 if x.sum() > 0 else x)
    with pytest.raises(PlanError, match="__bool__ of a tensor, whose numbers are not known"):
        trace(net, (torch.randn(1, 4, 8, 8),))


def test_wrong_arguments_are_the_modules_business():
    module, args, kwargs = network("ours: unet.cu's")
    with pytest.raises(ValueError, match="expected"):
        trace(module, (args[0][:, :2], args[1]))


class OfPixels(nn.Module):
    """PyTorch's layer over an image's pixels, as its users call it."""

    def __init__(self, batch_first, **options):
        super().__init__()
        self.batch_first, self.options = batch_first, options
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.of = nn.MultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, x):
        x = self.stem(x)
        rows = self.norm(x.flatten(2)).permute((0, 2, 1) if self.batch_first else (2, 0, 1))
        y = self.of(rows, rows, rows, **self.options)[0]
        return x + y.permute((0, 2, 1) if self.batch_first else (1, 2, 0)).unflatten(2, x.shape[2:])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"need_weights": False}])
def test_pytorchs_attention_reads_pixels_as_they_lie(batch_first, options):
    """Also where the layer makes the weights, too, which nobody reads."""
    compared = compare(
        OfPixels(batch_first, **options).double(), (torch.randn(2, 3, 4, 6).double(),)
    )
    assert compared.error() < 1e-12 and compared.gradient_error() < 1e-12
    nodes = compared.graph.count()
    assert nodes["attention"] == 1 and "arith" not in nodes
    assert nodes["layout"] == 4  # of the image, of the result, and of their gradients


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_batch_norms_read_images_as_layers_leave_them(dims):
    """By the statistics of the batch, and with an activation and pooling behind them."""
    conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")(6)
    layers = conv(3, 6, 1), norm, nn.GELU(), conv(6, 3, 1)
    layers = (*layers[:3], nn.MaxPool2d(2), layers[3]) if dims == 2 else layers
    compared = compare(
        nn.Sequential(*layers).double(), (torch.randn(2, 3, *(4, 6, 2)[:dims]).double(),)
    )
    assert compared.error() < 1e-12 and compared.gradient_error() < 1e-9
    assert compared.graph.count()["layout"] == 4  # of the image, of the result, of their gradients
