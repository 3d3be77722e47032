"""Convolution as implicit GEMM. `conv2d` is the op, which takes the fastest path that applies:

    tma           tiles fetched by the copy engine; its weight gradient is `tma_wgrad`
    tma_stride    the same for stride 2
    tf32x3        `tma` for float32, three TF32 products each; linear layers are `linear_tf32x3`
    float32_wgrad the weight gradient of float32 and TF32: which kernel makes it
    points_wgrad  the same of 1x1 filters over few pixels
    columns_wgrad the same of a stem in float32, over a copy of x in columns
    columns_fwd   few output channels, as a head's: all taps in one product
    gather        pointers: everything else
    gluon         hand-scheduled for Hopper, among the tiles of `tma` and for the fused network

`tma_boxes` says which boxes the copy engine fetches, `configs` what a program computes.
"""
