"""Translation of PyTorch's ops to nodes of the graph: see `table`."""
