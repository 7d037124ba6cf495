"""Talks to a vLLM server that runs with the connector, over its ordinary API. Needs no vLLM."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from kvboost.errors import ConfigError, ForgetError, ServerError
from kvboost.integrations.vllm.options import EVERYTHING
from kvboost.tokens.prompt import inside

SECONDS = 600.0
"""To read a long document may take minutes."""
MOST_BYTES = 64 << 20
"""Of an answer: the tokens of a long text take some megabytes."""


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
        known = self._said(answer)
        self._check(known)
        with self._understood():
            return Read(int(answer["usage"]["prompt_tokens"]), int(known.get("exact_tokens", 0)))

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
        answer = self._send("/tokenize", body)
        with self._understood():
            return [int(token) for token in answer["tokens"]]

    def _forget(self, what: object) -> int:
        answer = self._command({"forget": what}, "forgotten")
        with self._understood():
            forgotten = int(answer["forgotten"])
        if "error" in answer:
            raise ForgetError(f"{forgotten} chunks were to be forgotten: {answer['error']}")
        return forgotten

    def _command(self, command: Mapping[str, object], expected: str) -> dict[str, Any]:
        answer = self._complete(".", command)
        said = self._said(answer)
        if expected not in said:
            self._check(said)
            raise ServerError(
                f"the server at {self._url} did not answer a command: it runs without KVBoost's "
                "connector, or with an older one; see docs/vllm.md"
            )
        return said

    def _said(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The connector's part of an answer; empty if there is none."""
        with self._understood():
            said = (answer.get("kv_transfer_params") or {}).get("kvboost", {})
            return dict(said)

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Raises ``ServerError`` if an answer is not as vLLM's are."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError):
            raise ServerError(
                f"the server at {self._url} answers in another form than vLLM does; give the "
                "address of vLLM's API"
            ) from None

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
        return self._send("/v1/completions", body)

    def _name(self) -> str:
        if self._model is None:
            answer = self._send("/v1/models", None)
            with self._understood():
                models = list(answer["data"])
                self._model = str(models[0]["id"]) if models else None
            if self._model is None:
                raise ServerError(f"the server at {self._url} has no model")
        return self._model

    def _send(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with _OPENER.open(request, timeout=SECONDS) as response:
                said = response.read(MOST_BYTES + 1)
                if len(said) > MOST_BYTES:
                    raise ServerError(
                        f"{self._url}{path} answers with more than {MOST_BYTES:,} bytes"
                    )
                answer: dict[str, Any] = json.loads(said)
                return answer
        except urllib.error.HTTPError as error:
            with error:
                reason = _reason(error.read(MOST_BYTES))
            raise ServerError(
                f"the server at {self._url} refuses {path}: {error.code} {reason or error.reason}"
            ) from None
        except ServerError:
            raise
        except (OSError, ValueError, RecursionError, HTTPException) as error:
            reason = getattr(error, "reason", str(error))
            raise ServerError(
                f"{self._url}{path} does not answer: {reason}; give the address of vLLM's API"
            ) from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An API does not redirect. Another server would be given the key."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _reason(body: bytes) -> str:
    """The message of an error of OpenAI's form; empty if it has none."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return str(message)
