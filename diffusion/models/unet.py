"""The UNet of guided-diffusion (Dhariwal and Nichol 2021), over NHWC and a backend's ops.

Parameter names are guided-diffusion's, so its state dicts load as they are. unet.cu trains the same
network with other options: max_period=1000, conv_resample=False, zero_init=False,
use_new_attention_order=True, num_head_channels=32 (`configs/model/unet_cu.yaml`); its names are
mapped in `interchange`.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triton_kernels.runtime.library import is_traced

from ..errors import ConfigError
from ..runtime.backend import TORCH_FP32, Backend
from .blocks import AttentionBlock, CrossAttentionBlock, Downsample, ResBlock, Upsample
from .conditions import Conditions, Given, attended, drop_labels, parts_of
from .layers import Conv1d, Conv2d, GroupNorm, Linear, Network, TimestepEmbedding

_MOST_CHANNELS = 100_000  # of which one convolution has more weights than a GPU holds
MOST_BLOCKS = 2000  # more would take minutes to build, and nobody has trained half of them


class UNet(Network):
    """Predicts noise (or x_0, or v) from x_t and t, and perhaps a class.

    Raises ConfigError if sizes do not divide: the image by 2^(levels - 1), channels by `num_groups`
    and by the heads.
    """

    def __init__(
        self,
        image_size: int | Sequence[int],  # pixels: a side, or (H, W)
        in_channels: int,  # of the images
        model_channels: int,  # channels at channel_mult 1
        out_channels: int,  # in_channels, or twice as many with a learned variance
        num_res_blocks: int,  # residual blocks a level on the way down; one more on the way up
        attention_resolutions: Sequence[int],  # downsampling factors whose levels have attention
        dropout: float = 0.0,  # in every residual block, behind the second norm
        channel_mult: Sequence[float] = (1, 2, 4, 8),  # one a level
        conv_resample: bool = True,  # convolutions in resampling; False: mean and nearest alone
        num_classes: int | None = None,  # None: unconditional
        label_dropout: float = 0.0,  # of training's labels; above 0: a null class, for guidance
        num_heads: int = 1,  # of attention, if num_head_channels is -1
        num_head_channels: int = -1,  # channels of a head; -1: channels // num_heads
        num_heads_upsample: int = -1,  # num_heads on the way up; -1: the same
        num_groups: int = 32,  # of every GroupNorm
        use_scale_shift_norm: bool = False,  # the embedding modulates the norm (FiLM)
        resblock_updown: bool = False,  # residual blocks resample, instead of layers of their own
        use_new_attention_order: bool = False,  # qkv packed [3, heads, d]; False: [heads, 3, d]
        max_period: float = 10000,  # of the timestep's sinusoids
        zero_init: bool = True,  # last convolution of every block starts at zero
        norm_eps: float = 1e-5,  # of every GroupNorm; this and the next two are for others' weights
        freq_shift: float = 0,  # of the timestep's sinusoids, see `TimestepEmbedding`
        downsample_padding: int = 1,  # of convolutions of stride 2; 0: see `Downsample`
        stem_channels: int = -1,  # of the first convolution; -1: those of the first level
        decoder_attention: str = "all",  # blocks that have it on the way up: all | last of a level
        resample_projection: bool = False,  # 1x1 convolution beside blocks that resample
        condition_channels: int = 0,  # that x_t comes with behind its own; none comes out
        condition_dropout: float | None = None,  # of training's conditions; None: 0
        vector_dim: int = 0,  # numbers of a vector that is added to the embedding; 0: there is none
        context_dim: int = 0,  # numbers of each token of a sequence that is attended to; 0: none
        context_resolutions: Sequence[int] | None = None,  # as attention's; None: the same levels
        backend: Backend = TORCH_FP32,  # who computes, and in which precision
    ) -> None:
        super().__init__(backend)
        if context_resolutions is None:
            context_resolutions = attention_resolutions
        for option, value in (
            ("channel_mult", channel_mult),
            ("attention_resolutions", attention_resolutions),
            ("context_resolutions", context_resolutions),
        ):
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ConfigError(f"{option}={value} is not a list of numbers")
        sizes = (image_size,) * 2 if isinstance(image_size, int) else tuple(image_size)
        if num_heads_upsample == -1:
            num_heads_upsample = num_heads
        self.image_size = sizes  # (H, W)
        self.condition_channels, self.condition_dropout = condition_channels, condition_dropout or 0
        self.vector_dim, self.context_dim = vector_dim, context_dim
        self.in_channels, self.model_channels = in_channels, model_channels
        self.out_channels, self.num_classes = out_channels, num_classes
        self.label_dropout = label_dropout
        self.num_res_blocks, self.num_groups, self.dropout = num_res_blocks, num_groups, dropout
        self.channel_mult, self.max_period = tuple(channel_mult), max_period
        self.attention_resolutions = tuple(attention_resolutions)
        self.context_resolutions = tuple(context_resolutions) if context_dim else ()
        self.conv_resample, self.resblock_updown = conv_resample, resblock_updown
        self.use_scale_shift_norm = use_scale_shift_norm
        self.use_new_attention_order = use_new_attention_order
        self.num_heads, self.num_head_channels = num_heads, num_head_channels
        self.num_heads_upsample = num_heads_upsample
        self.norm_eps, self.freq_shift = norm_eps, freq_shift
        self.downsample_padding = downsample_padding
        self.stem_channels, self.decoder_attention = stem_channels, decoder_attention
        self.resample_projection = resample_projection
        self._check_options()
        self.in_channels += condition_channels  # of the stem

        emb_channels = 4 * model_channels
        self.timestep_embedding = TimestepEmbedding(model_channels, max_period, freq_shift)
        self.time_embed = nn.ModuleDict(
            {
                "0": Linear(model_channels, emb_channels, backend=backend),
                "2": Linear(emb_channels, emb_channels, backend=backend),
            }
        )
        if num_classes is not None:
            rows = num_classes if self.null_label is None else num_classes + 1
            self.label_emb = nn.Embedding(rows, emb_channels)
        if vector_dim:
            self.vector_emb = Linear(vector_dim + 1, emb_channels, backend=backend)

        make = _Layers(self, emb_channels, zero_init)
        widths = [int(mult * model_channels) for mult in self.channel_mult]
        self.input_blocks, skips = self._encoder(make, widths)
        self.middle_block = self._middle(make, skips[-1])
        self.output_blocks = self._decoder(make, widths, skips)
        norm = GroupNorm(num_groups, widths[0], activation="silu", eps=norm_eps, backend=backend)
        head = Conv2d(widths[0], out_channels, 3, zero=zero_init, backend=backend)
        self.out = nn.ModuleDict({"0": norm, "2": head})

    def _encoder(self, make: "_Layers", widths: list[int]) -> tuple[nn.ModuleList, list[int]]:
        """The blocks, and the channels of what each sends to the decoder."""
        ch = widths[0] if self.stem_channels == -1 else self.stem_channels
        stem = Conv2d(self.in_channels, ch, 3, backend=self.backend)
        blocks, skips = [nn.ModuleList([stem])], [ch]
        for level, width in enumerate(widths):
            for _ in range(self.num_res_blocks):
                name = f"input_blocks.{len(blocks)}"
                layers = [make.res_block(f"{name}.0", ch, width)]
                ch = width
                layers += make.attentions(name, ch, level, self.num_heads)
                blocks.append(nn.ModuleList(layers))
                skips.append(ch)
            if level < len(widths) - 1:
                down = (
                    make.res_block(f"input_blocks.{len(blocks)}.0", ch, ch, "down")
                    if self.resblock_updown
                    else Downsample(ch, self.conv_resample, self.downsample_padding, self.backend)
                )
                blocks.append(nn.ModuleList([down]))
                skips.append(ch)
        return nn.ModuleList(blocks), skips

    def _middle(self, make: "_Layers", ch: int) -> nn.ModuleList:
        layers = [make.res_block("middle_block.0", ch, ch)]
        layers.append(make.attention("middle_block.1", ch, self.num_heads))
        if self.context_dim:
            layers.append(make.cross_attention("middle_block.2", ch, self.num_heads))
        layers.append(make.res_block(f"middle_block.{len(layers)}", ch, ch))
        return nn.ModuleList(layers)

    def _decoder(self, make: "_Layers", widths: list[int], skips: list[int]) -> nn.ModuleList:
        """`skips`: channels that come from the encoder, those of its last block last."""
        blocks, ch, skips = [], skips[-1], list(skips)
        for level, width in reversed(list(enumerate(widths))):
            for i in range(self.num_res_blocks + 1):
                name, is_last = f"output_blocks.{len(blocks)}", i == self.num_res_blocks
                layers = [make.res_block(f"{name}.0", ch + skips.pop(), width)]
                ch = width
                if self.decoder_attention == "all" or is_last:
                    layers += make.attentions(name, ch, level, self.num_heads_upsample)
                if level > 0 and is_last:
                    layers.append(
                        make.res_block(f"{name}.{len(layers)}", ch, ch, "up")
                        if self.resblock_updown
                        else Upsample(ch, self.conv_resample, self.backend)
                    )
                blocks.append(nn.ModuleList(layers))
        return nn.ModuleList(blocks)

    def forward_nhwc(
        self,
        x: Tensor,  # [N, H, W, CI], CI with the condition's channels
        t: Tensor,  # int64 or float [N]
        labels: Given = None,  # int64 [N], if the model has classes; of more `Conditions`
        *,
        rng: Tensor | None = None,  # int64 [2]: seed, step; needed for dropout in training
        first: int = 0,  # global index of sample 0, which keys its dropout masks and label
    ) -> Tensor:  # [N, H, W, CO], dtype of the backend
        """The network. H and W may differ from `image_size`, but have to be divisible alike.

        Raises ValueError for a wrong shape, labels that are missing, not wanted or (on the CPU,
        where looking costs nothing) out of range, and dropout in training without `rng`.
        """
        self._check_inputs(x, t, labels, rng)
        more = parts_of(labels)
        emb = self.embed(t, labels, rng, first)
        return self.forward_embedded(x, emb, more.context, more.present, rng=rng, first=first)

    def forward_embedded(
        self,
        x: Tensor,  # [N, H, W, CI]
        emb: Tensor,  # [N, E], as `embed` gives it
        context: Tensor | None = None,  # [N, 1 + L, D] and [N, 1 + L] of `Conditions`
        present: Tensor | None = None,
        *,
        rng: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:  # [N, H, W, CO], dtype of the backend
        """The network behind the embedding."""
        tokens = ()
        if context is not None:
            tokens = context.to(self.backend.dtype)[:, None], attended(present)

        def run(block: nn.ModuleList, h: Tensor) -> Tensor:
            for layer in block:
                if isinstance(layer, ResBlock):
                    h = layer(h, emb, rng, first)
                elif isinstance(layer, CrossAttentionBlock):
                    h = layer(h, *tokens)
                else:
                    h = layer(h)
            return h

        h = x.to(self.backend.dtype)
        skips = []
        for block in self.input_blocks:
            h = run(block, h)
            skips.append(h)
        h = run(self.middle_block, h)
        for block in self.output_blocks:
            h = run(block, torch.cat((h, skips.pop()), dim=3))
        return self.out["2"](self.out["0"](h))

    def embed(
        self,
        t: Tensor,
        given: Given,
        rng: Tensor | None,
        first: int,
        linear: Callable[[Linear, Tensor], Tensor] = Linear.__call__,
        sinusoids: Callable[[Tensor], Tensor] | None = None,  # in place of timestep_embedding
    ) -> Tensor:
        """SiLU of the embedding of t and what is given, [N, E], float32 in every precision."""
        more = parts_of(given)
        labels = more.labels
        emb = linear(self.time_embed["0"], (sinusoids or self.timestep_embedding)(t))
        emb = linear(self.time_embed["2"], F.silu(emb))
        if self.num_classes is not None:
            if self.training and self.label_dropout > 0:
                labels = drop_labels(labels, rng, self.label_dropout, self.null_label, first=first)
            emb = emb + self.label_emb(labels)
        if self.vector_dim:
            emb = emb + linear(self.vector_emb, more.vector)
        return F.silu(emb)

    @property
    def null_label(self) -> int | None:
        """The label of the null class, which stands for no label: the last row of the embedding."""
        return self.num_classes if self.label_dropout > 0 else None

    @property
    def flops_per_image(self) -> int:
        """Floating-point operations of one forward pass over one image of `image_size`, counting
        convolutions, linear layers and attention, but not what is done with the tokens of a
        context, whose number is not the network's. A training step takes three times as many."""
        macs = sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear))
        pixels = self.image_size[0] * self.image_size[1]
        for layer in self.layers():
            # whatever resamples does so before its convolutions
            resample = getattr(layer, "resample", None)
            if isinstance(layer, Downsample) or resample == "down":
                pixels //= 4
            elif isinstance(layer, Upsample) or resample == "up":
                pixels *= 4
            of_tokens = layer.kv if isinstance(layer, CrossAttentionBlock) else None
            for module in layer.modules():
                if isinstance(module, Conv2d | Conv1d) and module is not of_tokens:
                    macs += pixels * module.weight.numel()
                elif isinstance(module, AttentionBlock):
                    macs += 2 * pixels**2 * module.channels
        return 2 * macs

    def layers(self) -> Iterator[nn.Module]:
        """The layers through which an image passes, in order."""
        for block in (*self.input_blocks, self.middle_block, *self.output_blocks):
            yield from block
        yield self.out

    def _check_options(self) -> None:
        if not self.channel_mult or min(self.channel_mult) <= 0:
            raise ConfigError(f"channel_mult={self.channel_mult}; expected positive numbers")
        factor = 2 ** (len(self.channel_mult) - 1)
        if len(self.image_size) != 2 or any(s <= 0 or s % factor for s in self.image_size):
            raise ConfigError(
                f"image_size={self.image_size} does not suit {len(self.channel_mult)} levels; "
                f"height and width have to be multiples of {factor}; dataset.size sets them"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout}; expected a number from 0 to below 1")
        if not 0 <= self.label_dropout < 1:
            raise ConfigError(
                f"label_dropout={self.label_dropout}; expected a number from 0 to below 1"
            )
        if not 0 <= self.condition_dropout < 1:
            raise ConfigError(
                f"condition_dropout={self.condition_dropout}; expected a number from 0 to below 1"
            )
        for name in ("condition_channels", "vector_dim", "context_dim"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 0")
        if self.label_dropout > 0 and self.num_classes is None:
            raise ConfigError(
                f"label_dropout={self.label_dropout} needs classes: give num_classes, or leave it 0"
            )
        for name in ("in_channels", "model_channels", "out_channels", "num_res_blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value} has to be a whole number of at least 1")
        for mult in self.channel_mult:
            if not 1 <= mult * self.model_channels <= _MOST_CHANNELS:
                raise ConfigError(
                    f"channel_mult={mult} of model_channels={self.model_channels} makes"
                    f" {mult * self.model_channels:g} channels; expected from 1 to"
                    f" {_MOST_CHANNELS:,}"
                )
        blocks = 2 * len(self.channel_mult) * self.num_res_blocks
        if blocks > MOST_BLOCKS:
            raise ConfigError(
                f"num_res_blocks={self.num_res_blocks} at {len(self.channel_mult)} levels makes"
                f" {blocks} blocks; expected at most {MOST_BLOCKS}"
            )
        if self.max_period <= 0:
            raise ConfigError(f"max_period={self.max_period} has to be positive")
        if self.norm_eps <= 0:
            raise ConfigError(f"norm_eps={self.norm_eps} has to be positive")
        if self.freq_shift and self.freq_shift >= self.model_channels // 2:
            raise ConfigError(
                f"freq_shift={self.freq_shift} has to be below model_channels // 2,"
                f" {self.model_channels // 2}"
            )
        if self.downsample_padding not in (0, 1):
            raise ConfigError(f"downsample_padding={self.downsample_padding}; choose one of 0, 1")
        if self.decoder_attention not in ("all", "last"):
            raise ConfigError(
                f"decoder_attention={self.decoder_attention} is unknown; choose one of all, last"
            )
        for name in ("num_heads", "num_head_channels", "num_heads_upsample", "stem_channels"):
            value = getattr(self, name)
            if value < 1 and value != -1:
                raise ConfigError(f"{name}={value}; expected at least 1, or -1")
        if self.num_classes is not None and self.num_classes < 1:
            raise ConfigError(f"num_classes={self.num_classes}; expected at least 1, or null")
        factors = [2**level for level in range(len(self.channel_mult))]
        own = self.attention_resolutions
        of_context = () if self.context_resolutions == own else self.context_resolutions
        for option, values in (("attention_resolutions", own), ("context_resolutions", of_context)):
            for value in values:
                if value not in factors:
                    warnings.warn(
                        f"{option} has {value}, which is none of this model's "
                        f"downsampling factors {factors}: it has no effect",
                        stacklevel=3,
                    )

    def _check_inputs(self, x: Tensor, t: Tensor, given: Given, rng: Tensor | None) -> None:
        if x.ndim != 4 or x.shape[3] != self.in_channels:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; expected [N, H, W, {self.in_channels}]"
            )
        if not x.is_contiguous():
            raise ValueError(f"x has strides {x.stride()}; expected contiguous NHWC")
        n, h, w, _ = x.shape
        factor = 2 ** (len(self.channel_mult) - 1)
        if h % factor or w % factor:
            raise ValueError(f"x is {h}x{w} pixels; both have to be multiples of {factor}")
        if not isinstance(t, Tensor):
            raise ValueError(f"t is {t!r}; expected a tensor of shape ({n},)")
        if t.shape != (n,):
            raise ValueError(f"t has shape {tuple(t.shape)}; expected ({n},)")
        self.check_given(given, n)
        if self.training and rng is None:
            for name in ("dropout", "label_dropout"):
                if getattr(self, name) > 0:
                    raise ValueError(
                        f"{name}={getattr(self, name)} in training needs rng (seed, step)"
                    )

    def check_given(self, given: Given, n: int, waits: bool = False) -> None:
        """ValueError: labels, vectors or contexts are missing or not wanted, or not of N samples;
        or a label is no class, which is looked up on the CPU, where looking costs nothing, or, if
        it `waits`, anywhere."""
        more = parts_of(given)
        labels, vector = more.labels, more.vector
        if self.num_classes is None:
            if labels is not None:
                raise ValueError("labels were given, but the model has no classes (num_classes)")
        elif labels is None:
            raise ValueError(f"labels are missing; the model has num_classes={self.num_classes}")
        elif labels.shape != (n,) or labels.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, of {labels.dtype}; expected int64 ({n},)"
            )
        elif (waits or labels.device.type == "cpu") and n > 0 and not is_traced((labels,)):
            low, high = map(int, labels.aminmax())
            if low < 0 or high >= self.label_emb.num_embeddings:
                raise ValueError(
                    f"labels lie in [{low}, {high}];"
                    f" expected [0, {self.label_emb.num_embeddings - 1}]"
                )
        if (vector is None) != (self.vector_dim == 0):
            found = "missing" if vector is None else "given"
            raise ValueError(f"a vector is {found}; the model has vector_dim={self.vector_dim}")
        if vector is not None and vector.shape != (n, self.vector_dim + 1):
            raise ValueError(
                f"vectors have shape {tuple(vector.shape)}; expected ({n}, {self.vector_dim} + 1)"
            )
        self._check_context(more, n)

    def _check_context(self, given: Conditions, n: int) -> None:
        context, present = given.context, given.present
        if (context is None) != (self.context_dim == 0) or (context is None) != (present is None):
            found = "missing" if context is None or present is None else "given"
            raise ValueError(f"a context is {found}; the model has context_dim={self.context_dim}")
        if context is None:
            return
        tokens = context.shape[1] if context.ndim > 1 else 0
        if context.shape != (n, tokens, self.context_dim) or tokens == 0:
            raise ValueError(
                f"contexts have shape {tuple(context.shape)};"
                f" expected ({n}, 1 + L, {self.context_dim}), the first a null token"
            )
        if present.shape != (n, tokens):
            raise ValueError(
                f"present has shape {tuple(present.shape)}; expected ({n}, {tokens}), a number for"
                " each token"
            )


