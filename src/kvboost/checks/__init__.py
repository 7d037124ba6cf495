"""Checks an operator runs: correctness, calibration, the audit, and the machine."""
