from __future__ import annotations

from pathlib import Path

from load_script import load_script

modules = load_script("list_modules")


def test_the_page_is_up_to_date() -> None:
    assert modules.PAGE.read_text() == modules.page(), "run python scripts/list_modules.py"


def test_every_module_says_what_it_is() -> None:
    for path in modules.SOURCE.rglob("*.py"):
        assert modules.opening(path).endswith((".", "?")), path


def test_a_long_opening_is_cut_after_its_first_sentence(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Finds ``text`` | tokens.\nIt keeps none.\n\nMore."""\n')
    assert modules.opening(module) == "Finds `text` \\| tokens. It keeps none."
    module.write_text(f'"""Finds text. It keeps {"long " * 40}none."""\n')
    assert modules.opening(module) == "Finds text."
