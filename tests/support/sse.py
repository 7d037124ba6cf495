"""Server-sent events that have names."""

from __future__ import annotations

import json
from typing import Any


def named_events(text: str) -> list[dict[str, Any]]:
    """The data of every event, which must have the type that its name says."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found
