"""Several neighbours in one launch, where nothing runs beside them: see `rules`."""
