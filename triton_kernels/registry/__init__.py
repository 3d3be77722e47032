"""The registry of kernels, which alone decides which kernel runs and in which configuration.

spec      what to compute: frozen dataclasses without tensors
kernel    `Kernel`, a row of the registry, and `Op`, the kernels that compute the same operation
rows      measured rows, by architecture and number of multiprocessors
choose    `select(op, spec, gpu)`, which selects a kernel and can explain the choice
cost      predicted times
search    measures rows: times every configuration, and excludes those with wrong results
"""
