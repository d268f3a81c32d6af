"""Durable file writes, the run directory lock, fail points, the user's cache directory."""
