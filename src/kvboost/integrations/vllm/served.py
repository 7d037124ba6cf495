"""A request that vLLM has, as the scheduler's side of the connector knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvboost.integrations.vllm.options import RequestOptions
from kvboost.integrations.vllm.planner import Load
from kvboost.tokens.hashing import TokenIds

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class Served:
    """A request that vLLM has."""

    request: Request
    asked: RequestOptions
    salt: str
    token_ids: TokenIds | None = None
    """Of its prompt, once they were needed."""
    error: str = ""
    """Why what it asks could not be read."""
    is_kept: bool = True
    """False if something under its salt was forgotten when it ran, or everything."""
    planned: tuple[object, Load | None] = (None, None)
    """Its load, after what it was planned for."""
    fetched: Load | None = None
    """A load whose chunks the workers hold, or are about to, until vLLM has pages for it."""
    is_fetched: bool = False
    load: Load | None = None
    """The message that was sent to the workers."""
    is_loading: bool = False
    has_failed: bool = False
    recomputed: int = 0

    @property
    def has_only_tokens(self) -> bool:
        """Whether its KV depends on its tokens alone."""
        request = self.request
        embeds = request.prompt_embeds is not None or request.prompt_token_ids is None
        return not (embeds or request.mm_features)

    def waits_for(self, name: tuple[str, int]) -> bool:
        """Whether the workers are to hold the chunks of the load of that name for it."""
        return self.fetched is not None and self.fetched.name == name

    def loads(self, name: tuple[str, int]) -> bool:
        """Whether the load of that name was sent for it, and nothing was heard of it yet."""
        return self.is_loading and self.load is not None and self.load.name == name
