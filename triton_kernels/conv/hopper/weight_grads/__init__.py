"""Gradients of filters."""
