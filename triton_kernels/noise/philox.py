"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011), as jit functions for use inside kernels.

A random word is a pure function of where it is used, so no generator state exists anywhere:

    key      (low 32 bits of seed, high 32 bits of seed)
    counter  c0 = element // 4 within the sample, counted in [H, W, C] order
             c1 = sample, the global index (place in the global batch; image number when sampling)
             c2 = step   (training step; step of the reverse process when sampling)
             c3 = stream | layer << 8, one of the constants below

One evaluation gives four words w0..w3 and serves elements 4*c0 .. 4*c0 + 3.
`reference.random_words` draws the same words with PyTorch integers.

    uniform in [0, 1)  u = (w >> 8) * 2^-24
    normal             r = sqrt(-2 ln(((w_even >> 8) + 1) * 2^-24)),  a = 2 pi (w_odd >> 8) * 2^-24
                       (n_even, n_odd) = (r cos a, r sin a)           (Box and Muller, 1958)
"""

import torch
import triton
import triton.language as tl

BLOCK = 256  # evaluations of a program of four warps that draws

TIMESTEP = 0  # the timestep of a training sample
FLIP = 1  # whether a training sample is mirrored
NOISE = 2  # epsilon of the forward process
INITIAL = 3  # x_T of the reverse process
REVERSE = 4  # z of the reverse process
DROPOUT = 5  # with the layer's number in the upper bits
ORDER = 6  # the order of the data in an epoch (c1 = 0, c2 = epoch)
LABEL_DROP = 7  # whether a training sample loses its label
LATENT = 8  # the code of a training sample, from its moments
KNOWN = 9  # of what is known of an image in the reverse process

_2_POW_MINUS_24 = tl.constexpr(2.0**-24)
_TWO_PI_2_POW_MINUS_24 = tl.constexpr(6.283185307179586 * 2.0**-24)


def check_rng(rng: torch.Tensor) -> None:
    """Raise ValueError unless `rng` is an int64 tensor [2], contiguous: seed and step."""
    if rng.dtype != torch.int64 or rng.shape != (2,) or not rng.is_contiguous():
        raise ValueError(
            f"rng is {rng.dtype} of shape {tuple(rng.shape)}; "
            "expected contiguous int64 [2]: seed, step"
        )


@triton.jit
def philox_words(seed, step, sample, quad, stream):
    """Four uint32 words for each quad. `seed`: int64; `quad`: int32 tensor; the rest broadcast to
    it."""
    zero = quad * 0
    c0 = quad.to(tl.uint32, bitcast=True)
    c1 = (zero + sample.to(tl.int32)).to(tl.uint32, bitcast=True)
    c2 = (zero + step.to(tl.int32)).to(tl.uint32, bitcast=True)
    c3 = (zero + stream).to(tl.uint32, bitcast=True)
    return tl.philox(seed, c0, c1, c2, c3)


@triton.jit
def box_muller(w_even, w_odd):
    """Two independent standard normals, float32, from two uint32 words."""
    u = ((w_even >> 8).to(tl.float32) + 1.0) * _2_POW_MINUS_24
    r = tl.sqrt(-2.0 * tl.log(u))
    # The angle is the integer k / 2^24 of a turn, so its reduction to j quarters and a rest within
    # an eighth of a turn is exact, and short polynomials (Moshier, Cephes: sinf, cosf) reach 1 ulp.
    # tl.cos would bring the reduction of huge arguments with it, and with that local memory.
    k = (w_odd >> 8).to(tl.int32)
    j = (k + (1 << 21)) >> 22
    x = (k - (j << 22)).to(tl.float32) * _TWO_PI_2_POW_MINUS_24
    x2 = x * x
    sin = ((-1.9515295891e-4 * x2 + 8.3321608736e-3) * x2 - 1.6666654611e-1) * x2 * x + x
    cos = (2.443315711809948e-5 * x2 - 1.388731625493765e-3) * x2 + 4.166664568298827e-2
    cos = (cos * x2 - 0.5) * x2 + 1.0
    odd_quarter = (j & 1) == 1
    cos_a = tl.where(odd_quarter, sin, cos)
    sin_a = tl.where(odd_quarter, cos, sin)
    cos_a = tl.where(((j + 1) & 2) == 2, -cos_a, cos_a)
    sin_a = tl.where((j & 2) == 2, -sin_a, sin_a)
    return r * cos_a, r * sin_a


@triton.jit
def normals(seed, step, sample, quad, stream):
    """Standard normals of the elements 4 * quad[0] and up: float32 [4 * BLOCK] for `quad`
    [BLOCK]."""
    w0, w1, w2, w3 = philox_words(seed, step, sample, quad, stream)
    z0, z1 = box_muller(w0, w1)
    z2, z3 = box_muller(w2, w3)
    return tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))
