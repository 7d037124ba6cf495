"""Responses that are kept, so that later requests can continue them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.serve.errors import ApiError
from kvboost.serve.http.problems import shown
from kvboost.serve.http.streaming import line
from kvboost.serve.schema.chat import Message
from kvboost.serve.settings import ServerSettings

_OBJECT_BYTES = 600
"""Bytes of memory that a message takes without its text. A part takes as many, a call twice."""


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation up to its end, without instructions."""

    response: dict[str, Any]
    messages: tuple[Message, ...]
    num_input: int
    """How many of the messages were there before the response."""
    size: int
    """Bytes of memory that both take, about."""


def stored_size(response: dict[str, Any], messages: Sequence[Message]) -> int:
    """Bytes of memory that a response and its conversation take, about."""
    texts = sum(one.size for one in messages)
    objects = sum(
        1
        + (len(one.content) if isinstance(one.content, list) else 0)
        + 2 * len(one.tool_calls or ())
        for one in messages
    )
    return len(line(response)) + texts + _OBJECT_BYTES * objects


class StoredResponses:
    """The responses of each tenant, in memory, for ``stored_response_seconds``. Of a tenant that
    has too many, or whose take too much memory, the oldest are dropped."""

    def __init__(
        self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._tenants: dict[str, dict[str, tuple[float, StoredResponse]]] = {}
        """By tenant and id, with the time at which each ends; the oldest first."""

    def add(self, tenant: str, stored: StoredResponse) -> None:
        kept = self._current(tenant)
        ends = self._clock() + self._settings.stored_response_seconds
        kept[stored.response["id"]] = (ends, stored)
        size = sum(one.size for _, one in kept.values())
        while kept and (
            len(kept) > self._settings.max_stored_responses
            or size > self._settings.max_stored_bytes
        ):
            _, oldest = kept.pop(next(iter(kept)))
            size -= oldest.size

    def get(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises ApiError 404 if there is no such response of ``tenant``, or not any more."""
        try:
            return self._current(tenant)[response_id][1]
        except KeyError:
            seconds = f"{self._settings.stored_response_seconds:g} s"
            said = f"there is no response {shown(response_id)}; responses are kept for {seconds}"
            told = f"{said} unless they say store=false"
            raise ApiError(404, told, "response_not_found", param) from None

    def remove(self, tenant: str, response_id: str) -> None:
        """Raises ApiError 404 if there is no such response."""
        self.get(tenant, response_id)
        del self._tenants[tenant][response_id]

    def keep_only(self, tenants: Collection[str]) -> list[str]:
        """Drops the responses of all other tenants; returns their ids."""
        gone = [self._tenants.pop(tenant) for tenant in self._tenants.keys() - tenants]
        return [response_id for kept in gone for response_id in kept]

    def _current(self, tenant: str) -> dict[str, tuple[float, StoredResponse]]:
        """The responses of ``tenant``. Drops those of any tenant that have ended."""
        now = self._clock()
        for name, kept in list(self._tenants.items()):
            while kept and next(iter(kept.values()))[0] <= now:
                del kept[next(iter(kept))]
            if not kept:
                del self._tenants[name]
        return self._tenants.setdefault(tenant, {})
