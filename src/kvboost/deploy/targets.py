"""The request targets that the router sends on.

A path is sent on exactly as it arrived. So it must mean the same to everyone on the way: to
clients and proxies that remove dot segments, to servers that decode it, and to servers that decode
it twice.
"""

from __future__ import annotations

import re
import unicodedata
from urllib.parse import unquote_to_bytes

from kvboost.serve.errors import ApiError
from kvboost.serve.http.problems import shown

FORWARDED = (b"/v1/", b"/api/")
"""The beginnings of paths that are sent on: OpenAI's and Anthropic's APIs, and Ollama's."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SAFE = r"A-Za-z0-9_~!$&'()*+,=:@.-"
_ARRIVED = re.compile(rf"(?:/|[{_SAFE}]|%[0-9A-Fa-f]{{2}})*".encode())
_DECODED = re.compile(rf"/(?:(?![. ]+(?:/|$))(?:[ {_SAFE}]|[^\x00-\x7f])+(?:/|$))*")
"""Segments that are not empty and not dots alone. The last one may be empty."""


def is_plain(raw: bytes) -> bool:
    """Whether a path means the same however often it is decoded and normalised: no dot segments, no
    empty segments, no backslashes, semicolons, percent signs or control characters, neither as
    they are nor encoded. ``org%2Fmodel`` is plain: decoded once or not, it names the same model."""
    if not _ARRIVED.fullmatch(raw):
        return False
    try:
        decoded = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        return False
    decoded = unicodedata.normalize("NFKC", decoded)  # some servers turn wide dots into dots
    return decoded.isprintable() and _DECODED.fullmatch(decoded) is not None


def check_target(method: str, raw: bytes) -> None:
    """Raises ApiError unless a request can be sent on. ``raw`` is its path as it arrived."""
    if method not in METHODS:
        known = ", ".join(METHODS)
        said = f"the router does not forward {shown(method)}; it forwards {known}"
        raise ApiError(405, said, "method_not_allowed", headers={"allow": known})
    if not (is_plain(raw) and raw.startswith(FORWARDED)):
        raise not_plain(raw)


def not_plain(raw: bytes) -> ApiError:
    return ApiError(
        400,
        f"the path {shown(raw.decode('latin-1'))} can be read in more than one way. Send a path "
        "that begins with /v1/ or /api/, without . or .. or empty segments, \\, ;, and % or "
        "control characters that are encoded",
        code="ambiguous_path",
    )
