"""Convolutions for Hopper in Gluon, where shared memory, barriers and products are written out.

`rows` (64-pixel rows, and the weight gradient), `resident` (the filters stay in shared memory) and
`tiles` (rows of 8 to 64 pixels) serve the fused network, `bare` what the public `conv2d` calls.
"""
