"""Training: one captured step, the loop around it, the optimizer, sums over processes."""
