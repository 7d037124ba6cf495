"""Marks: a few hashes of a text that any other text containing the same passage has as well.

A mark is the hash of a window of ``WINDOW`` tokens. Of every ``SPAN`` consecutive windows, the one
with the smallest hash is selected (winnowing: Schleimer, Wilkerson, Aiken 2003). The tokens alone
decide, never their position, so two texts that share ``SHARED`` consecutive tokens share a mark,
wherever these tokens are. About two of ``SPAN + 1`` windows are selected. A text of fewer than
``SHARED`` tokens has one mark, one of fewer than ``WINDOW`` has none.

A small rolling hash selects; the mark itself is a BLAKE2b hash, keyed with a secret and a salt.
Marks with different secrets or salts have nothing in common. Without the secret it is not possible
to compute the marks of a guessed text, or to construct another text with the same mark.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from kvboost.tokens.hashing import ChunkKey, TokenIds, window_hashes

WINDOW = 32
SPAN = 16
SHARED = WINDOW + SPAN - 1
_MARK_BYTES = 8


def marks(token_ids: TokenIds, *, secret: bytes = b"", salt: bytes = b"") -> npt.NDArray[np.uint64]:
    """The marks of ``token_ids``, in order. One that occurs several times is repeated."""
    return marked(token_ids, secret=secret, salt=salt)[1]


def marked(
    token_ids: TokenIds, *, secret: bytes = b"", salt: bytes = b""
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Where the selected windows begin, in order, and their marks."""
    key = _key(secret, salt)
    starts = _select(window_hashes(ChunkKey(key.hex()), token_ids, WINDOW))
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    digests = b"".join(
        hashlib.blake2b(
            data[4 * start : 4 * (start + WINDOW)], key=key, digest_size=_MARK_BYTES
        ).digest()
        for start in starts.tolist()
    )
    return starts, np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def _key(secret: bytes, salt: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=32, person=b"kvboost marks")
    for field in (secret, salt):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def _select(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """The windows whose hash is the smallest of some ``SPAN`` consecutive ones (of all of them if
    there are fewer). Of equal neighbours, as in a text that repeats one token, only the first."""
    span = min(SPAN, len(hashes))
    if span == 0:
        return np.empty(0, np.int64)
    smallest = _sliding(np.minimum, hashes, span)
    # A hash is the smallest of some span if the largest of these minima over the spans that hold
    # it is the hash itself.
    selected = hashes == _sliding(np.maximum, np.pad(smallest, span - 1), span)
    selected[1:] &= hashes[1:] != hashes[:-1]
    return np.flatnonzero(selected)


def _sliding(
    extreme: np.ufunc, values: npt.NDArray[np.uint64], width: int
) -> npt.NDArray[np.uint64]:
    """The smallest or largest of every ``width`` consecutive ``values``, by doubling."""
    length = 1
    while length < width:
        step = min(length, width - length)
        values = extreme(values[:-step], values[step:])
        length += step
    return values
