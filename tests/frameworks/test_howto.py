"""The code of the how-to pages runs as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    return [(page, code) for code in CODE.findall((DOCS / page).read_text()) if "http://" in code]


@pytest.mark.parametrize(("page", "code"), blocks("howto/agents.md"))
def test_the_code_runs(server, page, code, capsys) -> None:
    code = code.replace("http://127.0.0.1:8000/v1", server.url)
    code = code.replace('"smollm2-135m"', repr(server.model))
    assert server.url in code
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, page, "exec"), namespace)
    assert capsys.readouterr().out.strip()
