"""Triton kernels for training and sampling diffusion UNets.

Names of dimensions, used in every file:

    N        samples (images) in the batch
    H, W     rows and columns of the input image     P, Q   rows and columns of the output image
    C        channels                                CI, CO channels in and out of a convolution
    R, S     rows and columns of a convolution's filter
    G        groups of a GroupNorm                   T      positions of an attention, or timesteps
    d        channels of one attention head          M      images in a data set

Layout: activations are contiguous [N, H, W, C] ("NHWC"), without exception. A launcher asserts it and
never copies silently. Convolution weights have PyTorch's shape [CO, CI, R, S] in channels_last memory,
which is [CO, R, S, CI] to the kernels. 1-D data is the same with H = 1.
"""
