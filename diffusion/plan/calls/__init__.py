"""How each node calls a module of kernels, see `table`."""
