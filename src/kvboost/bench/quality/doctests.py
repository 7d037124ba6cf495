"""Whether a function that a model has written passes its doctest, found out in another process.

What a model writes may do anything. So the process has no network, starts no other, writes no file,
gets an empty folder and little memory, and is ended after some seconds. This guards against
accidents; it is no sandbox against attacks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 10.0
_CHILD = Path(__file__).parent / "doctest_child.py"


def passes_doctest(module: str, name: str, code: str, *, seconds: float = SECONDS) -> bool:
    """Whether ``code`` in the place of the function ``name`` of ``module`` does what the examples
    in the function's docstring say. Code that does not end in time does not."""
    asked = json.dumps({"module": module, "name": name, "code": code, "seconds": seconds})
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-B", str(_CHILD)],
                input=asked,
                capture_output=True,
                text=True,
                timeout=seconds,
                cwd=folder,
                env={},
            )
        except subprocess.TimeoutExpired:
            return False
    last = done.stdout.rpartition("\n")[2]
    try:
        told = json.loads(last)
    except ValueError:  # it ended before it had run
        return False
    return isinstance(told, dict) and told.get("failed") == 0 and bool(told.get("tried"))
