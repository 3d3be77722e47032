"""What each node calls of a module of kernels: see `table`."""
