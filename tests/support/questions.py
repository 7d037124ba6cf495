"""What the frameworks are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

DOCS = Path(__file__).parents[2] / "docs"
SHEET = 1_200
NOTES = (
    "The lighthouse was lit in 1858. Its lamp burned paraffin until the cable came in 1931. The "
    "keeper wrote down the weather every four hours. In the winter of 1892 the sea took the lower "
    "steps, and they were built again in granite. Nobody has lived there since 1976.\n"
) * 3


def passages(count: int) -> list[str]:
    """Paragraphs of this project's documentation, none of them twice."""
    page = (DOCS / "architecture.md").read_text()
    found = [text.strip() for text in page.split("\n\n") if 200 < len(text) < 800]
    assert len(found) >= count
    return found[:count]


def sheets(name: str, count: int) -> list[str]:
    """Consecutive parts of a page of the documentation, of about 300 tokens each. A test that
    counts moved rows takes a page that no other test sends."""
    text = (DOCS / f"{name}.md").read_text()
    assert len(text) >= count * SHEET
    return [text[start : start + SHEET] for start in range(0, count * SHEET, SHEET)]


class Verdict(BaseModel):
    """Few tokens, whatever the model says: it cannot add properties of its own."""

    model_config = ConfigDict(extra="forbid")
    animal: Literal["cat", "dog"]
    is_large: bool
