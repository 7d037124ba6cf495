"""Runs one doctest on code that a model has written; ``doctests.py`` starts it.

Only the standard library is imported: ``-I`` hides everything else. It reads a JSON object from its
standard input and writes one as its last line.
"""

from __future__ import annotations

import doctest
import importlib
import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any

MEMORY_BYTES = 1 << 30
_DENIED = ("socket.", "subprocess.", "os.", "shutil.", "ctypes.", "pty.", "tempfile.", "signal.")
_ALLOWED = ("os.listdir", "os.scandir", "os.walk")
"""The calls of ``os`` that imports make."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC


def main() -> None:
    given = json.load(sys.stdin)
    module = importlib.import_module(given["module"])
    told = _docstring(module, given["name"])
    _guard(given["seconds"])
    found = {"failed": 1, "tried": 0}
    with suppress(BaseException), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        _replace(module, given["name"], given["code"])
        examples = doctest.DocTestParser().get_doctest(told, dict(vars(module)), "it", None, None)
        result = doctest.DocTestRunner(verbose=False).run(examples, out=lambda _: None)
        found = {"failed": result.failed, "tried": result.attempted}
    print("\n" + json.dumps(found), end="", flush=True)


def _docstring(module: Any, name: str) -> str:
    """That of the function as the library has it, whatever the model has made of it."""
    function = module
    for part in name.split("."):
        function = getattr(function, part)
    return str(function.__doc__)


def _replace(module: Any, name: str, code: str) -> None:
    owner, _, last = name.rpartition(".")
    own: dict[str, Any] = {}
    exec(compile(code, "answer", "exec"), vars(module), own)
    setattr(getattr(module, owner) if owner else module, last, own[last])


def _guard(seconds: float) -> None:
    """From here on, an audit hook refuses what no function of the library needs for its doctest."""
    with suppress(ImportError, OSError, ValueError):  # not everywhere
        import resource

        for limit, value in (
            (resource.RLIMIT_CPU, int(seconds) + 1),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_AS, MEMORY_BYTES),
        ):
            resource.setrlimit(limit, (value, value))
    sys.addaudithook(_refuse)


def _refuse(event: str, given: tuple[Any, ...]) -> None:
    if event == "open":
        _, mode, flags = given
        refused = any(letter in (mode or "") for letter in "wax+") or bool((flags or 0) & _WRITES)
    else:
        refused = event.startswith(_DENIED) and event not in _ALLOWED
    if refused:
        raise PermissionError(f"{event} is refused here")


if __name__ == "__main__":
    main()
