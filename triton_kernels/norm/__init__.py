"""GroupNorm with its activation over NHWC: `group_norm` is the op and the module.

`stream` serves tensors of any size in passes over memory (`stream_kernels`), `resident` small
images in one program, `cluster` large ones in thread blocks that wait for each other, on Hopper
(`cluster_kernels`, `cluster_parts`). `pass_grid` cuts a pass into programs, for the norms of
`fused` too.
"""
