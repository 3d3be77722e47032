"""What kernels in Gluon share, whatever they compute: how launchers describe tensors to TMA
(`descriptors`), rings of shared memory and their barriers (`pipeline`), conversions (`pairs`), and
what versions of Triton call by different names (`compat`).
"""
