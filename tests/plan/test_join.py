"""Evaluations whose neighbours share launches compute what the module does, on the reference."""

import pytest
import torch
from torch.utils import _pytree as pytree

from diffusion import accelerate
from diffusion.plan.build import plan
from diffusion.plan.execute import Streams, run_moves
from diffusion.plan.fuse.forward import FORWARD_ROWS
from diffusion.plan.fuse.preparing import PREPARING
from diffusion.plan.fuse.rows import leaving_out
from diffusion.plan.graph import Node, Value
from diffusion.plan.launch.table import filters, launch_kernels, launch_reference
from diffusion.plan.ops import JOINED
from diffusion.plan.schedule.moves import nodes_of
from tests.plan.compare import in_float64
from tests.plan.networks import NAMES, network
from tests.plan.strangers import STRANGERS
from triton_kernels import fused_ops
from triton_kernels.reference import fused
from triton_kernels.runtime.device import Device

GPU = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True, arch=90)
CPU = torch.device("cpu")


def evaluated(module, args, kwargs):
    """The joined plan, whose results are the module's."""
    module = in_float64(module).eval()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    made = plan(module, args, kwargs, kernels=(fused, GPU))
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    values = dict(zip(made.graph.inputs, made.traced.leaves(args, kwargs), strict=True))
    values |= made.graph.constants
    values |= {v: tensors[name].detach() for name, v in made.graph.parameters.items()}
    with torch.no_grad():
        expected = module(*args, **kwargs)
        run_moves(made.schedule.forward, values, Streams(CPU, others=0), launch_reference)
    y = made.traced.assemble([values[v] for v in made.graph.outputs])
    y, expected = (pytree.tree_leaves(v) for v in (y, expected))
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    return made.graph


@pytest.mark.parametrize("name", NAMES)
def test_networks(name):
    ops = set(evaluated(*network(name)).count())
    assert "norm_of_sums" not in ops or ops & set(JOINED)


@pytest.mark.parametrize(
    "row", [row.name for row in (*PREPARING, *FORWARD_ROWS) if "sample" in row.when]
)
def test_any_row_of_the_fuse_table_can_be_left_out(row):
    """As `benchmarks.ablate` times an evaluation without it."""
    with leaving_out(row):
        evaluated(*network(NAMES[0]))


# launches that multiply what they add up, of images of these sizes
SCALED = {
    ("sums of one variance", 8, 8): {"conv_few", "conv_norm", "norm_single_cta"},
    ("numbers behind convolutions", 16, 12): {"conv_few", "norm_conv"},
    ("numbers behind convolutions", 8, 8): {"conv_few", "conv_norm", "resample_parts"},
    ("numbers behind convolutions", 4, 6): {
        "conv_few", "norm_single_cta", "resample_parts", "sum_parts",
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "h", "w"), SCALED, ids=str)
def test_a_number_is_in_the_launch_that_adds(name, h, w):
    """In that of parts, too; what is multiplied on the small image has none."""
    module, (x, *given), kwargs = STRANGERS[name]()
    graph = evaluated(module, (x.new_empty(2, 3, h, w).normal_(), *given), kwargs)
    scaled = [n for n in graph.nodes if "factor" in n.attrs and n.op != "upsample"]
    assert {n.op for n in scaled} == SCALED[name, h, w]


def test_casts_of_parameters_are_one_node():
    module = torch.nn.Sequential(*(torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)))
    x = torch.randn(1, 8, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        made = plan(module, (x,), trains=True)
    (casts,) = [node for node in made.graph.nodes if node.op == "casts"]
    assert len(casts.inputs) == 3 and made.schedule.nodes[0] is casts
    assert all(node.op != "conv_dw" for node in nodes_of(made.schedule.forward))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_filters_are_cast_into_the_order_in_which_kernels_read_them(order):
    layers = torch.nn.Conv2d(8, 6, 3), torch.nn.Conv2d(8, 6, 1), torch.nn.Linear(8, 6)
    weights = [layer.to(memory_format=order).weight.detach() for layer in layers]
    values = [Value(f"x{i}", tuple(x.shape), x.dtype) for i, x in enumerate(weights)]
    made = [Value(f"y{i}", tuple(x.shape), torch.float16) for i, x in enumerate(weights)]
    inputs, outputs = ({v.name: v for v in those} for those in (values, made))
    node = Node("casts", inputs, outputs, {"parts": [[0], [1], [2]]})
    found = launch_kernels(node, dict(zip(values, weights, strict=True)))
    for x, y in zip(weights, map(found.get, made), strict=True):
        assert torch.equal(y, x.half()) and filters(y).data_ptr() == y.data_ptr(), "no copy"


class Attends(torch.nn.Module):
    """Twice, of which once with a weight that is read alone, too."""

    def __init__(self, c):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(c, c) for _ in range(6))

    def forward(self, x):
        for i in (0, 3):
            rows = (
                layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in self.layers[i:][:3]
            )
            x = torch.nn.functional.scaled_dot_product_attention(*rows).transpose(1, 2).flatten(2)
        return self.layers[5](x)


