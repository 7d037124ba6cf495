from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from kvboost.errors import StructuredOutputError
from kvboost.structured import library

NOT_THERE = PackageNotFoundError("llguidance")


@pytest.mark.parametrize(
    ("found", "said"),
    [(NOT_THERE, "kvboost\\[structured\\]"), ("1.6.1", "1.6.1 is installed, and 1.9 is needed")],
)
def test_a_library_that_cannot_be_used_is_named(found, said: str, monkeypatch) -> None:
    def version(name: str) -> str:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(library, "version", version)
    library.missing.cache_clear()
    try:
        with pytest.raises(StructuredOutputError, match=said):
            library.library()
    finally:
        library.missing.cache_clear()


@pytest.mark.parametrize("found", ["1.9", "1.9.1", "1.10.0rc1", "2.0"])
def test_newer_versions_are_used(found: str, monkeypatch) -> None:
    monkeypatch.setattr(library, "version", lambda name: found)
    library.missing.cache_clear()
    try:
        assert library.library().LLMatcher is not None
    finally:
        library.missing.cache_clear()
