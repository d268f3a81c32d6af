"""Attention, layer norm, GELU, embedding lookup and cross entropy, each with the kernel that suits
the platform of the mesh. README.md in this directory is the introduction for developers."""
