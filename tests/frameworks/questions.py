"""What the frameworks are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

NOTES = (
    "The lighthouse was lit in 1858. Its lamp burned paraffin until the cable came in 1931. The "
    "keeper wrote down the weather every four hours. In the winter of 1892 the sea took the lower "
    "steps, and they were built again in granite. Nobody has lived there since 1976.\n"
) * 3


def passages(count: int) -> list[str]:
    """Paragraphs of this project's documentation, none of them twice."""
    page = Path(__file__).parents[2] / "docs" / "architecture.md"
    found = [text.strip() for text in page.read_text().split("\n\n") if 200 < len(text) < 800]
    assert len(found) >= count
    return found[:count]


class Verdict(BaseModel):
    """Few tokens, whatever the model says: it cannot add properties of its own."""

    model_config = ConfigDict(extra="forbid")
    animal: Literal["cat", "dog"]
    is_large: bool