@pytest.mark.parametrize("trains", [False, True])
def test_weights_that_are_one_product_are_cast_side_by_side(trains):
    module, x = Attends(8), torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        made = plan(module, (x,), trains=trains)
        nodes = [node for node in made.schedule.nodes if node.op in ("casts", "cat")]
        casts, cats = nodes[0], [n for n in nodes[1:] if n.out.dtype == torch.bfloat16]
        rows = sorted(value.shape[0] for value in casts.outputs.values())
        assert rows == [8, 8, 8, 24] and len(cats) == 1
        found = []
        for net in (module, accelerate(module)):
            with torch.set_grad_enabled(trains):
                y = net(x)
            loss, given = y.float().square().sum(), list(module.parameters())
            grads = torch.autograd.grad(loss, given) if trains else ()
            found.append((y, torch.cat([g.flatten() for g in (y, *grads)])))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.03 * a.norm()


class Norms(torch.nn.Module):
    """A norm of 32 groups, whose launch nobody shares."""

    def __init__(self, channels):
        super().__init__()
        self.conv = torch.nn.Conv2d(8, channels, 3, padding=1)
        self.norm = torch.nn.GroupNorm(32, channels)

    def forward(self, x):
        return torch.nn.functional.silu(self.norm(self.conv(x)))


@pytest.mark.parametrize(
    ("images", "channels", "multiprocessors", "op"),
    [
        (5, 64, 132, "norm_single_cta"),  # 160 programs
        (8, 64, 132, "norm_single_cta"),
        (4, 64, 132, "norm_of_sums"),  # not for each multiprocessor
        (9, 64, 132, "norm_of_sums"),  # one after the other
        (4, 64, 108, "norm_single_cta"),
        (5, 512, 132, "norm_of_sums"),  # so large that two do not fit
    ],
)
def test_norms_of_whole_groups_where_they_are_one_wave(images, channels, multiprocessors, op):
    module = Norms(channels).to(torch.bfloat16).eval()
    x = torch.randn(images, 8, 32, 32, dtype=torch.bfloat16)
    made = plan(module, (x,), kernels=(fused_ops, GPU._replace(num_sms=multiprocessors)))
    assert [n.op for n in made.graph.nodes if n.op.startswith("norm")] == [op]


class Pooled(torch.nn.Module):
    """Means of a convolution and a residual."""

    def __init__(self, filters, stride):
        super().__init__()
        self.conv = torch.nn.Conv2d(512, 512, filters, stride, 1)
        self.last = torch.nn.Conv2d(512, 8, 1)

    def forward(self, x):
        y = self.conv(x)
        return self.last(torch.nn.functional.avg_pool2d(y + x if y.shape == x.shape else y, 2))


@pytest.mark.parametrize(
    ("side", "filters", "stride", "op"),
    [
        (8, 3, 1, "resample_parts"),
        (7, 3, 1, "sum_parts"),  # whose last row and column are in no mean
        (16, 3, 2, "resample_parts"),
        (16, 4, 2, "conv"),  # filters of even sides are in no parts
    ],
)
def test_parts_whose_sum_is_pooled(side, filters, stride, op):
    x = torch.randn(1, 512, side, side, dtype=torch.bfloat16)
    made = plan(Pooled(filters, stride).bfloat16().eval(), (x,), kernels=(fused_ops, GPU))
    assert op in made.graph.count(), made.graph.count()
