"""The networks with their kernels planned: the UNet to train and to draw, the 1-D UNet to act."""
