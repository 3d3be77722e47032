"""Records what a module calls: see `record`."""
