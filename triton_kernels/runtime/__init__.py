"""Launching kernels: the GPU's properties, dependent launches and torch.library."""
