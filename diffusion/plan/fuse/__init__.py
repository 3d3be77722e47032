"""What is computed in one launch, as a table of rewrites: see `rows`."""
