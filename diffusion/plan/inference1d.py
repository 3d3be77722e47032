"""`UNet1d` in real time: the same network over `triton_kernels.conv1d.conv1d`.

A layer is one launch, which also does the norm, activation, FiLM and residual in front of it, or
two, the first of which does that: 29 or 57 launches a forward at the published size. A block's
FiLM is a linear map of Mish(step embedding beside the condition), so it is a sum of two: one of the
step, made once for all steps of a chain, and one of the condition, made once a chain.

The weights are copied into the order in which the kernels read them, in the backend's dtype:
parameters that change later are not noticed.
"""

import logging
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triton_kernels.conv1d import conv1d as stream_conv1d
from triton_kernels.conv1d.conv1d import Activation, Conv, Film, Norm, Stem, Sums
from triton_kernels.runtime.device import describe

from ..models.unet1d import ConvBlock, ResBlock, UNet1d

_MIN_TILE = 16  # channels in and out of a program: the depth and height of a matrix product
_POSITIONS = 8  # of a tile where there are many channels
_MAX_SLICE = 128  # input channels of a program
_MAX_BLOCK = 64  # output channels of a program
_LAST_GROUPS = 2  # in a slice of the last but one convolution, whose sums one program adds
_MAX_HEAD = 512  # channels in front of the last convolution, which are one program's
_MAX_STEM = 96  # terms of the first convolution, each added by every program that needs it
_MAX_LENGTH = 64
_PROGRAMS = 132  # into which a layer is cut, about: the multiprocessors of an H100
_BATCHED_FROM = 4  # samples; below, an activation is made by each of its readers,
_LARGE = 2**21  # unless a convolution has so many bytes of weights on average, and `conv1d.batched`

log = logging.getLogger(__name__)


def obstacle(model: UNet1d, length: int = 1) -> str | None:
    """Why this network cannot run here on chunks of that length, or None: channels have to divide
    into the kernels' tiles."""
    if length > _MAX_LENGTH:
        return f"chunks of {length}; at most {_MAX_LENGTH}"
    blocks = [m for m in model.modules() if isinstance(m, ResBlock)]
    stem = blocks[0].blocks[0].block[0].weight  # [CO, CI, S]
    if stem[0].numel() > _MAX_STEM:
        return f"input_dim={model.input_dim} times the kernel is more than {_MAX_STEM}"
    if isinstance(blocks[0].residual_conv, nn.Identity):
        return f"input_dim={model.input_dim} is the first of down_dims"
    if any(isinstance(block.residual_conv, nn.Identity) for block, _, _ in model.up_modules):
        return "the residual of a block is a concatenation: down_dims has a level of half the last"
    if stem.shape[0] > _MAX_HEAD:
        return f"down_dims begins with {stem.shape[0]}; at most {_MAX_HEAD}"
    for block in blocks:
        norm = block.blocks[0].block[1]
        c = norm.weight.shape[0]
        if c < _MIN_TILE or c & (c - 1) or norm.num_groups & (norm.num_groups - 1):
            return f"{c} channels in {norm.num_groups} groups; powers of two, from {_MIN_TILE} on"
        if c // norm.num_groups > _MAX_SLICE:
            return f"{c // norm.num_groups} channels a group; at most {_MAX_SLICE}"
    return None


def real_time(model: nn.Module, length: int) -> "StreamedUNet1d | None":
    """The network over the kernels of this file, from copies of its parameters; None, which the
    log explains, if its backend is not Triton or there is an `obstacle`."""
    if not isinstance(model, UNet1d) or model.backend.name != "triton":
        return None
    if (why := obstacle(model, length)) is not None:
        log.info("the network runs layer by layer: %s", why)
        return None
    return StreamedUNet1d(model)


@dataclass(frozen=True)
class _Half:
    """A convolution, and what comes behind it."""

    conv: Conv | None  # None: the stem
    bias: Tensor
    norm: Norm | None = None


@dataclass(frozen=True)
class _Block:
    """A ResBlock."""

    first: _Half
    second: _Half
    film: int  # the block's first column
    scale: bool
    side_bias: Tensor | None  # None: the input itself is the residual


