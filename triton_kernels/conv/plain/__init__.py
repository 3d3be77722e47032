"""Convolutions in plain Triton, for any GPU that it compiles for.

                   tiles by TMA            through pointers              float32, as TF32
    `conv2d`       tma, tma_stride         gather, pointer               tf32x3, im2col_fwd
    fused          fused_launch            pointer
    weight grads   tma_wgrad, tma_stride   gather_wgrad, pointer_wgrad   pointwise_wgrad,
                                                                         im2col_wgrad
    a skip's dx    tma_skip_dx             pointer_skip_dx
    few images     split_k, small_batch    pointer_split

Kernels by TMA share `products`, those through pointers `pointer_products`.
"""
