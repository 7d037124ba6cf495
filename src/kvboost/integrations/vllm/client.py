"""Talks to a vLLM server that runs with the connector, over its ordinary API. Needs no vLLM."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvboost.errors import ConfigError, ForgetError, ServerError
from kvboost.integrations.vllm.options import EVERYTHING
from kvboost.tokens.prompt import inside

SECONDS = 600.0
"""To read a long document may take minutes."""


@dataclass(frozen=True)
class Read:
    """A document that was read."""

    tokens: int
    known: int
    """Tokens that were already stored."""


class VllmServer:
    """``salt`` is the ``cache_salt`` of the requests whose cache is meant. ``model`` is the name
    that the server gives it; by default the first one it has."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        salt: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url={url!r} must begin with http:// or https://")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._salt = salt
        self._key = api_key
        self._model = model

    def warm(self, text: str) -> Read:
        """Has a document read, so that it is stored. Only its exact rows are reused."""
        answer = self._complete(text, {"mode": "exact"})
        known = (answer.get("kv_transfer_params") or {}).get("kvboost", {})
        self._check(known)
        return Read(answer["usage"]["prompt_tokens"], known.get("exact_tokens", 0))

    def forget(self, text: str) -> int:
        """Forgets every chunk under the salt that contains ``text`` (of a long text: 32 consecutive
        tokens), and the chunks after it; returns how many there were. Raises ``ForgetError`` if
        some of them may be left."""
        return self._forget([ids.tolist() for ids in inside(text, self._tokenize)])

    def forget_everything(self) -> int:
        """The same for everything under the salt."""
        return self._forget(EVERYTHING)

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._command({"stats": True}, "stats")["stats"]
        return stats

    def _tokenize(self, text: str) -> list[int]:
        """Without special tokens."""
        body = {"model": self._name(), "prompt": text, "add_special_tokens": False}
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens

    def _forget(self, what: object) -> int:
        answer = self._command({"forget": what}, "forgotten")
        if "error" in answer:
            raise ForgetError(
                f"{answer['forgotten']} chunks were to be forgotten: {answer['error']}"
            )
        return int(answer["forgotten"])

    def _command(self, command: Mapping[str, object], expected: str) -> dict[str, Any]:
        answer = self._complete(".", command)
        said: dict[str, Any] = (answer.get("kv_transfer_params") or {}).get("kvboost", {})
        if expected not in said:
            self._check(said)
            raise ServerError(
                f"the server at {self._url} did not answer a command: it runs without KVBoost's "
                "connector, or with an older one; see docs/vllm.md"
            )
        return said

    def _check(self, said: Mapping[str, Any]) -> None:
        if "error" in said:
            raise ServerError(f"the server at {self._url} answers: {said['error']}")

    def _complete(self, prompt: str, asked: Mapping[str, object]) -> dict[str, Any]:
        """One token after ``prompt``."""
        body: dict[str, Any] = {
            "model": self._name(),
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"kvboost": asked},
        }
        if self._salt is not None:
            body["cache_salt"] = self._salt
        return self._post("/v1/completions", body)

    def _name(self) -> str:
        if self._model is None:
            models = self._send("/v1/models", None)["data"]
            if not models:
                raise ServerError(f"the server at {self._url} has no model")
            self._model = str(models[0]["id"])
        return self._model

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._send(path, json.dumps(body).encode())

    def _send(self, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            with error:
                reason = _reason(error.read())
            raise ServerError(
                f"the server at {self._url} refuses {path}: {error.code} {reason or error.reason}"
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", str(error))
            raise ServerError(
                f"{self._url}{path} does not answer: {reason}; give the address of vLLM's API"
            ) from None


def _reason(body: bytes) -> str:
    """The message of an error of OpenAI's form; empty if it has none."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return str(message)
