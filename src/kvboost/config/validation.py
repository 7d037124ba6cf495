"""Checks of single values, sizes among them: each error names the option, the value and what is
allowed, or how to install what it needs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

from kvboost.errors import ConfigError

EnumT = TypeVar("EnumT", bound=Enum)

UNITS = {"": 1, "b": 1}
UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}


def choose(kind: type[EnumT], value: EnumT | str, option: str) -> EnumT:
    """Returns ``value`` as a member of ``kind``; raises a ConfigError that lists the members."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"{option}={value!r} is unknown; choose one of {allowed}") from None


def one_of(value: str | int, allowed: Sequence[str | int], option: str) -> None:
    """Raises ConfigError unless ``value`` is among ``allowed``."""
    if value not in allowed:
        listing = ", ".join(repr(name) for name in allowed)
        raise ConfigError(f"{option}={value!r} is not available; choose one of {listing}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def at_least(value: float, least: float, option: str) -> None:
    """Raises ConfigError unless ``value`` is a number, and not below ``least``."""
    if not _is_number(value) or value < least:
        raise ConfigError(f"{option}={value!r} must be a number of at least {least}")


def within(value: float, low: float, high: float, option: str) -> None:
    """Raises ConfigError unless ``value`` is a number from ``low`` to ``high``."""
    if not _is_number(value) or not low <= value <= high:
        raise ConfigError(f"{option}={value!r} must be a number between {low} and {high}")


def whole(value: int, least: int, option: str) -> None:
    """Raises ConfigError unless ``value`` is an int, and not below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{option}={value!r} must be a whole number of at least {least}")


def install_extra(extra: str) -> str:
    """How to install the packages of ``extra``, for the end of an error. KVBoost itself is there,
    so pip only adds what is missing."""
    return f"install it with: pip install 'kvboost[{extra}]'"


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
