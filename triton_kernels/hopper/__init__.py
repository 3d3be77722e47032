"""Code that all Gluon kernels share: tensor descriptors for TMA (`descriptors`), rings of shared
memory and their barriers (`pipeline`), warp roles (`roles`), conversions (`pairs`), and names that
differ between versions of Triton (`compat`)."""
