"""The figure of the benchmark of tenants."""

from __future__ import annotations

import pytest

from benchmarks import tenants


@pytest.mark.parametrize(
    ("sent", "others", "chance"),
    [([1.0, 2.0], [3.0, 4.0], 1.0), ([1.0, 3.0], [1.0, 3.0], 0.5), ([2.0], [1.0, 3.0], 0.5)],
)
def test_the_chance_counts_pairs(sent, others, chance: float) -> None:
    assert tenants.chance(sent, others) == chance
    low, high = tenants.interval(sent, others)
    assert low <= chance <= high
