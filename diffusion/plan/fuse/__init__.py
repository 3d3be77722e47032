"""Fusion of nodes into one launch, as a table of rewrites: see `rows`."""
