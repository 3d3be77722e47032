"""Convolutions for Hopper in Gluon, where shared memory, barriers and products are written out.

    launcher     serves                         kernels
    row_mma      the fused network; weight      stationary_weights (64 channels, rows of 64 pixels;
                 gradients of public `conv2d`   the stem, too), row_wgrad (the weight gradient)
    tile_mma     the fused network              tile_mma_kernels (rows of 4 to 64 pixels)
    narrow       the head of that network       narrow_output (from 64 channels or 128 to 16)
    unfused      public `conv2d`                unfused_tiles (3x3 filters, TF32 too),
                                                unfused_pointwise (1x1: filters that stay),
                                                unfused_single_tile (1x1, few tiles: a program
                                                does one and asks for all it needs at once; and
                                                an input gradient in TF32)
    mma_wgrad    float32 and TF32 weight        mma_wgrad_kernel
                 gradients of public `conv2d`

`operands` is what launchers share; `row_memory`, `tile_mma_loop` and `epilogue` what kernels do,
besides `triton_kernels.hopper`.
"""
