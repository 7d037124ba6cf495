"""The figure of the benchmark of tenants."""

from __future__ import annotations

import pytest

from load_script import load_script


@pytest.mark.parametrize(
    ("sent", "others", "chance"),
    [([1.0, 2.0], [3.0, 4.0], 1.0), ([1.0, 3.0], [1.0, 3.0], 0.5), ([2.0], [1.0, 3.0], 0.5)],
)
def test_the_chance_counts_pairs(sent, others, chance: float) -> None:
    script = load_script("bench_tenants")
    assert script.chance(sent, others) == chance
    low, high = script.interval(sent, others)
    assert low <= chance <= high
