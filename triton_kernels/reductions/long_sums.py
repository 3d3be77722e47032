"""How long a sum may be in the accumulators of tensor cores.

A tensor core adds a product of 16 pixels (16-bit numbers) or of 8 (TF32) to a float32 accumulator
and cuts off what does not fit, towards zero. That takes half a unit of the last place on average.
A unit is between 2^-24 and 2^-23 of the number, 0.72 x 2^-23 averaged over mantissas, so a product
takes e = 0.36 x 2^-23 of what the sum is at that time. The running sums of S products add up to
S / sqrt(3) of the last one if it is a random walk, and to S / 2 if it only grows:

    error(S) = S e / sqrt(3) = 2.5e-8 S    of the sum, always towards zero

It does not average out, and a weight gradient adds over every pixel of the batch: 10,922 products
were 2.4e-4 off on an H200. So no part of a sum has more than MOST_PRODUCTS, which is 7.5e-5 for any
batch. Rounding the operands is 1.6e-3 of a sum if they are bfloat16, 2e-4 if they are float16 or
TF32. Parts are added up in float32, rounded to the nearest, where errors do average out.

More parts are more programs, whose kernels know nothing of it. What a part costs, to be written and
read once, is 2.5 % of the time of MOST_PRODUCTS at the peak rates of an H100, at most; of 3,072 the
launches of unet64 are what they were without this, up to 128 images.
"""

import math

import torch

MOST_PRODUCTS = 3072


def fewest_parts(
    pixels: int,  # of a sum
    dtype: torch.dtype,  # of the operands
    precision: str = "tf32",  # of float32; "ieee" is three products, which are added up elsewhere
) -> int:
    """Into how many parts to cut a sum over pixels, at least."""
    if dtype == torch.float32 and precision == "ieee":
        return 1
    pixels_of_product = 8 if dtype == torch.float32 else 16
    return max(1, math.ceil(pixels / (pixels_of_product * MOST_PRODUCTS)))
