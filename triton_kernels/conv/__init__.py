"""Convolution as implicit GEMM. `conv2d` is the op, which takes the fastest path that applies:

    tma           tiles fetched by the copy engine
    tma_stride    the same for stride 2
    tf32x3        `tma` for float32, three TF32 products each; linear layers are `linear_tf32x3`
    im2col_fwd    few output channels, as a head's: all taps in one product
    gather        pointers: everything else
    hopper        hand-scheduled for Hopper, among the tiles of `tma` and for the fused network

`weight_grad` lists the kernels of the weight gradient, `wgrad_group` those of several, `fused`
those with an epilogue, `few` and `split` those of few images.

`tma_boxes` says which boxes the copy engine fetches, `configs` what a program computes,
`refusals` what a kernel is for.
"""
