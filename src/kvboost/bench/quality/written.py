"""Code in an answer: the function that a model has written, and whether it is one."""

from __future__ import annotations

import ast

FENCE = "```"


def written_function(answer: str, *, is_whole: bool) -> str:
    """The first function in the first fenced block of an answer, up to the next line without
    indentation. ``is_whole``: the model has ended the answer itself. If it was cut off within the
    function, its last line is left out, which may be half a line."""
    _, _, block = answer.partition(FENCE)
    code, closed, _ = block.partition(FENCE)
    lines = code.splitlines()[1:]  # the first one names the language
    end = next((at for at, line in enumerate(lines) if at and _ends(line)), None)
    if end is not None:
        lines = lines[:end]
    elif not (closed or is_whole):
        lines = lines[:-1]
    return "\n".join(lines) + "\n"


def _ends(line: str) -> bool:
    """Whether a line no longer belongs to the function above it. A signature may end with a
    bracket at the very left."""
    return line[:1] not in ("", " ", "\t", ")", "#")


def is_function(code: str) -> bool:
    """Whether ``code`` is a function that does more than its docstring says."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        return False
    return len(body[0].body) > (ast.get_docstring(body[0]) is not None)


def same_code(one: str, other: str) -> bool:
    """Whether two functions are the same but for docstrings, comments and layout. Both parse."""
    return _without_docstring(one) == _without_docstring(other)


def _without_docstring(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)
