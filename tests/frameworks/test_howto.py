"""The code of the how-to pages runs as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "howto"
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["agents", "langchain", "langgraph", "llamaindex"])
def test_the_code_runs(server, name, capsys) -> None:
    page = PAGES / f"{name}.md"
    (code,) = CODE.findall(page.read_text())
    code = code.replace("http://127.0.0.1:8000/v1", server.url)
    code = code.replace('"smollm2-135m"', repr(server.model))
    assert server.url in code
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, str(page), "exec"), namespace)
    assert capsys.readouterr().out.strip()
