"""Atomic file writes, manifests, the run directory lock, fail points, the cache folder."""
