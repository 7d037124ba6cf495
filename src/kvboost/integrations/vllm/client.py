"""Talks to a vLLM server that runs with the connector, over its ordinary API. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvboost.api_client import ApiClient
from kvboost.errors import ForgetError, ServerError
from kvboost.integrations.vllm.options import EVERYTHING
from kvboost.tokens.prompt import inside


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
        self._api = ApiClient(url, api_key, "vLLM's API")
        self._salt = salt
        self._model = model

    def warm(self, text: str) -> Read:
        """Has a document read, so that it is stored. Only its exact rows are reused."""
        answer = self._complete(text, {"mode": "exact"})
        known = self._said(answer)
        self._check(known)
        with self._api.understood():
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
        answer = self._command({"stats": True}, "stats")
        with self._api.understood():
            return dict(answer["stats"])

    def _tokenize(self, text: str) -> list[int]:
        """Without special tokens."""
        body = {"model": self._name(), "prompt": text, "add_special_tokens": False}
        answer = self._api.send("/tokenize", body)
        with self._api.understood():
            return [int(token) for token in answer["tokens"]]

    def _forget(self, what: object) -> int:
        answer = self._command({"forget": what}, "forgotten")
        with self._api.understood():
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
                f"the server at {self._api.url} did not answer a command: it runs without "
                "KVBoost's connector, or with an older one; see docs/vllm.md"
            )
        return said

    def _said(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The connector's part of an answer; empty if there is none."""
        with self._api.understood():
            said = (answer.get("kv_transfer_params") or {}).get("kvboost", {})
            return dict(said)

    def _check(self, said: Mapping[str, Any]) -> None:
        if "error" in said:
            raise ServerError(f"the server at {self._api.url} answers: {said['error']}")

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
        return self._api.send("/v1/completions", body)

    def _name(self) -> str:
        if self._model is None:
            answer = self._api.send("/v1/models")
            with self._api.understood():
                models = list(answer["data"])
                self._model = str(models[0]["id"]) if models else None
            if self._model is None:
                raise ServerError(f"the server at {self._api.url} has no model")
        return self._model
