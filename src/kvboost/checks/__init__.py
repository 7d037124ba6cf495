"""Checks an operator runs: correctness, calibration, and the machine."""
