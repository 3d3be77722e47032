"""The rows of the forward pass, in the order in which they are applied."""

from .by_pytorch import AS_IT_IS_READ, WHERE_IT_LIES, cat_as_it_is_read
from .casts import WHERE_IT_IS_READ, cast_where_it_is_made
from .elementwise import ONE_PASS
from .epilogue import added, epilogue_add, epilogue_factor, partials, terms_together
from .few_channels import few_inputs, few_outputs
from .norms import dropped_pass, table_and_pass
from .resampled import conv_upsampled, halved, norm_of_upsampled
from .rewrite import NOT_IN_A_STEP, Row

FORWARD_ROWS = (
    Row(
        "few channels of an image padded", ("conv",), few_inputs,
        "2.2 to 3.0 % of an evaluation, 0.3 of a step of 32 images, 1.1 of 128 (H100)",
    ),
    Row(
        "few channels of a result padded", ("conv",), few_outputs,
        "0.5 to 1.5 % of an evaluation of 1 to 64 images (H100)",
    ),
    Row(
        "1x1 terms one after the other", ("add",), terms_together,
        "2.1 % of a pass of 32 images"
    ),
    Row(
        "embedding, residual and 1x1 skip in the epilogue", ("add",), epilogue_add,
        "16.0 % of a pass of 32 images"
    ),
    Row(
        "a number in the epilogue", ("affine",), epilogue_factor,
        "15.9 % of 64 images by EDM's DDPM++, 6.7 of a step of them with the number in dx",
        ("train", "sample"),
    ),
    Row("sums in the epilogue", ("moments",), partials, "4.9 % of a pass of 32 images"),
    Row(
        "dropout in the norm's pass", ("dropout",), dropped_pass,
        "0.2 % of a step of adm64 at 32 images (H100)", ("train", "step")
    ),
    Row(
        "table and pass of a norm in one node", ("norm_apply",), table_and_pass,
        "0.65 % of a step of 32 images, 0.4 of 128"
    ),
    Row(
        "a convolution that halves the image", ("conv",), halved,
        "1.7 % of a step of ddpm_cifar10 at 64 images: where zeros are behind the image",
        ("train", "step")
    ),
    Row(
        "upsampling in the norm's pass", ("norm",), norm_of_upsampled,
        "1.8 % of a step of 32 images, 4.3 of 128 (H100)", ("train", "step")
    ),
    Row(
        "multiplied on the small image", ("conv_fused",), conv_upsampled,
        "1.3 % of a step of 32 images, 2.9 of 128", ("train", "step")
    ),
    Row(
        "added behind a norm", ("add",), added,
        "4.5 % of a step of denoising_diffusion at 64 images, with PyTorch's AdamW"
    ),
    Row(
        "concatenations as they are read", ("cast",), cat_as_it_is_read,
        "0.7 % of a step of denoising_diffusion at 64 images, with PyTorch's AdamW", NOT_IN_A_STEP
    ),
    Row(
        "a norm writes what it is cast to", ("cast",), cast_where_it_is_made,
        "1.1 % of a step of DiffAE's UNet at 16 images of 128x128 (predicted)", ("train",)
    ),
    WHERE_IT_IS_READ,
    ONE_PASS,
    AS_IT_IS_READ,
    WHERE_IT_LIES,
)  # fmt: skip
