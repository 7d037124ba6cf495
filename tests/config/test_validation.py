from __future__ import annotations

import pytest

from kvboost import ConfigError
from kvboost.config import parse_bytes


@pytest.mark.parametrize(
    ("written", "expected"),
    [(0, 0), (2048, 2048), ("2GiB", 2 * 1024**3), ("500 MB", 500_000_000), ("1.5kib", 1536)],
)
def test_parse_bytes_reads_sizes_as_people_write_them(written, expected) -> None:
    assert parse_bytes(written) == expected


@pytest.mark.parametrize("written", ["", "2 GB please", "GiB", "-1", -1, 1.5, None, True])
def test_text_that_is_not_a_size_is_refused_with_its_value(written) -> None:
    with pytest.raises(ConfigError, match="max_cache_bytes="):
        parse_bytes(written, "max_cache_bytes")
