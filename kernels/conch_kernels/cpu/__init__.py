"""Kernels for CPUs, in C++: compiled once for the machine, called through ctypes."""
