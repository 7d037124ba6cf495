"""Workloads, runs and reports: numbers that hold when someone else runs them."""
