"""Grids of arguments, and the runs of their combinations."""
