"""What PyTorch's ops are in the graph: see `table`."""
