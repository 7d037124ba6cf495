"""Kernels of our own, for CPUs that torch leaves waiting; compiled where they first run."""
