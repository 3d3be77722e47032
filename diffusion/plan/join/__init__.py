"""Fusion of more neighbours into one launch, where nothing runs beside them: see `rules`."""
