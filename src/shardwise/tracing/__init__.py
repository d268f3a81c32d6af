"""Functions as JAX traces them: read, rewritten, and with their checks as results."""
