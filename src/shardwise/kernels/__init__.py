"""Attention, normalization, activation and loss kernels for the platform of the mesh."""