class StreamedUNet1d:
    """Predicts as `model` does, from copies of its parameters.

    Raises ValueError if there is an `obstacle`.
    """

    def __init__(
        self,
        model: UNet1d,
        ops: ModuleType = stream_conv1d,  # or its reference
        *,
        batched_from: int | None = None,  # samples; None: from where it is quicker
        programs: int = _PROGRAMS,
    ) -> None:
        if (why := obstacle(model)) is not None:
            raise ValueError(why)
        self.model, self.ops = model, ops
        self.programs = programs
        self._steps: tuple[Tensor, Tensor] | None = None  # timesteps and what they contribute
        self.dtype = model.backend.dtype
        self._options = {"allow_tf32": model.backend.allow_tf32}
        # norms, biases and sums are float32, and float64 in tests of the reference
        self._wide = torch.promote_types(self.dtype, torch.float32)
        self._convs: list[Conv] = []
        with torch.no_grad():
            self._pack()
        if batched_from is None:
            sizes = [0 if c.by_tap is None else c.by_tap.nbytes for c in self._convs]
            large = min(sizes) > 0 and sum(sizes) >= _LARGE * len(sizes)
            batched_from = 1 if large else _BATCHED_FROM
        self.batched_from = batched_from

    # --- parameters -------------------------------------------------------------------------------

    def _pack(self) -> None:
        model = self.model
        self._pack_film([m for m in model.modules() if isinstance(m, ResBlock)])
        self._columns = 0
        self._down = [
            (self._block(a, first=level == 0), self._block(b), self._resample(halve))
            for level, (a, b, halve) in enumerate(model.down_modules)
        ]
        self._mid = [self._block(b) for b in model.mid_modules]
        self._up = [
            (self._block(a, halves=2), self._block(b), self._resample(double))
            for a, b, double in model.up_modules
        ]
        last, out = model.final_conv
        self._last = self._half(last, groups=_LAST_GROUPS)
        self._head = out.weight[:, :, 0].to(self.dtype).contiguous(), self._copy(out.bias)

    def _pack_film(self, blocks: list[ResBlock]) -> None:
        """All blocks' projections side by side, cut into the part of the step and the rest."""
        linears = [block.cond_encoder["1"] for block in blocks]
        embed = self.model.diffusion_step_encoder["3"].weight.shape[0]
        weight = torch.cat([linear.weight for linear in linears])  # [F, embed + G]
        weight = self._multiplied(weight)

        def padded(w: Tensor) -> Tensor:
            return F.pad(w, (0, -w.shape[1] % self.ops.PROJECT_BLOCK))

        self._film_bias = self._copy(torch.cat([linear.bias for linear in linears]))
        self._film_step = padded(weight[:, :embed])
        has_cond = self.model.global_cond_dim is not None
        self._film_cond = padded(weight[:, embed:]) if has_cond else None

    def _block(self, block: ResBlock, *, first: bool = False, halves: int = 1) -> _Block:
        """`halves`: its input is that many tensors side by side."""
        identity = isinstance(block.residual_conv, nn.Identity)
        side = None if identity else block.residual_conv.weight
        columns = self._columns
        self._columns += block.cond_encoder["1"].bias.shape[0]
        if first:
            self._stem = self._copy(block.blocks[0].block[0].weight.permute(1, 2, 0))
            self._side_stem = self._copy(side.permute(1, 2, 0))  # [CX, 1, C]
        return _Block(
            self._half(block.blocks[0], side, halves, stem=first),
            self._half(block.blocks[1]),
            columns,
            block.cond_predict_scale,
            None if identity else self._copy(block.residual_conv.bias),
        )

    def _half(
        self,
        layer: ConvBlock,
        side: Tensor | None = None,
        halves: int = 1,
        stem: bool = False,
        groups: int = 1,
    ) -> _Half:
        conv, norm = layer.block
        packed = None if stem else self._conv(conv, side, halves, groups)
        affine = self._copy(norm.weight), self._copy(norm.bias)
        return _Half(packed, self._copy(conv.bias), Norm(norm.num_groups, *affine, norm.eps))

    def _resample(self, module: nn.Module) -> _Half | None:
        if isinstance(module, nn.Identity):
            return None
        return _Half(self._conv(module.conv), self._copy(module.conv.bias))

    def _conv(
        self, conv: nn.Module, side: Tensor | None = None, halves: int = 1, at_once: int = 1
    ) -> Conv:
        """Cut into about `programs` pieces. A slice of the input is a group of its norm, or
        `at_once`, or several small ones."""
        transposed = not hasattr(conv, "stride")
        co, ci = conv.weight.shape[:2]  # equal in a transposed one
        groups = self.model.mid_modules[0].blocks[0].block[1].num_groups
        channels = min(max(_MIN_TILE, at_once * ci // halves // groups), _MAX_SLICE, ci)
        block, rows = min(_MAX_BLOCK, co), 2 * co if transposed else co
        tiles = conv.weight.shape[2] + (side is not None)

        early = self.dtype != torch.float32 or self.model.backend.allow_tf32

        def shared_memory() -> int:  # of a program: its weights and shifted copies of its input
            return early * tiles * (block + _POSITIONS) * channels * self.dtype.itemsize

        limit = describe(conv.weight.device).shared_memory // 2  # two launches overlap
        while block > _MIN_TILE and (
            2 * (ci // channels) * (rows // block) <= self.programs or shared_memory() > limit
        ):
            block //= 2
        packed = self.ops.pack_conv(
            self._multiplied(conv.weight),
            None if side is None else self._multiplied(side),
            self.dtype,
            slice_channels=channels,
            block=block,
            stride=1 if transposed else conv.stride,
            transposed=transposed,
            # float32 splits each tile in registers, which a wide one does not leave room for
            widest=4 if early else 1,
        )
        self._convs.append(packed)
        return packed

    def _multiplied(self, weight: Tensor) -> Tensor:
        """Weights in the precision in which they are multiplied."""
        weight = weight.to(self.dtype)
        tf32 = self.dtype == torch.float32 and self.model.backend.allow_tf32
        return self.ops.round_to_tf32(weight) if tf32 else weight

    def _copy(self, parameter: Tensor) -> Tensor:
        return parameter.detach().to(self._wide, memory_format=torch.contiguous_format, copy=True)

    # --- FiLM -------------------------------------------------------------------------------------

    def film_of_steps(self, t: Tensor) -> Tensor:  # [R] -> float32 [R, F]
        """What the diffusion steps t contribute to every block's scale and shift."""
        encoder = self.model.diffusion_step_encoder
        emb = encoder["3"](F.mish(encoder["1"](encoder["0"](t)))).to(self._wide)
        return self.ops.project(emb, self._film_step, self._film_bias, **self._options)

    def film_of_condition(self, cond: Tensor) -> Tensor:  # float [N, G] -> float32 [N, F]
        """What the conditions contribute to it."""
        cond = cond.to(self._wide).contiguous()
        return self.ops.project(cond, self._film_cond, **self._options)

    @torch.no_grad()
    def tabulate(
        self, timesteps: Tensor, labels: Tensor | None, n: int
    ) -> tuple[Tensor, ...]:  # float32 [K, F], and [N, F] if the model has a condition
        """The FiLM of a chain, see `TabulatedDenoiser`. That of the steps is kept for the next."""
        if self._steps is None or self._steps[0] is not timesteps:
            self._steps = timesteps, self.film_of_steps(timesteps)
        self.model.check_condition(labels, n)
        table = self._steps[1]
        return (table,) if labels is None else (table, self.film_of_condition(labels))

    # --- the network ------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(
        self,
        x: Tensor,  # [N, 1, T, C]
        t: Tensor,  # int64 or float [N]
        cond: Tensor | None = None,  # float [N, G], if the model has a condition
    ) -> Tensor:  # float32 [N, 1, T, C]
        """As `UNet1d.forward_nhwc`."""
        self.model.check_inputs(x, t, cond)
        film = None if cond is None else self.film_of_condition(cond)
        return self.predict(x[:, 0], self.film_of_steps(t), film)[:, None]

    def at_row(self, x: Tensor, row: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        """The same in a chain, see `TabulatedDenoiser`."""
        steps, *cond = tables
        return self.predict(x[:, 0], steps, cond[0] if cond else None, row)[:, None]

    @torch.no_grad()
    def predict(
        self,
        x: Tensor,  # [N, T, C]
        steps: Tensor,  # of `film_of_steps`: float32 [N, F], or [K, F] with a row
        cond: Tensor | None,  # of `film_of_condition`: float32 [N, F]
        row: Tensor | None = None,  # int64 [1], on the device: the step of all samples
    ) -> Tensor:  # float32 [N, T, C]
        """The network behind its FiLM. Nothing in it waits for the host: with a row it can be
        captured for each step of a chain."""
        n, length, _ = x.shape
        if length > _MAX_LENGTH:
            raise ValueError(f"x has {length} time steps; at most {_MAX_LENGTH}")
        if n == 0:
            return torch.empty_like(x, dtype=self._wide)
        x = x.to(self._wide).contiguous()

        def stage(h: Activation, half: _Half, **options) -> tuple[Sums, Tensor | None, Tensor]:
            partial, side, kept = self.ops.conv_stage(
                h,
                half.conv,
                batched=n >= self.batched_from,
                **self._options,
                **options,
            )
            return Sums(partial, half.bias), side, kept

        def block(h: Activation, b: _Block, **options) -> tuple[Activation, Tensor | None]:
            """The block's output, and its input if that is the residual."""
            sums, side, kept = stage(h, b.first, keep=b.side_bias is None, **options)
            residual = kept if b.side_bias is None else Sums(side, b.side_bias)
            return second(sums, b, residual), kept

        def second(source: Sums | Stem, b: _Block, residual: Tensor | Sums | Stem) -> Activation:
            film = Film(steps, cond, b.film, b.scale, row)
            sums, _, _ = stage(Activation(source, b.first.norm, film), b.second)
            return Activation(sums, b.second.norm, None, residual)

        h, skips = None, []
        for level, (a, b, halve) in enumerate(self._down):
            if level == 0:
                source = Stem(x, self._stem, a.first.bias)
                h = second(source, a, Stem(x, self._side_stem, a.side_bias))
            else:
                h, _ = block(h, a)
            h, _ = block(h, b)
            if halve is not None:
                # the skip connection of the first level is never used
                sums, _, kept = stage(h, halve, keep=level > 0)
                skips.append(kept)
                h = Activation(sums)
        for b in self._mid:
            h, kept = block(h, b)
            if len(skips) < len(self._down):
                skips.append(kept)
        for a, b, double in self._up:
            h, _ = block(h, a, skip=skips.pop())
            h, _ = block(h, b)
            h = Activation(stage(h, double)[0])
        h = Activation(stage(h, self._last)[0], self._last.norm)
        return self.ops.head(h, *self._head)
