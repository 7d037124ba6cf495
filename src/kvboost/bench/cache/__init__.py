"""Benchmarks of the cache."""
