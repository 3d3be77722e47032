"""The rows of the backward pass, in the order in which they are applied."""

from .by_pytorch import AS_IT_IS_READ, attention_without_kernels, cast_of_parts, side_by_side
from .casts import WHERE_IT_IS_READ, cast_where_it_is_made
from .elementwise import ONE_PASS
from .epilogue import added
from .few_channels import few_channels
from .norms import (
    NORM_DX,
    coefficients,
    embedding_sums,
    factor_of_dx,
    input_grad,
    input_grad_of_activation,
    rows_of_dx,
    skip_dx,
    two_summands,
)
from .parameter_grads import bias_sums, exact_weight_grad, exact_weight_grad_of_norm
from .products import halves_of_dx
from .resampled import halved, pool_grad, pooled_dx, small_input_grad, small_plain_grad
from .rewrite import NOT_IN_A_STEP, Row

BACKWARD_ROWS = (
    Row(
        "attention without kernels by PyTorch", ("attention_grad",), attention_without_kernels,
        "float32 heads of 257 to 512 channels, whose gradient takes 128 KiB of shared memory"
    ),
    Row(
        "act' and sums in the input gradient", ("norm_act_grad",), input_grad,
        "17.1 % of a step of 32 images, 17.3 of 128 (H100)"
    ),
    Row(
        "act' in the input gradient of a layer", ("act_grad",), input_grad_of_activation,
        "3.0 % of a step of DiT-B/2 at 32 images, 2.9 of U-ViT-S/2 at 128 (predicted)", ("train",)
    ),
    Row(
        "sums of dx from the norm's", ("sum",), embedding_sums,
        "10.3 % of a step of 32 images, 6.4 of 128 (H100)"
    ),
    Row(
        "other gradients added in dx", ("add",), added,
        "13.7 % of a step of 32 images, 18.4 of 128 (H100)"
    ),
    Row(
        "both of two other gradients", ("norm_dx",), two_summands,
        "0.95 % of a step of 32 images, 1.0 of 128 (H100)"
    ),
    Row(
        "gradient of 1x1 skips in dx", ("norm_dx",), skip_dx,
        "17.5 -> 17.2 ms a step of 128 images, when it was added"
    ),
    # these change what the sums of dx below are of
    Row(
        "few channels of a gradient padded", ("conv_input_grad", "conv_dw", "sum"),
        few_channels, "0.35 % of a step of 32 images, 1.7 of 128 (H100)"
    ),
    Row(
        "a quarter to each of 2x2 pixels", ("upsample",), pool_grad,
        "0.3 % of a step of 32 images, 2.2 of 128 (H100)"
    ),
    Row(
        "dx of what halves the image", ("conv_dx",), halved,
        "4.2 % of a step of ddpm_cifar10 at 64 images"
    ),
    Row(
        "added while it is resampled", ("add",), added,
        "1.3 % of a step of 32 images, 0.4 of 128 (H100)"
    ),
    Row(
        "dx added up over 2x2 pixels", ("sum_pool",), pooled_dx,
        "2.0 % of a step of 32 images, 4.1 of 128 (H100)"
    ),
    Row(
        "dx multiplied on the small image", ("conv_input_grad",), small_input_grad,
        "with the forward pass, see there"
    ),
    Row(
        "dx of a convolution alone on the small image", ("sum_pool",), small_plain_grad,
        "with the forward pass, see there"
    ),
    Row(
        "a number in dx", ("affine",), factor_of_dx,
        "with the number in the epilogue, see there", ("train",)
    ),
    Row(
        "sums of dx while it is written", ("sum",), rows_of_dx,
        "5.3 % of a step of 32 images, 6.0 of 128 (H100)"
    ),
    Row("gradients of weights in float32", ("cast",), exact_weight_grad, "not rounded twice"),
    Row(
        "gradients of normed filters in float32", ("channel_norm_grad",), exact_weight_grad_of_norm,
        "one copy of the filters of a step of EDM2, and not rounded twice", ("train",)
    ),
    Row(
        "sums for biases together", ("sum",), bias_sums,
        "with the padded channels: 18.3 % of a step of 32 images, 7.8 of 128 (H100)",
        ("train", "step")
    ),
    Row(
        "parts cast where they are read", ("slice",), cast_of_parts,
        "0.8 % of a step of denoising_diffusion at 64 images, with PyTorch's AdamW", NOT_IN_A_STEP
    ),
    Row(
        "gradients of halves are products of their own", ("slice",), halves_of_dx,
        "2.0 % of a step of denoising-diffusion-pytorch's UNet at 64 images of 64x64 (predicted)",
        ("train",)
    ),
    Row(
        "a norm's dx is written as it is cast", ("cast",), cast_where_it_is_made,
        "0.6 % of a step of DiffAE's UNet at 16 images of 128x128 (predicted)", ("train",)
    ),
    WHERE_IT_IS_READ,
    Row(
        "coefficients and dx in one node", NORM_DX, coefficients,
        "0.85 % of a step of 32 images, 0.6 of 128", ("train", "step")
    ),
    Row(
        "gradients of an embedding side by side", ("cat",), side_by_side,
        "107 of 632 launches of a step of k-diffusion's UNet (predicted)", ("train",)
    ),
    ONE_PASS,
    AS_IT_IS_READ,
)  # fmt: skip
