"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011), as jit functions for use inside kernels.

A random word is a pure function of where it is used, so no generator state exists anywhere:

    key      (low 32 bits of seed, high 32 bits of seed)
    counter  c0 = element // 4 within the sample, counted in [H, W, C] order
             c1 = sample, the global index (position in the global batch; image number when sampling)
             c2 = step   (training step; step of the reverse process when sampling)
             c3 = stream | layer << 8, one of the constants below

One evaluation gives four words w0..w3 and serves elements 4*c0 .. 4*c0 + 3.
`reference.random_words` draws the same words with PyTorch integers.

    uniform in [0, 1)  u = (w >> 8) * 2^-24
    normal             r = sqrt(-2 ln(((w_even >> 8) + 1) * 2^-24)),  a = 2 pi (w_odd >> 8) * 2^-24
                       (n_even, n_odd) = (r cos a, r sin a)           (Box and Muller, 1958)
"""

import triton
import triton.language as tl

TIMESTEP = 0  # the timestep of a training sample
FLIP = 1  # whether a training sample is mirrored
NOISE = 2  # epsilon of the forward process
INITIAL = 3  # x_T of the reverse process
REVERSE = 4  # z of the reverse process
DROPOUT = 5  # with the layer's number in the upper bits
ORDER = 6  # the order of the data in an epoch (c1 = 0, c2 = epoch)

_TWO_PI = tl.constexpr(6.283185307179586)
_2_POW_MINUS_24 = tl.constexpr(2.0**-24)


@triton.jit
def philox_words(seed, step, sample, quad, stream):
    """Four uint32 words for each quad. `seed`: int64; `quad`: int32 tensor; the rest broadcast to it."""
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
    angle = (w_odd >> 8).to(tl.float32) * (_2_POW_MINUS_24 * _TWO_PI)
    r = tl.sqrt(-2.0 * tl.log(u))
    return r * tl.cos(angle), r * tl.sin(angle)
