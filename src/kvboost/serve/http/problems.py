"""Describes what is wrong with a request's body: pydantic's problems as places and sentences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from pydantic_core import ErrorDetails

LONGEST_SHOWN = 80
"""Characters of a value, or of a name, that a message shows."""


def place(problem: ErrorDetails, body: object) -> str | None:
    """The place of a problem in the body, such as ``messages[0].content``; None for the body
    itself. Pydantic also names the branches of unions, and a branch may have the name of a field,
    such as ``text``: of all ways to read the parts, the one that leads farthest counts."""
    path = _farthest(problem["loc"], body, is_missing=problem["type"] == "missing")
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{short(part)}" for part in path)
    return text.removeprefix(".") or None


def _farthest(parts: tuple[int | str, ...], value: object, *, is_missing: bool) -> list[int | str]:
    """The parts that lead into ``value``, without the names of branches among them."""
    if not parts:
        return []
    part, rest = parts[0], parts[1:]
    skipped = _farthest(rest, value, is_missing=is_missing)
    entered: list[int | str] = []
    if _leads_into(part, value):
        entered = [part, *_farthest(rest, value[part], is_missing=is_missing)]  # type: ignore[index]
    elif isinstance(value, dict) and is_missing and not rest:
        entered = [part]
    return max(skipped, entered, key=len)


def _leads_into(part: int | str, value: object) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def describe(problems: Iterable[Mapping[str, Any]]) -> str:
    """A sentence about one place in a body: what is allowed there, by the problems that were found,
    and what was sent."""
    problems = list(problems)
    allowed = "; or ".join(dict.fromkeys(map(_sentence, problems)))
    return f"{allowed}, not {_sent(problems[0])}" if allowed.startswith("must ") else allowed


def short(text: str, longest: int = LONGEST_SHOWN) -> str:
    """``text``, cut off where it is longer than a message should show."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def shown(value: object) -> str:
    """A value as an error shows it: JSON, but text in single quotes; cut short. Of a large value,
    only the beginning is written."""
    if isinstance(value, str):
        return repr(short(value))
    parts = json.JSONEncoder(ensure_ascii=False, default=repr).iterencode(value)
    return short("".join(islice(parts, LONGEST_SHOWN)))


def _sent(problem: Mapping[str, Any]) -> str:
    """The value that was sent; of text and lists that are too short or too long, their size."""
    value = problem["input"]
    match problem["type"]:
        case "too_short" | "too_long" | "string_too_short" | "string_too_long":
            return f"{len(value):,}"
        case _:
            return shown(value)


def _sentence(problem: Mapping[str, Any]) -> str:
    """A sentence about what is allowed there, without the names of pydantic's concepts and of our
    classes."""
    known = problem.get("ctx", {})
    match problem["type"]:
        case "model_type" | "dict_type" | "model_attributes_type":
            return "must be an object"
        case "too_short":
            return f"must have at least {_items(known['min_length'])}"
        case "too_long":
            return f"must have at most {_items(known['max_length'])}"
        case "int_parsing":  # of a query, whose values are strings
            return "must be a whole number"
        case "string_pattern_mismatch":
            return f"must match the pattern {known['pattern']}"
        case "union_tag_not_found":
            return f"must have a field {known['discriminator']}"
        case "union_tag_invalid":
            expected, tag = known["expected_tags"], shown(known["tag"])
            return f"{known['discriminator']} must be one of {expected}, not {tag}"
    message: str = problem["msg"]
    for prefix, ours in (
        ("Value error, ", ""),
        ("Input should be ", "must be "),
        ("String should have ", "must have "),
    ):
        if message.startswith(prefix):
            return ours + message.removeprefix(prefix)
    return message[:1].lower() + message[1:]


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count:,} items"
