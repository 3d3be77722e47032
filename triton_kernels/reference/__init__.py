"""Every public op in plain PyTorch, under the same name and signature.

This file is the specification of the Triton kernels and the backend on machines without a GPU. It
may call whatever PyTorch has; the kernel files may not. Layout and names of dimensions are those of
`triton_kernels.__init__`: activations are contiguous [N, H, W, C].
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..noise.philox import DROPOUT, FLIP, KNOWN, NOISE, REVERSE, TIMESTEP
from ..tf32 import rounded_to_tf32

ACTIVATION_FUNCTIONS = {
    "identity": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
}


# --- layers ---------------------------------------------------------------------------------------


def conv2d(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S], channels_last in memory
    bias: Tensor | None = None,  # [CO]
    *,
    stride: int = 1,
    padding: int | tuple[int, int] | None = None,  # None: (R // 2, S // 2)
    allow_tf32: bool = False,  # here a global setting of PyTorch decides
) -> Tensor:  # [N, P, Q, CO], dtype of x
    """Cross-correlation in x.dtype with float32 accumulation; gradients come in their tensor's
    dtype."""
    if padding is None:
        padding = (weight.shape[2] // 2, weight.shape[3] // 2)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    # PyTorch adds up in float16 there; in bfloat16 a CPU without instructions for it rounds twice
    if x.itemsize == 2 and x.device.type == "cpu":
        weight, bias = weight.float(), None if bias is None else bias.float()
    y = F.conv2d(_nchw(x.to(weight.dtype)), weight, bias, stride, padding)
    return _nhwc(y).to(x.dtype)


def group_norm(
    x: Tensor,  # [N, H, W, C], or [N, H, W, C1] with x2
    num_groups: int,
    weight: Tensor | None = None,  # [C]
    bias: Tensor | None = None,  # [C]
    *,
    eps: float = 1e-5,
    activation: str = "identity",
    scale: Tensor | None = None,  # [N, C]
    shift: Tensor | None = None,  # [N, C]
    x2: Tensor | None = None,  # [N, H, W, C2]; C is then C1 + C2
) -> Tensor:  # [N, H, W, C], dtype of x
    """act((norm(x) * weight + bias) * (1 + scale) + shift); statistics and arithmetic in float32
    (float64 for float64 input). With `x2` the norm of torch.cat((x, x2), dim=-1)."""
    x = x if x2 is None else torch.cat((x, x2), dim=-1)
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # F.group_norm has no backward for a bias alone
    params = [None if p is None else p.to(dtype) for p in (weight, bias)]
    x_nchw = _nchw(_near_zero(x.to(dtype), num_groups))
    # PyTorch's backward on a CPU crashes (2.13) if weight or bias needs a gradient and a
    # channels_last x does not: then the affine map is an operation of its own. So it is where there
    # is nothing to normalise, which PyTorch 2.15 refuses
    trained = any(p is not None and p.requires_grad for p in params)
    nothing = x.numel() == 0
    apart = params[0] is not None and (nothing or (trained and not x.requires_grad))
    affine = (None, None) if apart else params
    # not F.group_norm, which refuses groups of a single number in a batch of one
    z = x.to(dtype) if nothing else _nhwc(torch.group_norm(x_nchw, num_groups, *affine, eps))
    if apart:
        z = z * params[0] if params[1] is None else z * params[0] + params[1]
    if scale is not None:
        z = z * (1 + scale.to(dtype)[:, None, None, :])
    if shift is not None:
        z = z + shift.to(dtype)[:, None, None, :]
    return ACTIVATION_FUNCTIONS[activation](z).to(x.dtype)


def _near_zero(x: Tensor, num_groups: int) -> Tensor:  # [N, H, W, C]
    """On a CPU x minus about the mean of its group, a constant that changes neither the norm nor
    its gradients: PyTorch's kernel for channels_last tensors computes a variance as E[x^2] - E[x]^2
    and loses as many digits as the mean is larger than the deviation. Its GPU kernels do not."""
    if x.device.type != "cpu":
        return x
    n, _, _, c = x.shape
    width = c // num_groups
    mean = x.detach().mean((1, 2)).view(n, num_groups, width).mean(2)
    return x - mean.repeat_interleave(width, 1)[:, None, None, :]


def channel_norm(
    x: Tensor,  # [N, H, W, C]
    weight: Tensor | None = None,  # [C]
    bias: Tensor | None = None,  # [C]
    *,
    eps: float = 1e-5,
    centred: bool = False,
    eps_in: str = "root",
    activation: str = "identity",
    scale: Tensor | None = None,  # [N, C]
    shift: Tensor | None = None,  # [N, C]
) -> Tensor:  # [N, H, W, C], dtype of x
    """act((norm(x) * weight + bias) * (1 + scale) + shift), over the channels of each pixel, in
    float32 (float64 for float64 input):

        norm(x) = x / sqrt(s + eps)          eps_in="root": RMSNorm, and centred LayerNorm
        norm(x) = x / max(sqrt(s), eps)      eps_in="max": F.normalize, times sqrt(C)
        norm(x) = x / (sqrt(s) + eps)        eps_in="sum"

    with s the mean of x^2 over channels, and x less its mean if it is `centred`."""
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    z = x.to(dtype)
    if centred:
        z = z - z.mean(-1, keepdim=True)
        z = z - z.mean(-1, keepdim=True)  # what the first sum has lost of a large mean
    if eps_in == "root":
        z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    else:  # the gradient of a vector's length is 0 where that is 0
        root = torch.linalg.vector_norm(z, dim=-1, keepdim=True) * x.shape[-1] ** -0.5
        z = z / (root.clamp_min(eps) if eps_in == "max" else root + eps)
    z = z if weight is None else z * weight.to(dtype)
    z = z if bias is None else z + bias.to(dtype)
    rows = (-1, *(1,) * (x.ndim - 2), x.shape[-1])
    z = z if scale is None else z * (1 + scale.to(dtype).reshape(rows))
    z = z if shift is None else z + shift.to(dtype).reshape(rows)
    return ACTIVATION_FUNCTIONS[activation](z).to(x.dtype)


def attention(
    qkv: Tensor,  # [N, T, 3C]
    num_heads: int,
    *,
    order: str = "qkv_heads",
    allow_tf32: bool = False,
) -> Tensor:  # [N, T, C], heads outermost in C
    """softmax(q k^T / sqrt(d)) v per head, d = C // num_heads.

    `order` says how the 3C channels are packed: "qkv_heads" is [3, heads, d] (guided-diffusion's
    new order, unet.cu), "heads_qkv" is [heads, 3, d] (its legacy order).
    """
    n, t, c3 = qkv.shape
    d = c3 // 3 // num_heads
    if order == "qkv_heads":
        q, k, v = qkv.view(n, t, 3, num_heads, d).permute(2, 0, 3, 1, 4)
    else:
        q, k, v = qkv.view(n, t, num_heads, 3, d).permute(3, 0, 2, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c3 // 3)


def cross_attention(
    q: Tensor,  # [N, T, C]
    kv: Tensor,  # [N, L, 2C]: k and v, packed [2, heads, d]
    num_heads: int,
    *,
    mask: Tensor | None = None,  # bool [N, L]: the keys that a sample has; None: all
    allow_tf32: bool = False,
) -> Tensor:  # [N, T, C], heads outermost in C
    """softmax(q k^T / sqrt(d)) v per head, d = C // num_heads, over the keys of the mask; zeros for
    a sample that has none."""
    n, t, c = q.shape
    d = c // num_heads
    k, v = kv.view(n, kv.shape[1], 2, num_heads, d).permute(2, 0, 3, 1, 4)
    seen = None if mask is None else mask[:, None, None, :]
    heads = q.view(n, t, num_heads, d).transpose(1, 2)
    o = F.scaled_dot_product_attention(heads, k, v, attn_mask=seen)
    return o.transpose(1, 2).reshape(n, t, c)


def avg_pool2d(x: Tensor) -> Tensor:  # [N, H, W, C] -> [N, H // 2, W // 2, C]
    """Mean over 2x2 windows; an odd last row or column is dropped."""
    return _nhwc(F.avg_pool2d(_nchw(x), 2))


def upsample_nearest2d(x: Tensor) -> Tensor:  # [N, H, W, C] -> [N, 2H, 2W, C]
    """Each pixel becomes a 2x2 block."""
    return _nhwc(F.interpolate(_nchw(x), scale_factor=2, mode="nearest"))


def dropout(
    x: Tensor,  # [N, H, W, C]
    p: float,
    rng: Tensor,  # int64 [2]: seed, step
    *,
    layer: int,
    first: int = 0,
) -> Tensor:
    """x / (1 - p) where a uniform draw is >= p, else 0. Keyed by (seed, step, first + n, layer)."""
    elements = math.prod(x.shape[1:])
    words = random_words(rng, x.shape[0], elements, DROPOUT | layer << 8, first=first)
    keep = _uniform(words).view(x.shape) >= p
    return torch.where(keep, x * (1 / (1 - p)), 0)


# --- random draws ---------------------------------------------------------------------------------


def random_words(
    rng: Tensor, samples: int, elements: int, stream: int, *, first: int = 0
) -> Tensor:
    """The Philox words of `philox.py` as int64 in [0, 2^32): [samples, elements]."""
    seed, step = rng.unbind()
    mask = 0xFFFFFFFF
    quads = (elements + 3) // 4
    c0 = torch.arange(quads, device=rng.device).expand(samples, quads)
    c1 = (torch.arange(samples, device=rng.device) + first)[:, None].expand(samples, quads) & mask
    c2 = (step & mask).expand(samples, quads)
    c3 = torch.full_like(c0, stream)
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        # int64 products wrap, which leaves both 32-bit halves of the unsigned product in place
        p0, p2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = ((p2 >> 32) & mask) ^ c1 ^ k0
        c2 = ((p0 >> 32) & mask) ^ c3 ^ k1
        c1, c3 = p2 & mask, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.stack((c0, c1, c2, c3), dim=-1).view(samples, quads * 4)[:, :elements]


def normal(
    shape: tuple[int, ...],  # [N, ...]; elements are counted in this order
    rng: Tensor,  # int64 [2]: seed, step
    *,
    stream: int = NOISE,
    first: int = 0,
) -> Tensor:  # float32
    """Standard normal noise; sample n is keyed by (seed, step, first + n, stream) alone."""
    n, elements = shape[0], math.prod(shape[1:])
    words = random_words(rng, n, (elements + 3) // 4 * 4, stream, first=first)
    even = ((words[:, ::2] >> 8) + 1).float() * 2.0**-24
    odd = (words[:, 1::2] >> 8).float() * 2.0**-24
    r, angle = torch.sqrt(-2 * torch.log(even)), odd * (2 * math.pi)
    z = torch.stack((r * torch.cos(angle), r * torch.sin(angle)), dim=-1)
    return z.flatten(1)[:, :elements].reshape(shape).contiguous()


def draw_timesteps(rng: Tensor, n: int, num_timesteps: int, *, first: int = 0) -> Tensor:
    """Uniform timesteps in [0, num_timesteps), int64 [N]: (word * num_timesteps) >> 32."""
    return (random_words(rng, n, 1, TIMESTEP, first=first)[:, 0] * num_timesteps) >> 32


def draw_weighted_timesteps(
    rng: Tensor,  # int64 [2]: seed, step
    n: int,
    ends: Tensor,  # int64 [T], of `record_losses`
    *,
    first: int = 0,
) -> Tensor:  # int64 [N]
    """Timesteps in [0, T): the number of ends that are at most (word * ends[T - 1]) >> 32."""
    words = random_words(rng, n, 1, TIMESTEP, first=first)[:, 0]
    return torch.searchsorted(ends, (words * ends[-1]) >> 32, right=True)


def record_losses(
    losses: Tensor,  # float32 [N]
    t: Tensor,  # int64 [N], in [0, T)
    history: Tensor,  # float32 [H, T], in place: loss number k of a timestep is in row k % H
    counts: Tensor,  # int32 [T], in place: losses so far
    *,
    uniform: float = 0.001,  # u
) -> Tensor:  # int64 [T]
    """Append the losses of a batch to the history, in their order. Returns the running sum of the
    probabilities q_t. Losses that are not finite are skipped."""
    rows, total = history.shape
    finite = torch.isfinite(losses)
    same = (t[:, None] == t) & finite[:, None] & finite  # [N, N]
    row = (counts[t] + same.tril(-1).sum(dim=1)) % rows
    kept = finite & (same.triu(1).sum(dim=1) < rows)  # else it is overwritten in this batch
    # to a place behind the history goes what is not kept
    place = torch.where(kept, row * total + t, rows * total)
    flat = torch.cat((history.flatten(), history.new_zeros(1)))
    history.copy_(flat.index_put((place,), losses)[:-1].view_as(history))
    counts.index_add_(0, t, finite.to(counts.dtype))
    weight = history.square().mean(dim=0).sqrt()
    known = (counts.min() >= rows) & (weight.sum() > 0)
    share = torch.where(known, weight / torch.where(known, weight.sum(), 1), 1 / total)
    share = share * (1 - uniform) + uniform / total
    return torch.cumsum((share * 2**30).long() + 1, dim=0)


def draw_flips(rng: Tensor, n: int, *, first: int = 0) -> Tensor:
    """Fair coins, bool [N]: the top bit of a word."""
    return random_words(rng, n, 1, FLIP, first=first)[:, 0] >= 2**31


# --- diffusion ------------------------------------------------------------------------------------


def gather_images(
    images: Tensor,  # uint8 or float32 [M, H, W, C]
    index: Tensor | None = None,  # int64 [N]; None: all of them, in order
    flip: Tensor | None = None,  # bool [N]
) -> Tensor:  # float32 [N, H, W, C]; uint8 is mapped to x / 127.5 - 1
    """The clean batch x_0."""
    x0 = images if index is None else images[index]
    x0 = x0.float() / 127.5 - 1 if x0.dtype == torch.uint8 else x0
    return x0 if flip is None else torch.where(flip[:, None, None, None], x0.flip(2), x0)


def q_sample(
    images: Tensor,  # uint8 or float32 [M, H, W, C]
    t: Tensor,  # int64 [N]
    table: Tensor,  # float32 [T, 2]: sqrt(alpha_bar), sqrt(1 - alpha_bar)
    rng: Tensor,  # int64 [2]: seed, step
    *,
    first: int = 0,
    index: Tensor | None = None,  # int64 [N]
    flip: Tensor | None = None,  # bool [N]
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # [N, H, W, C], dtype
    """x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) epsilon (Ho et al. 2020, eq. 4)."""
    x0 = gather_images(images, index, flip)
    a, s = table[t].view(-1, 2, 1, 1, 1).unbind(1)
    return (a * x0 + s * normal(x0.shape, rng, first=first)).to(dtype)


def denoise_loss(
    output: Tensor,  # [N, H, W, C] or, with a learned variance, [N, H, W, 2C]
    images: Tensor,  # uint8 or float32 [M, H, W, C]
    t: Tensor,  # int64 [N]
    table: Tensor,  # float32 [T, 2]: sqrt(alpha_bar), sqrt(1 - alpha_bar)
    rng: Tensor,  # int64 [2]: seed, step
    *,
    first: int = 0,
    index: Tensor | None = None,  # int64 [N]
    flip: Tensor | None = None,  # bool [N]
    prediction: str = "epsilon",
) -> Tensor:  # float32 [N]
    """Mean squared error per sample of the first C channels against epsilon, x_0 ("sample") or
    v = sqrt(alpha_bar) epsilon - sqrt(1 - alpha_bar) x_0 ("v_prediction"; Salimans and Ho 2022),
    with the noise of `q_sample` drawn again from its counter. The gradient reaches `output`
    alone."""
    if prediction not in ("epsilon", "sample", "v_prediction"):
        raise ValueError(f"prediction is {prediction!r}; expected epsilon, sample, v_prediction")
    x0 = gather_images(images, index, flip)
    a, s = table[t].view(-1, 2, 1, 1, 1).unbind(1)
    if prediction == "sample":
        target = x0
    else:
        noise = normal(x0.shape, rng, first=first)
        target = noise if prediction == "epsilon" else a * noise - s * x0
    return (output[..., : x0.shape[-1]].float() - target).square().mean(dim=(1, 2, 3))


def denoise_step(
    x: Tensor,  # [N, H, W, C] x_t
    output: Tensor,  # [N, H, W, C or 2C] what the network says
    table: Tensor,  # float32 [K, 8], a row a step of the reverse process; columns below
    row: Tensor,  # int64 [1], on the device
    rng: Tensor,  # int64 [2]: seed, step (the noise of row k is keyed by step = rng[1] + k)
    *,
    first: int | Tensor = 0,  # the number of sample 0, or int64 [1] on the device
    clip: float | None = 1.0,
    memory: Tensor | None = None,  # float32 [N, H, W, C], overwritten with x0
    negative: Tensor | None = None,  # as output: what the network says of what is not wanted
    scales: Tensor | None = None,  # float32 [K], of guidance, with `negative`
    rescale: float = 0.0,  # of its deviation, from 0 to 1
    known: Tensor | None = None,  # float32 [N, H, W, C] x_0 where it is known
    mask: Tensor | None = None,  # float32 [N, H, W]: 1 where it is known, 0 where not; with `known`
    levels: Tensor | None = None,  # float32 [K, 2]: signal and noise behind each step
) -> Tensor:  # float32 [N, H, W, C] x_(t-1)
    """One step of the reverse process in its general linear form:

        x0     = clip(a x + b output)
        x_prev = c x0 + d x + e output + sigma z

    The columns of `table` are a, b, c, d, e, sigma, log_min, log_max. If `output` has 2C channels,
    its second half v sets the deviation (Nichol and Dhariwal 2021, eq. 15):
    sigma' = sigma exp((f log_max + (1 - f) log_min) / 2), f = (v + 1) / 2.
    With `memory`, for solvers of second order, e multiplies what it holds instead of `output`: the
    x0 of the step before. Epsilon, x_0 and v prediction, DDPM and DDIM differ in the constants only
    (`diffusion.sampling.sampler`). With `negative` the first C channels of the output are first

        g = negative + scale (output - negative)
        output = g (rescale std(output) / std(g) + 1 - rescale)

    (Ho and Salimans 2022; Lin et al. 2023, section 3.4, std over a sample), and as they are where
    the scale is 1. With `known` the result is, behind the rest,

        mask signal known + (1 - mask) x_prev + (mask (2 - mask))^(1/2) noise epsilon

    epsilon being drawn: eq. 8 of Lugmayr et al. (2022) where the mask is 0 or 1, and between them
    still of the level's noise.
    """
    c = x.shape[-1]
    a, b, c0, d, e, sigma, log_min, log_max = table.index_select(0, row)[0].unbind()
    dtype = torch.promote_types(x.dtype, torch.float32)  # float64 is for tests
    x, output = x.to(dtype), output.to(dtype)
    out = output[..., :c]
    if negative is not None:
        out = _guided(out, negative[..., :c].to(dtype), scales.index_select(0, row), rescale)
    x0 = a * x + b * out
    if clip is not None:
        x0 = x0.clamp(-clip, clip)
    if output.shape[-1] == 2 * c:
        f = (output[..., c:] + 1) / 2
        sigma = sigma * torch.exp(0.5 * (f * log_max + (1 - f) * log_min))
    step_rng = torch.stack((rng[0], rng[1] + row[0]))
    z = normal(x.shape, step_rng, stream=REVERSE, first=first).to(dtype)
    other = out if memory is None else memory.clone()
    if memory is not None:
        memory.copy_(x0)
    x_prev = c0 * x0 + d * x + e * other + sigma * z
    if known is None:
        return x_prev
    signal, noise = levels.index_select(0, row)[0].unbind()
    epsilon, mask = normal(x.shape, step_rng, stream=KNOWN, first=first), mask[..., None]
    drawn = mask * signal * known + (1 - mask) * x_prev
    return drawn + (mask * (2 - mask)).sqrt() * noise * epsilon


def _guided(out: Tensor, negative: Tensor, scale: Tensor, rescale: float) -> Tensor:
    """Of [N, H, W, C] by a scale [1]."""
    guided = torch.where(scale == 1, out, negative + scale * (out - negative))
    if rescale == 0:
        return guided
    wanted, found = (
        (y - y.mean((1, 2, 3), keepdim=True)).square().sum((1, 2, 3), keepdim=True)
        for y in (out, guided)
    )
    ratio = torch.where(found > 0, wanted / torch.where(found > 0, found, 1), 1).sqrt()
    return guided * (rescale * ratio + 1 - rescale)


# --- optimizer ------------------------------------------------------------------------------------


def grad_norm(grad: Tensor) -> Tensor:  # float32 [P] -> float32 [1]
    """Euclidean norm of the flat gradient. Tensor.norm adds up one by one on a CPU, and is 2 % off
    after 10^8 numbers; `sum` adds up pairs of sums."""
    return grad.square().sum().sqrt().view(1)


def adamw_step(
    param: Tensor,  # float32 [P], updated in place
    grad: Tensor,  # float32 [P]
    exp_avg: Tensor,  # float32 [P], in place
    exp_avg_sq: Tensor,  # float32 [P], in place
    ema: Tensor,  # float32 [P], in place
    norm: Tensor,  # float32 [1], of the whole gradient
    hyper: Tensor,  # float64 [9]: lr, beta1, beta2, eps, weight_decay, bias_correction1,
    #                 bias_correction2, ema_decay, max_norm (0: no clipping)
    skipped: Tensor,  # int32 [1], counts the steps left out, in place
    shadow: Tensor | None = None,  # [P], gets the new param in 16 bits, or float32 rounded to TF32
) -> None:
    """Clip, AdamW (Loshchilov and Hutter 2019) and EMA over all parameters at once. If `norm` is
    not finite nothing is touched but the count."""
    dtype = param.dtype
    lr, _, beta2, eps, weight_decay = hyper[:5].to(dtype).unbind()
    correction1, correction2, _, max_norm = hyper[5:].to(dtype).unbind()
    rises = (1 - hyper).to(dtype)  # 1 - 0.999 in float32 is off by 1e-5 of itself
    rise1, rise2, ema_rise = rises[1], rises[2], rises[7]
    finite = torch.isfinite(norm)
    clip = torch.where(max_norm > 0, (max_norm / (norm + 1e-6)).clamp(max=1), 1)
    grad = grad * clip
    new_avg = exp_avg.lerp(grad, rise1)
    new_avg_sq = exp_avg_sq * beta2 + grad * grad * rise2
    denominator = new_avg_sq.sqrt() / correction2.sqrt() + eps
    new_param = param * (1 - lr * weight_decay) - lr / correction1 * (new_avg / denominator)
    new_ema = ema.lerp(new_param, ema_rise)
    for old, new in (
        (exp_avg, new_avg),
        (exp_avg_sq, new_avg_sq),
        (param, new_param),
        (ema, new_ema),
    ):
        old.copy_(torch.where(finite, new, old))
    if shadow is not None:
        low = rounded_to_tf32(new_param.float()) if shadow.dtype == torch.float32 else new_param
        shadow.copy_(torch.where(finite, low, shadow))
    skipped += ~finite


# --- layout ---------------------------------------------------------------------------------------


def _nchw(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def _nhwc(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous()


def _uniform(words: Tensor) -> Tensor:
    return (words >> 8).float() * 2.0**-24
