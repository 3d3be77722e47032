"""Convolutions for Hopper in Gluon, where shared memory, barriers and products are written out.

    launcher   serves                         kernels
    rows       the fused network; weight      rows_kernels (rows of 64 pixels), resident (the
               gradients of public `conv2d`   filters stay in shared memory; the stem, too),
                                              rows_wgrad (the weight gradient)
    tiles      the fused network              tiles_kernels (rows of 4 to 64 pixels)
    narrow     the head of that network       narrow_out (from 64 channels or 128 to 16), head (of
                                              act(norm(x)), in sampling)
    bare       public `conv2d`                bare_tiles (3x3 filters), bare_tiles_tf32 (in TF32),
                                              bare_points (1x1), bare_once (1x1, few tiles: a
                                              program does one and asks for all it needs at once),
                                              bare_once_tf32 (likewise, an input gradient in TF32),
                                              bare_ring (1x1, long sums over many tiles)
    mma_wgrad  float32 and TF32 weight        mma_wgrad_kernel
               gradients of public `conv2d`

`operands` is what launchers share; `rows_memory`, `tiles_loop` and `epilogue` what kernels do,
besides `triton_kernels.hopper`.
"""
