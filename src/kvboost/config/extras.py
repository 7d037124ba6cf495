"""The extras of this package, by which users install what is optional."""

from __future__ import annotations


def install_extra(extra: str) -> str:
    """How to install the packages of ``extra``, for the end of an error. KVBoost itself is there,
    so pip only adds what is missing."""
    return f"install it with: pip install 'kvboost[{extra}]'"
