"""Sizes as people write them."""

from __future__ import annotations

import re

from kvboost.config.validation import whole
from kvboost.errors import ConfigError

UNITS = {"": 1, "b": 1}
UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}


def parse_bytes(size: int | str, option: str = "size") -> int:
    """Parses a size as people write it: ``2147483648``, ``"2GiB"``, ``"500 MB"``."""
    if isinstance(size, int) and not isinstance(size, bool):
        whole(size, 0, option)
        return size
    text = size if isinstance(size, str) else ""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise ConfigError(
            f"{option}={size!r} is not a size; write bytes as a number, or with a unit such as "
            "'500MB' or '2GiB'"
        )
    return int(float(match[1]) * UNITS[match[2].lower()])


def format_bytes(size: int) -> str:
    """A size as people write it: ``"512B"``, ``"1.5MiB"``. ``parse_bytes`` reads it, rounded."""
    power = next((power for power in range(4) if round(size / 1024**power, 1) < 1024), 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{size / 1024**power:.1f}".removesuffix(".0") + unit
