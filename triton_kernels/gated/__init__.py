"""Products of the halves of a tensor: see `product`."""
