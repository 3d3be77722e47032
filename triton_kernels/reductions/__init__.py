"""Sums over rows, columns and tiles, added up in a fixed order."""
