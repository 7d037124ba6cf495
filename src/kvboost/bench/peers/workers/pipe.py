"""The worker's end of the pipe: ``python pipe.py ENGINE.py``. Needs nothing but Python.

JSON lines, one question at a time:

    {"load": {"folder", "gguf", "threads", "context", "cache_bytes", "device", "dtype", ...}}
        {"ready": {"version": ..., "weights": ...}}
    {"generate": {"ids": [...], "text": "...", "max_tokens": 2}}
        {"first": true}
        {"end": {"prompt_tokens": ..., "cached_tokens": ...}}    null where the engine cannot tell

``ids`` and ``text`` are the same prompt; an engine takes what it can. Whatever fails is answered
by {"error": ...}. No time is taken here: the clock is at the other end.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1


def main(script: str) -> None:
    answers = _own_stdout()
    _die_with_parent()
    # Else "import vllm" might find a file beside this one.
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).parent]
    engine: Any = None

    def say(**answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    for line in sys.stdin:
        try:
            ((what, given),) = json.loads(line).items()
            if what == "load":
                engine = _load_module(script).Engine(given)
                say(ready={"version": engine.version, "weights": engine.weights})
            else:
                _generate(engine, given, say)
        except Exception as error:
            traceback.print_exc()
            say(error=f"{type(error).__name__}: {error}"[:2000])


def _generate(engine: Any, request: dict[str, Any], say: Any) -> None:
    said: list[bool] = []

    def first() -> None:
        if not said:
            said.append(True)
            say(first=True)

    counted = engine.generate(request, first)
    first()  # one that does not stream has its first token at the end
    say(end=counted)


def _load_module(script: str) -> Any:
    spec = importlib.util.spec_from_file_location("engine_to_measure", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _own_stdout() -> TextIO:
    """The real standard output; what engines print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _die_with_parent() -> None:
    """A frozen process does not notice that its pipe was closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
