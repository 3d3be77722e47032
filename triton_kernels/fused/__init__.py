"""The kernels of the planned network: `ops` lists them, `reference` is each of them in PyTorch.

Words in their names say how a kernel cuts its work, and so when it is the one to take:

    fold    a norm's table and its pass are one launch. In training, where the partial sums of an
            image are few; elsewhere `norm_tables` and `norm_passes` are two.
    whole   a program has whole groups of an image in registers, and needs no sums from before.
            Sampling, where an image has few pixels or its convolution is in parts.
    few     of up to 4 images: a program asks for all that it reads at once, statistics too.
    early   likewise, and for its filters before it waits for the launch in front of it. Sampling
            of up to 4 images; of more, or in training, `conv` loops over tiles.
    split   a convolution leaves its sum in parts, which the norm behind it adds. Sampling, where
            whole tiles would leave multiprocessors idle (`conv_split.worth_splitting`).

`serves_...`, `..._pays` and `worth_...` beside each of them decide, and `diffusion.plan` asks.
"""
