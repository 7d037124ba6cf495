"""Which chunks leave a full tier first."""
