"""Benchmarks of answers."""
