from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path

import kvboost
from kvboost.config import install_extra


def test_every_extra_that_an_error_names_exists() -> None:
    source = Path(kvboost.__file__).parent
    texts = [path.read_text() for path in source.rglob("*.py")]
    named = {extra for text in texts for extra in re.findall(r"install_extra\([\"'](\w+)", text)}
    assert "serve" in named and named <= set(metadata("kvboost").get_all("Provides-Extra") or ())
    assert install_extra("serve") == "install it with: pip install 'kvboost[serve]'"
