"""Triton kernels; each file holds a kernel, its torch reference and the check that selects it."""
