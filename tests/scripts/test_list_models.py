from __future__ import annotations

import pytest

from support.families import FAMILIES, HERE
from support.load_script import load_script

models = load_script("list_models")


def test_the_page_is_up_to_date() -> None:
    if missing := set(FAMILIES) - set(HERE):
        pytest.skip(f"this version of transformers does not have {sorted(missing)}")
    assert models.PAGE.read_text() == models.page(), "run python scripts/list_models.py"
