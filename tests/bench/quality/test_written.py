from __future__ import annotations

import pytest

from kvboost.bench.quality.written import is_function, same_code, written_function

FUNCTION = "def f(x):\n    return x\n"


@pytest.mark.parametrize(
    ("answer", "is_whole"),
    [
        (f"```python\n{FUNCTION}```\nIt returns x.", True),
        (f"```python\n{FUNCTION}\nprint(f(1))\n```", True),
        (f"```\n{FUNCTION}\ndef g(x):\n    ret", False),
        (f"```python\n{FUNCTION}", True),
        (f"```python\n{FUNCTION}    half a li", False),  # it was cut off
    ],
)
def test_the_first_function_of_an_answer_is_what_was_written(answer: str, is_whole: bool) -> None:
    written = written_function(answer, is_whole=is_whole)
    assert written.strip() == FUNCTION.strip() and is_function(written)


@pytest.mark.parametrize(
    "code",
    [
        "",
        "x = 1\n",
        "def f(x):\n",
        'def f(x):\n    """Says only this."""\n',
        "def f(x):\nreturn x\n",
        "def f(x):\n    return (x\n",
        "def f(x):\n    return '\0'\n",
        FUNCTION * 2,
    ],
)
def test_what_does_not_parse_or_does_nothing_is_no_function(code: str) -> None:
    assert not is_function(code)
    assert is_function("def f(\n    x,\n):\n    return x\n")


def test_a_signature_may_end_at_the_very_left() -> None:
    code = "def f(\n    x,\n):\n    return x"
    assert written_function(f"```python\n{code}\nf(1)\n```", is_whole=True) == code + "\n"


def test_docstrings_comments_and_layout_do_not_make_other_code() -> None:
    told = 'def f(x):\n    """Says x."""\n    # at once\n    return (x)\n'
    assert same_code(FUNCTION, told)
    assert not same_code(FUNCTION, "def f(y):\n    return y\n")
