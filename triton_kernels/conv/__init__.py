"""Convolution as implicit GEMM: `conv2d` is the op, `tma` its fast path, `gather` its general one.

`gluon` is hand-scheduled for Hopper, `tma_boxes` the boxes that the copy engine fetches.
"""
