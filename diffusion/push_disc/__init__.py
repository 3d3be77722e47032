"""Pushing a disc to a goal: a small task to try policies on, with an expert to learn from."""
