"""GroupNorm with its activation over NHWC: `group_norm` is the op and the module.

`stream` serves tensors of any size in passes over memory, `resident` small images in one program.
"""
