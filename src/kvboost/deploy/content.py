"""The features of a request that routing uses: the beginning of its prompt, and its passages.

A prompt is reduced to two kinds of 64-bit numbers:

- *blocks*: hashes of its beginning, each chained to the one before. Two prompts that share their
  first n blocks share their beginning, which a server reuses exactly.
- *marks* (tokens/marks.py): a passage has the same marks wherever it is in a prompt.

No tokenizer is needed: text is marked by its words, and four bytes are taken for a token. Prompts
of token ids work too. Both kinds of hashes depend on the tenant, so text of one tenant says nothing
about another's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost.tokens.hashing import TokenIds
from kvboost.tokens.marks import marked

BLOCK_TOKENS = 64
MARK_TOKENS = 10
"""About how many tokens there are for each mark."""
TOKEN_BYTES = 4
"""About how many bytes of text make a token."""
MAX_TOKENS = 512 * 1024
"""Tokens of a prompt that are looked at. A longer prompt is routed by these."""
_POWERS = np.cumprod(np.full(256, 0x01000193, dtype=np.uint32), dtype=np.uint32)


@dataclass(frozen=True)
class Sketch:
    """A prompt as the router sees it."""

    tokens: int = 0
    """About how many tokens the prompt has."""
    blocks: tuple[int, ...] = ()
    """Hashes of its beginning, one for every ``BLOCK_TOKENS`` tokens."""
    marks: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    """About which token each mark is at."""
    reuses: str = "content"
    """The routing that the request allows: ``content``, ``beginning`` only, or ``nothing``."""
    model: str = ""
    """The model that the request names; empty if it names none."""


NOTHING = Sketch()
"""Of a request without a prompt."""
_REUSES = {"baseline": "nothing", "prefix_cache": "beginning"}


def tenant_of(authorization: bytes | None) -> bytes:
    """Tells tenants apart without keeping their keys."""
    if not authorization:
        return b""
    return hashlib.blake2b(authorization, digest_size=16, person=b"kvboost-tenant").digest()


def sketch(body: bytes, tenant: bytes = b"") -> Sketch:
    """The sketch of a request in OpenAI's, Anthropic's or Ollama's format, without tokens if
    ``body`` has no prompt that we know, and ``NOTHING`` if it cannot be read."""
    try:
        request = json.loads(body)
        return _sketch(request, tenant) if isinstance(request, dict) else NOTHING
    except (ValueError, RecursionError):  # what is nested deeply may be parsed, and not written
        return NOTHING  # the upstream says what is wrong with it


def _sketch(request: Mapping[str, Any], tenant: bytes) -> Sketch:
    named = request.get("model")
    model = named if isinstance(named, str) else ""
    salt = request.get("cache_salt")
    ours = request.get("kvboost")
    mode = ours.get("mode") if isinstance(ours, dict) else None
    space = _space(tenant, salt if isinstance(salt, str) else "")
    reuses = _REUSES.get(mode, "content") if isinstance(mode, str) else "content"
    if (ids := _token_ids(request.get("prompt"))) is not None:
        places, marks = marked(ids, salt=space)
        return _made(len(ids), ids.tobytes(), places, marks, space, reuses, model)
    text = "\0".join(_texts(request)).encode("utf-8", "replace")[: MAX_TOKENS * TOKEN_BYTES]
    if not text:
        return Sketch(model=model)
    begins, words = word_ids(text)
    numbers, marks = marked(words, salt=space)
    tokens = len(text) // TOKEN_BYTES
    return _made(tokens, text, begins[numbers] // TOKEN_BYTES, marks, space, reuses, model)


def word_ids(text: bytes) -> tuple[npt.NDArray[np.int64], TokenIds]:
    """Where the words of a UTF-8 text begin, and a number for each. A word is a run of ASCII
    letters and digits with what follows it, or a single other letter with what follows it: that
    also divides languages that are written without spaces."""
    data = np.frombuffer(text, dtype=np.uint8)
    folded = data | 0x20
    is_letter = ((folded >= 0x61) & (folded <= 0x7A)) | ((data >= 0x30) & (data <= 0x39))
    begins = is_letter.copy()
    begins[1:] &= ~is_letter[:-1]
    begins |= data >= 0xC0  # the first byte of a character that is not ASCII
    begins[:1] = True
    starts = np.flatnonzero(begins)
    offsets = np.arange(len(data)) - np.repeat(starts, np.diff(starts, append=len(data)))
    mixed = (data + np.uint32(1)) * _POWERS[offsets % len(_POWERS)]
    return starts, np.add.reduceat(mixed, starts).astype(np.uint32).view(np.int32)


def _space(tenant: bytes, salt: str) -> bytes:
    """Separates tenants and salts. ``tenant`` is empty or has a fixed length, so no two pairs give
    the same result."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(len(tenant).to_bytes(1, "little") + tenant)
    digest.update(salt.encode("utf-8", "replace"))
    return digest.digest()


def _made(
    tokens: int,
    data: bytes,
    places: npt.NDArray[np.int64],
    marks: npt.NDArray[np.uint64],
    space: bytes,
    reuses: str,
    model: str,
) -> Sketch:
    """``data`` has ``TOKEN_BYTES`` bytes for a token, as text and as ids."""
    blocks = tuple(_blocks(data, space))
    return Sketch(tokens, blocks, tuple(marks.tolist()), tuple(places.tolist()), reuses, model)


def _blocks(data: bytes, space: bytes) -> Iterator[int]:
    """The chained hashes of all complete blocks."""
    chained, size = space, BLOCK_TOKENS * TOKEN_BYTES
    for start in range(0, len(data) - size + 1, size):
        chained = hashlib.blake2b(chained + data[start : start + size], digest_size=8).digest()
        yield int.from_bytes(chained, "little")


def _token_ids(prompt: object) -> npt.NDArray[np.int32] | None:
    """The ids of a prompt that is a list of them, or a list of such lists; None if it is not."""
    if isinstance(prompt, list) and prompt and all(isinstance(one, list) for one in prompt):
        prompt = [number for one in prompt for number in one]
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], str):
        return None
    try:
        ids = np.array(prompt[:MAX_TOKENS], dtype=np.int32)
    except (ValueError, TypeError, OverflowError):
        return None
    return ids if ids.ndim == 1 else None


def _texts(request: Mapping[str, Any]) -> Iterator[str]:
    """All text of a prompt, in the order in which a model reads it."""
    if tools := request.get("tools"):
        yield json.dumps(tools)  # chat templates put them first
    for field in ("system", "instructions", "prompt"):
        yield from _strings(request.get(field))
    for field in ("messages", "input"):  # OpenAI's Responses API has the latter
        turns = request.get(field)
        if isinstance(turns, str):
            yield turns
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, dict):
                yield str(turn.get("role", ""))
                yield from _strings(turn.get("content"))
                yield from _strings(turn.get("output"))


def _strings(content: object) -> Iterator[str]:
    """The text of a prompt or of a message: a string, strings, or parts with a text."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
