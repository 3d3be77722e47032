"""Convolutions for Hopper in Gluon, where shared memory, barriers and products are written out.

    launcher            computes                            kernels
    stationary_weights  fused 3x3, 64 channels in           stationary_weights_kernel
    tile_mma            3x3, any channels, fused and        tile_mma_kernels
                        public
    linear_mma          1x1 and linear layers, any          linear_mma_kernel
                        channels, fused and public
    upsampled           fused 3x3 after upsampling          upsampled_kernels
    narrow_output       fused 3x3, 16 channels out          narrow_output_kernel
    one_row             fused 3x3 of few images             one_row_kernels
    single_tile         fused 1x1 of few tiles              single_tile_kernels
    unfused_1x1         public `conv2d`                     unfused_pointwise, of few tiles
                                                            unfused_single_tile and, in TF32,
                                                            unfused_single_tile_tf32
    row_wgrad           3x3 weight gradients                row_wgrad_kernel
    group_wgrad,        weight gradients of up to four      group_wgrad_kernels
    rounds_wgrad        convolutions in one launch
    points_wgrad        the same, 1x1 and linear layers     points_wgrad_kernel
    mma_wgrad           weight gradients in float32, TF32   mma_wgrad_kernel
    fp16_split_wgrad    the same, 3x3                       fp16_split_wgrad_kernel

Launchers share `operands`. Kernels share `row_memory`, `tile_mma_loop`, `tile_multiply`,
`stationary_multiply`, `wgrad_pieces` and the files named `epilogue`, besides
`triton_kernels.hopper`.
"""