class _Layers:
    """Makes the layers of a UNet with its options; errors have the names that they will have."""

    def __init__(self, unet: UNet, emb_channels: int, zero_init: bool) -> None:
        self.unet, self.emb_channels = unet, emb_channels
        self.common = {
            "num_groups": unet.num_groups,
            "norm_eps": unet.norm_eps,
            "zero_init": zero_init,
            "backend": unet.backend,
        }
        self.res_blocks = 0  # so far: they number the dropout masks

    def res_block(
        self, name: str, channels: int, out: int, resample: str | None = None
    ) -> ResBlock:
        self._check_groups(name, channels, out)
        block = ResBlock(
            channels,
            out,
            self.emb_channels,
            dropout=self.unet.dropout,
            dropout_layer=self.res_blocks,
            use_scale_shift_norm=self.unet.use_scale_shift_norm,
            resample=resample,
            resample_projection=self.unet.resample_projection,
            **self.common,
        )
        self.res_blocks += 1
        return block

    def attentions(self, name: str, channels: int, level: int, heads: int) -> list[nn.Module]:
        """Those behind the first layer of a block of this level."""
        layers: list[nn.Module] = []
        if 2**level in self.unet.attention_resolutions:
            layers.append(self.attention(f"{name}.1", channels, heads))
        if 2**level in self.unet.context_resolutions:
            layers.append(self.cross_attention(f"{name}.{1 + len(layers)}", channels, heads))
        return layers

    def attention(self, name: str, channels: int, heads: int) -> AttentionBlock:
        order = "qkv_heads" if self.unet.use_new_attention_order else "heads_qkv"
        heads = self._heads(name, channels, heads)
        return AttentionBlock(channels, heads, order=order, **self.common)

    def cross_attention(self, name: str, channels: int, heads: int) -> CrossAttentionBlock:
        heads = self._heads(name, channels, heads)
        return CrossAttentionBlock(channels, self.unet.context_dim, heads, **self.common)

    def _heads(self, name: str, channels: int, heads: int) -> int:
        self._check_groups(name, channels)
        if (of_head := self.unet.num_head_channels) != -1:
            return _divide(name, channels, "num_head_channels", of_head)
        _divide(name, channels, "num_heads", heads)
        return heads

    def _check_groups(self, name: str, *channels: int) -> None:
        for c in channels:
            _divide(name, c, "num_groups", self.unet.num_groups)


def _divide(name: str, channels: int, option: str, value: int) -> int:
    """channels // value, or a ConfigError that names the layer and the option."""
    if value < 1 or channels % value:
        raise ConfigError(f"{option}={value} does not divide the {channels} channels of {name}")
    return channels // value
