"""Asks a running server of ``kvboost serve`` for explanations."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from kvboost.errors import ConfigError, ServerError
from kvboost.results import Explanation

SECONDS = 600.0


class ExplainingServer:
    """A server at ``url``. Requests are answered with one token."""

    def __init__(self, url: str, api_key: str | None, mode: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url={url!r} must begin with http:// or https://")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._mode = mode
        self._model = str(self._send("/v1/models")["data"][0]["id"])

    def explain(self, body: dict[str, Any]) -> Explanation:
        """Has a request answered, and the answer explained."""
        shown = self._send(f"/kvboost/explain/{self.ask(body)}")
        return Explanation.from_dict(shown["explanations"][0])

    def ask(self, body: dict[str, Any]) -> str:
        """Has a request answered; returns the id of the answer."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        limits = ("max_tokens", "max_completion_tokens", "n")
        given = {name: value for name, value in body.items() if name not in limits}
        asked = {**given, "model": self._model, "max_tokens": 1, "stream": False}
        return str(self._send(path, {**asked, "kvboost": {"mode": self._mode}})["id"])

    def _send(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with _OPENER.open(request, timeout=SECONDS) as response:
                answer: dict[str, Any] = json.loads(response.read())
                return answer
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode("utf-8", "replace")[:500]
            raise ServerError(f"{self._url}{path} refuses: {error.code} {said}") from None
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", str(error))
            raise ServerError(
                f"{self._url}{path} does not answer: {reason}; give the address of kvboost serve"
            ) from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An API does not redirect. Another server would be given the key."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)
