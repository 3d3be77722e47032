"""Convolutions whose tiles TMA fetches."""
