"""llguidance, the library that compiles grammars. It is optional."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvboost.config import install_extra
from kvboost.errors import StructuredOutputError


def is_installed() -> bool:
    """Whether answers can be held to formats here."""
    return find_spec("llguidance") is not None


def library() -> Any:
    """The module ``llguidance``; StructuredOutputError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise StructuredOutputError(
            "the format of an answer",
            f"llguidance is not installed; {install_extra('structured')}",
        ) from None
    return llguidance
