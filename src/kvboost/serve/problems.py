"""What is wrong with a request's body, in words: pydantic's problems as places and sentences."""

from __future__ import annotations

from pydantic_core import ErrorDetails


def place(problem: ErrorDetails, body: object) -> str | None:
    """The place of a problem in the body, such as ``messages[0].content``; None for the body
    itself. Pydantic also names the branches of unions, and a branch may have the name of a field,
    such as ``text``: of all ways to read the parts, the one that leads farthest counts."""
    path = _farthest(problem["loc"], body, is_missing=problem["type"] == "missing")
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
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


def sentence(problem: ErrorDetails) -> str:
    """What is allowed there, without the names of pydantic's concepts and of our classes."""
    known = problem.get("ctx", {})
    match problem["type"]:
        case "model_type" | "dict_type" | "model_attributes_type":
            return "must be an object"
        case "too_short":
            return f"must have at least {_items(known['min_length'])}, not {known['actual_length']}"
        case "too_long":
            return f"must have at most {_items(known['max_length'])}, not {known['actual_length']}"
        case "int_parsing":  # of a query, whose values are strings
            return "must be a whole number"
        case "string_pattern_mismatch":
            return f"must match the pattern {known['pattern']}"
        case "union_tag_not_found":
            return f"must have a field {known['discriminator']}"
        case "union_tag_invalid":
            expected, given = known["expected_tags"], str(known["tag"])[:80]
            return f"{known['discriminator']} must be one of {expected}, not {given!r}"
    message = problem["msg"]
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
