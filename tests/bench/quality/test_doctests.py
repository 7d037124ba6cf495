"""The doctests of code that a model might write."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvboost.bench.quality.doctests import passes_doctest
from kvboost.bench.texts.functions import functions

MEDIAN = next(one for one in functions("statistics") if one.name == "median")
COUNTED = next(one for one in functions("collections") if one.name == "Counter.most_common")


def passes(body: str, seconds: float = 10.0) -> bool:
    return passes_doctest("statistics", "median", MEDIAN.head + body, seconds=seconds)


def test_the_library_passes_its_own_doctests() -> None:
    for one in (MEDIAN, COUNTED):
        assert passes_doctest(one.module, one.name, one.source)


def test_other_code_passes_if_it_does_the_same() -> None:
    middle = "len(data) // 2"
    right = f"return (sorted(data)[(len(data) - 1) // 2] + sorted(data)[{middle}]) / 2"
    whole = f"if len(data) % 2: return sorted(data)[{middle}]"
    assert passes(f"    {whole}\n    {right}\n")
    assert not passes(f"    {right}\n"), "3.0 is not what the docstring says"


def test_the_docstring_of_the_library_decides() -> None:
    assert not passes_doctest(
        "statistics", "median", 'def median(data):\n    """>>> 1\n    1\n    """\n    return 0\n'
    )


@pytest.mark.parametrize(
    "body",
    [
        "    raise SystemExit(0)\n",
        "    import os; os._exit(0)\n",
        "    return nothing\n",
        "    return (\n",
        "    x = [0] * 10**10\n",
    ],
)
def test_code_that_fails_does_not_pass(body: str) -> None:
    assert not passes(body)


def test_code_that_hangs_is_ended() -> None:
    started = time.monotonic()
    assert not passes("    while True:\n        pass\n", seconds=1.0)
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    "act",
    [
        "__import__('socket').socket()",
        "__import__('subprocess').run(['true'])",
        "__import__('os').system('true')",
        "open({path!r}, 'w')",
        "__import__('os').remove({path!r})",
    ],
)
def test_network_processes_and_files_to_write_are_refused(act: str, tmp_path: Path) -> None:
    """The code is right if and only if it was refused."""
    path = tmp_path / "kept"
    path.write_text("kept")
    asked = act.format(path=str(path))
    body = f"    try:\n        {asked}\n    except PermissionError:\n{{}}    return 0\n"
    right = "".join(f"    {line}\n" for line in MEDIAN.body.splitlines())
    assert passes(body.format(right)), asked
    assert path.read_text() == "kept"
