"""What routing looks at in a request: how its prompt begins, and which passages it contains.

A prompt is reduced to two kinds of 64-bit numbers:

- *blocks*: hashes of its beginning, each chained to the one before. Two prompts that share their
  first n blocks share their beginning, which a server reuses exactly.
- *marks*: the windows whose own hash is 0 modulo ``every``. The text alone decides which windows
  these are, so a passage has the same marks wherever it is in a prompt.

No tokenizer is needed: text is taken as UTF-8 bytes, four for a token. Prompts of token ids work
too. Both kinds of hashes depend on the tenant, so text of one tenant says nothing about another's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost.tokens.hashing import ChunkKey, window_hashes

MAX_UNITS = 2 * 1024**2
"""Bytes or token ids of a prompt that are looked at. A longer prompt is routed by its beginning."""
_KEY_BYTES = 64


@dataclass(frozen=True)
class Grain:
    """How finely a kind of prompt is looked at. Sizes are in units: bytes, or token ids."""

    window: int
    every: int
    """One window in so many is a mark."""
    block: int
    tokens_per_unit: float


TEXT = Grain(window=128, every=64, block=256, tokens_per_unit=0.25)
IDS = Grain(window=32, every=16, block=64, tokens_per_unit=1.0)
MARK_TOKENS = round(TEXT.every * TEXT.tokens_per_unit)
"""Tokens for each mark, on average."""
BLOCK_TOKENS = round(TEXT.block * TEXT.tokens_per_unit)


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
    """What the request allows: ``content``, ``beginning`` only, or ``nothing``."""


NOTHING = Sketch()
"""Of a request without a prompt."""
_REUSES = {"baseline": "nothing", "prefix_cache": "beginning"}


def tenant_of(authorization: bytes | None) -> bytes:
    """Tells tenants apart without keeping their keys."""
    if not authorization:
        return b""
    return hashlib.blake2b(authorization, digest_size=16, person=b"kvboost-tenant").digest()


def sketch(body: bytes, tenant: bytes = b"", *, secret: bytes = b"") -> Sketch:
    """The sketch of a request to an OpenAI-compatible server; ``NOTHING`` if ``body`` has no prompt
    that we know. With a ``secret`` the hashes cannot be computed without it."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return NOTHING  # the upstream says what is wrong with it
    if not isinstance(request, dict):
        return NOTHING
    salt = request.get("cache_salt")
    ours = request.get("kvboost")
    mode = ours.get("mode") if isinstance(ours, dict) else None
    space = _space(tenant, salt if isinstance(salt, str) else "", secret)
    reuses = _REUSES.get(mode, "content") if isinstance(mode, str) else "content"
    if (ids := _token_ids(request.get("prompt"))) is not None:
        return _sketch(ids[:MAX_UNITS], IDS, space, reuses)
    text = "\0".join(_texts(request)).encode("utf-8", "replace")[:MAX_UNITS]
    return _sketch(np.frombuffer(text, dtype=np.uint8), TEXT, space, reuses) if text else NOTHING


def _space(tenant: bytes, salt: str, secret: bytes) -> bytes:
    """Separates tenants and salts. ``tenant`` is empty or has a fixed length, so no two pairs give
    the same result."""
    digest = hashlib.blake2b(digest_size=16, key=secret[:_KEY_BYTES])
    digest.update(len(tenant).to_bytes(1, "little") + tenant)
    digest.update(salt.encode("utf-8", "replace"))
    return digest.digest()


def _sketch(units: npt.NDArray[Any], grain: Grain, space: bytes, reuses: str) -> Sketch:
    hashes = window_hashes(ChunkKey(space.hex()), units.astype(np.int32), grain.window)
    places = np.flatnonzero(hashes % np.uint64(grain.every) == 0)
    return Sketch(
        round(len(units) * grain.tokens_per_unit),
        tuple(_blocks(units, grain, space)),
        tuple(hashes[places].tolist()),
        tuple((places * grain.tokens_per_unit).astype(int).tolist()),
        reuses,
    )


def _blocks(units: npt.NDArray[Any], grain: Grain, space: bytes) -> Iterator[int]:
    """The chained hashes of all complete blocks."""
    chained = space
    for start in range(0, len(units) - grain.block + 1, grain.block):
        data = units[start : start + grain.block].tobytes()
        chained = hashlib.blake2b(chained + data, digest_size=8).digest()
        yield int.from_bytes(chained, "little")


def _token_ids(prompt: object) -> npt.NDArray[np.int32] | None:
    """The ids of a prompt that is a list of them, or a list of such lists; None if it is not."""
    if isinstance(prompt, list) and prompt and all(isinstance(one, list) for one in prompt):
        prompt = [number for one in prompt for number in one]
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], str):
        return None
    try:
        return np.array(prompt[:MAX_UNITS], dtype=np.int32)
    except (ValueError, TypeError, OverflowError):
        return None


def _texts(request: Mapping[str, Any]) -> Iterator[str]:
    """All text of a prompt, in the order in which a model reads it."""
    if tools := request.get("tools"):
        yield json.dumps(tools)  # chat templates put them first
    yield from _strings(request.get("prompt"))
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            yield str(message.get("role", ""))
            yield from _strings(message.get("content"))


def _strings(content: object) -> Iterator[str]:
    """The text of a prompt or of a message: a string, strings, or parts with a text."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
