"""`tile_mma`: 3x3 filters over tiles of pixels, of any channels."""
