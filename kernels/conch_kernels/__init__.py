"""Kernels: tensors in, tensors out."""
