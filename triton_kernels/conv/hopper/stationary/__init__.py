"""`stationary_weights`: 3x3 filters of 64 channels that stay in shared memory."""
