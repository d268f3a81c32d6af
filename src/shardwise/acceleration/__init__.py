"""Kernels for models that do not call them: the trace of a function is rewritten."""
