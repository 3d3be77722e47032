"""What one pass over memory computes of each element: a list of steps.

A step is (operation, a, b, p, q): an operation, the places of its operands among the tensors that
are read and the results of the steps before, and two numbers.
"""

import torch

ADD, MUL, DIV, AFFINE, CLAMP, CLAMP_GRAD, ACT, ACT_GRAD, ROUND = range(9)
"""
    ADD          a + b
    MUL          a b
    DIV          a / b
    AFFINE       p a + q
    CLAMP        min(max(a, p), q)
    CLAMP_GRAD   a where p <= b <= q, else 0      the gradient of CLAMP of b, given a
    ACT          act(a), of the p-th of `activations.ACTIVATIONS`
    ACT_GRAD     a act'(b), likewise
    ROUND        a, rounded to the p-th of `ROUNDED`
"""

ROUNDED = (torch.bfloat16, torch.float16, torch.float32)

Step = tuple[int, int, int, float, float]

ALL, OF_CHANNELS, OF_IMAGES, OF_PIXELS, ONE = range(5)
"""What a tensor has, of [N, P, C] images of P pixels: all of it, or less that is read again: [C],
[N, C], [N, P], or one number."""

MOST_READ, MOST_WRITTEN, MOST_STEPS = 8, 4, 32
