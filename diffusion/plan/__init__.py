"""Plans: which kernels compute a network, in which order and in which memory, all decided before
anything runs."""
