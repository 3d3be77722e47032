"""The kernels of the planned network: `ops` lists them, `reference` is each of them in PyTorch."""
