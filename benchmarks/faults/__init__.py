"""Faults that an engine and its cache must survive: each injected for real, then checked."""
