"""The 1-D network of a few samples, where reading weights is the work: one launch a layer."""
