"""Convolutions that read through pointers, for GPUs without a TMA unit."""
