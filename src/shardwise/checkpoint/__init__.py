"""Saving, verifying and restoring training states on disk."""
