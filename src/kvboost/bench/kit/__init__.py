"""The parts that benchmarks share."""
