"""Order, streams, lifetimes of tensors, and what many nodes do in one launch."""
