"""What every kernel is launched through: the GPU at hand, dependent launches and torch.library."""
