from __future__ import annotations

import pytest

from support.families import FAMILIES, HERE
from support.load_script import load_script

models = load_script("list_models")


def test_table_and_page_say_what_the_tiny_models_do() -> None:
    """One test, since measuring all models takes seconds."""
    if missing := set(FAMILIES) - set(HERE):
        pytest.skip(f"this version of transformers does not have {sorted(missing)}")
    found = models.families()
    for family in found:
        says, shown = family.features, family.measured
        assert says.moved.startswith("yes" if shown.rotates else "no"), family
        assert says.exact.startswith("from states") == shown.has_states, family
        assert ("have no positions" in says.vllm) <= shown.in_some_layers_only, family
        assert ("moved" in says.vllm) <= (shown.rotates and not shown.in_some_layers_only), family
        assert (says.pages == "yes") <= shown.is_uniform, family
        assert says.pages.startswith("no: the KV of its layers") <= (not shown.is_uniform), family
        assert ("awq" in says.packed) <= shown.keeps_names, family
        assert ("other names" in says.packed) <= (not shown.keeps_names), family
    assert models.PAGE.read_text() == models.page(found), "run python scripts/list_models.py"
