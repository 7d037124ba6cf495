"""JSON text that clients send: counted before it is parsed, so that it never becomes much more than
it was.

``msgspec`` parses it: it reads bytes without decoding all of them first, which takes a third of the
memory and half of the time of Python's own parser. No other thread runs while it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

MAX_VALUES = 256 * 1024
"""JSON values in one body, those in JSON text inside its strings included. About 50 ms to parse."""
MAX_KEYS = 64 * 1024
"""Keys of all JSON objects in one body. They take longer than other values."""
MAX_DEPTH = 32
"""Lists and objects within one another in schemas and in arguments of calls. Chat templates may
indent each of their lines by its depth."""
MAX_DIGITS = 400
"""Digits of one number. The time to read and write one grows with their square."""
_SMALL_BYTES = MAX_KEYS
_SLICE_BYTES = 256 * 1024
_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)
_BOM = b"\xef\xbb\xbf"


class JsonTextError(ValueError):
    """Text that is not JSON, or too much of it."""


class JsonBudget:
    """How many JSON values and keys a body may still have."""

    def __init__(self) -> None:
        self._values, self._keys = MAX_VALUES, MAX_KEYS

    def take_body(self, body: bytes) -> None:
        """Like ``take``, for a whole body. A small one cannot have too many values, with those of
        the texts inside it, so they are not counted."""
        if len(body) > _SMALL_BYTES or _LONG_NUMBER in body.translate(_AS_ZEROS):
            self.take(body)

    def take(self, text: bytes) -> None:
        """Counts the values in ``text``. Raises JsonTextError at too many, or a long number."""
        values = keys = 0
        for values, keys in count_values(text):
            if values > self._values:
                raise JsonTextError(f"there are more than {MAX_VALUES:,} JSON values; split it up")
            if keys > self._keys:
                raise JsonTextError(f"there are more than {MAX_KEYS:,} JSON keys; split it up")
        self._values -= values
        self._keys -= keys


def parse_json(text: bytes) -> Any:
    """The value of JSON text. Raises JsonTextError if it is none."""
    try:
        return msgspec.json.decode(text.removeprefix(_BOM))
    except UnicodeDecodeError:
        raise JsonTextError("it is not UTF-8") from None
    except RecursionError:
        raise JsonTextError("it is nested too deeply") from None
    except msgspec.MsgspecError as error:
        said = str(error).removeprefix("JSON is malformed: ")
        if b"\\u" in text and "out of range" not in said:
            said += "; perhaps half of a surrogate pair (\\ud800 to \\udfff)"
        raise JsonTextError(said[:1].lower() + said[1:]) from None


def written_json(value: Any) -> str:
    """``value`` as JSON text."""
    return msgspec.json.encode(value).decode()


def depth_of(value: Any) -> int:
    """How many lists and objects are within one another, or ``MAX_DEPTH`` + 1 if more are."""
    level = [value]
    for depth in range(MAX_DEPTH + 1):
        level = [one for one in level if isinstance(one, (dict, list))]
        if not level:
            return depth
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    return MAX_DEPTH + 1


def count_values(text: bytes) -> Iterator[tuple[int, int]]:
    """Counts the values and the keys of JSON text without parsing it; yields both after each slice
    of the text. Every value but the outermost follows a comma or an opening bracket, and every key
    precedes a colon, that is not inside a string. Raises JsonTextError at a very long number."""
    values = keys = start = inside = 0
    while start < len(text):
        piece = text[start : start + _SLICE_BYTES]
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if backslashes % 2 and start + len(piece) < len(text):
            piece = piece[:-1]  # do not cut an escape in two
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])
        if _LONG_NUMBER in outside.translate(_AS_ZEROS):
            raise JsonTextError(f"a number has more than {MAX_DIGITS} digits")
        inside = (inside + len(parts) - 1) % 2
        values += sum(map(outside.count, (b",", b"[", b"{")))
        keys += outside.count(b":")
        yield values, keys
