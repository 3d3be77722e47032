"""GroupNorm with its activation over NHWC: `group_norm` is the op and the module.

`multi_pass` serves tensors of any size in passes over memory, `single_program` small images in one
program, `cluster` large ones in thread blocks that wait for each other, on Hopper
(`cluster_kernels`, `cluster_parts`). The other files are the norms of `fused_ops`. `pass_grid` cuts
a pass into programs, for both.
"""
