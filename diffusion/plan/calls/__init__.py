"""Calls of an accelerated module: a plan for each kind, compiled ahead, run, replayed as graphs."""
