"""Benchmarks of time."""
