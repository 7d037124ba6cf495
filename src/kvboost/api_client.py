"""A client of a server's HTTP API, in JSON."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any

from kvboost.errors import ConfigError, ServerError

SECONDS = 600.0
"""To read a long document may take minutes."""
MOST_BYTES = 64 << 20
"""Of an answer: the tokens of a long text take some megabytes."""
MOST_SAID = 2000
"""Bytes of an error."""


class ApiClient:
    def __init__(self, url: str, api_key: str | None, wanted: str) -> None:
        """``url`` may end in ``/v1``. ``wanted`` says whose address it should be."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url={url!r} must begin with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._wanted = wanted

    def send(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a POST of ``body``, or to a GET. Raises ``ServerError`` if it is no
        object in JSON, or if there is none."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with OPENER.open(request, timeout=SECONDS) as response:
                said = response.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise ServerError(
                f"the server at {self.url} refuses {path}: {error.code} {_reason(error)}"
            ) from None
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", str(error))
            raise ServerError(
                f"{self.url}{path} does not answer: {reason}; give the address of {self._wanted}"
            ) from None
        if len(said) > MOST_BYTES:
            raise ServerError(f"{self.url}{path} answers with more than {MOST_BYTES:,} bytes")
        with self.understood():
            return {**json.loads(said)}

    @contextmanager
    def understood(self) -> Iterator[None]:
        """For taking an answer apart: raises ``ServerError`` if it is of another form."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
            raise ServerError(
                f"the server at {self.url} answers in another form than {self._wanted}; give the "
                f"address of {self._wanted}"
            ) from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An API does not redirect. Another server would be given the key."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


OPENER = urllib.request.build_opener(_NoRedirects)


def _reason(error: urllib.error.HTTPError) -> str:
    """The message of an error of OpenAI's form, or the beginning of what the server says."""
    said = ""
    with error, suppress(OSError, HTTPException):
        said = error.read(MOST_SAID).decode("utf-8", "replace")
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        said = str(json.loads(said)["error"]["message"])
    return said or error.reason
