"""GroupNorm with its activation over NHWC: `group_norm` is the op and the module.

`multi_pass` serves tensors of any size in passes over memory, `single_program` small images in one
program, `cluster` large ones in thread blocks that wait for each other, on Hopper
(`cluster_kernels`, `cluster_parts`). The passes are those of `fused_ops`: `sums` over pixels,
`tables` of what follows from them, and `passes`, which apply a norm (`apply_kernel`) or its
gradient (`pass_kernels`). `from_partials`, `inline_statistics`, `small_batch` and `single_cta` do
several of these in one launch. All use the functions of `coefficients` and `statistics`, and
`pass_grid` cuts a pass into programs.
"""
