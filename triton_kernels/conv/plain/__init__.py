"""Convolutions in plain Triton, for any GPU that it compiles for."""
