"""The jobs of the entry points, from their settings to their results."""
