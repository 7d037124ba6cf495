"""Checks of single values: each error names the option, the value and what is allowed, or how to
install what it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

from kvboost.errors import ConfigError

EnumT = TypeVar("EnumT", bound=Enum)


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
