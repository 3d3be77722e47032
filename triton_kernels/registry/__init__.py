"""Which kernel runs, and in which configuration: the one place that decides.

spec      what is to be computed: frozen dataclasses, no tensors
kernel    `Kernel`, a row of the registry, and `Op`, the kernels that compute the same thing
rows      what has been measured, by architecture and number of multiprocessors
choose    `select(op, spec, gpu)`, the only chooser, which can also explain itself
search    how rows come about: every configuration timed, the wrong ones left out
"""
