"""llguidance, the library that compiles grammars. It is optional."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvboost.config import install_extra
from kvboost.errors import StructuredOutputError

MIN_VERSION = (1, 9)
"""The first whose tokenizer takes several tokens that end an answer. Other engines in the same
environment may need an older one."""


@cache
def missing() -> str | None:
    """Why answers cannot be held to formats here; None if they can."""
    try:
        found = version("llguidance")
    except PackageNotFoundError:
        return f"llguidance is not installed; {install_extra('structured')}"
    if tuple(int(part) for part in found.split(".")[:2] if part.isdecimal()) < MIN_VERSION:
        least = ".".join(map(str, MIN_VERSION))
        return f"llguidance {found} is installed, and {least} is needed; pip install -U llguidance"
    return None


def library() -> Any:
    """The module ``llguidance``; StructuredOutputError if there is none that can be used."""
    if reason := missing():
        raise StructuredOutputError("the format of an answer", reason)
    import llguidance

    return llguidance
