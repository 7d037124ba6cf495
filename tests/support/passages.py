"""Made-up passages for tests of routing, and prompts as the router sees them."""

from __future__ import annotations

import json
import random

from kvboost.deploy.content import Sketch, sketch

WORDS = [f"word{number}" for number in range(500)]


def text(seed: object, words: int = 400) -> str:
    """A passage of so many words, the same for the same seed."""
    rng = random.Random(str(seed))
    return " ".join(rng.choice(WORDS) for _ in range(words))


def of(prompt: object, tenant: bytes = b"", **more: object) -> Sketch:
    """The sketch of a request for a completion."""
    return sketch(json.dumps({"prompt": prompt, **more}).encode(), tenant)
