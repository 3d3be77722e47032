"""Sums, products and activations of whole tensors in one pass over memory: see `op`."""
