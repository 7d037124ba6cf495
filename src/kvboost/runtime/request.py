"""One request: what was asked, and how far it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from kvboost.config import GenerationMode, RepairParams, SamplingParams
from kvboost.results import (
    Clock,
    GenerationResult,
    Healing,
    ReuseReport,
    TokenLogprob,
)
from kvboost.tokens.hashing import PrefixHashes, TokenIds, prefix_hashes
from kvboost.tokens.images import PlacedImages

if TYPE_CHECKING:
    from kvboost.cache.lookup.hits import EarlyLookup
    from kvboost.model.adapters.adapter import AppliedAdapter
    from kvboost.runtime.audit import TopTokens
    from kvboost.structured.grammars import Grammar


@dataclass(frozen=True)
class Request:
    """A checked request: its prompt and its options."""

    token_ids: TokenIds
    mode: GenerationMode
    salt: str
    params: SamplingParams
    repair: RepairParams
    keep: bool = True
    """Whether what it computes is kept for later requests."""
    boundaries: tuple[int, ...] = ()
    """Positions at which a document begins. No chunk crosses one."""
    tenant: str = ""
    """Whom the request counts for while requests wait. Tenants take turns."""
    heal: str = "auto"
    """When approximate rows become exact; ``"off"``: never."""
    exactness: str = "repaired"
    """``"verified"``: the answer is that of exact rows, so moved text is read again."""
    grammar: Grammar | None = None
    """The format that the answer keeps to."""
    adapter: AppliedAdapter | None = None
    speculate: str | int = "auto"
    """Whether tokens are drafted, and how many at most."""
    images: PlacedImages | None = None
    """The images of its prompt."""
    marks: tuple[int, ...] = ()
    """Positions after which other prompts may go on otherwise."""

    @property
    def is_spatial(self) -> bool:
        """Whether its rows have places that are not their numbers: see ``PlacedImages``."""
        return self.images is not None and self.images.is_spatial

    @property
    def vocabulary_ids(self) -> TokenIds:
        """The prompt's tokens as the model's vocabulary has them, also where images are."""
        return self.token_ids if self.images is None else self.images.plain(self.token_ids)

    @property
    def cacheable_rows(self) -> int:
        """How many of its first rows other requests may share: rows of an activated adapter are
        not cached, those before them are the base model's."""
        adapter = self.adapter
        return adapter.start if adapter is not None and adapter.is_activated else sys.maxsize

    @cached_property
    def prefix_hashes(self) -> PrefixHashes:
        """Those of its prompt, which is compared with many others."""
        return prefix_hashes(self.token_ids)


@dataclass
class Turn:
    """The facts that the loop tells a request before it asks for the request's next rows."""

    slice_rows: int | None = None
    """How many rows of its prompt go through the model at a time; None: what suits the device."""
    is_awaited: bool = False
    """Whether requests wait to be started, perhaps for the text that this one reads."""
    has_slack: bool = True
    """Whether its next step has time to heal rows."""
    other_rows: int = 0
    """How many rows the other running requests need in a step."""
    other_tokens: float = 0.0
    """How many tokens the answering ones among them may expect of a step."""
    other_promises: float = 0.0
    """How many more with the drafts that they do not run, because steps are launched ahead."""


@dataclass
class RequestState:
    """The progress of a request."""

    request: Request
    clock: Clock = field(default_factory=Clock)
    reuse: ReuseReport = field(default_factory=lambda: ReuseReport(()))
    rows: int = 0
    """Rows of the request's KV that are in place."""
    epoch: int = 0
    """The store's epoch when the request was planned."""
    exact_rows: int = sys.maxsize
    """Rows before the first approximate or moved row."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens from the second on."""
    text: list[str] = field(default_factory=list)
    finish_reason: str = "cancelled"
    shows_ids: bool = False
    """Whether its listener takes token ids and makes the text itself, in another process."""
    reads: bool = False
    """Whether it only reads a text, and nobody asks for an answer."""
    closing: bool = False
    """Whether the caller closes the stream, rather than the garbage collector."""
    kept: bool = True
    """Whether the rows may be kept for later requests."""
    new_chunks: int = 0
    """How many chunks the request has added to the store."""
    early: EarlyLookup | None = None
    """The lookup of its prompt that was made when it arrived."""
    batched: bool = False
    """Whether the loop runs it, beside other requests that may share its rows."""
    turn: Turn = field(default_factory=Turn)
    awaits: Callable[[], bool] | None = None
    """While it pauses for the device: tells whether the device has done what the request needs to
    go on."""
    accompanied: bool = False
    """Whether other requests shared its forwards. Its times then say nothing about costs."""
    expected_tokens: float = 1.0
    """How many tokens it may expect of its next step, with a draft."""
    promised_tokens: float = 0.0
    """How many tokens a draft would add, if it runs none because its steps are launched ahead."""
    step_seconds: float = 0.0
    """How long its last step took, by the device's clock, with what was done before it since the
    one before."""
    drafted_tokens: int = 0
    """How many tokens were drafted and run."""
    accepted_tokens: int = 0
    """How many of them are tokens of the answer."""
    recorded: list[TopTokens] = field(default_factory=list)
    """The distributions of the answer's first tokens, if rows before them were approximate."""
    healing: Healing | None = None
    heals: bool = False
    """Whether its approximate rows become exact while it answers."""
    exact_from: int = 0
    """If it is exact: the first token of the answer that exact rows gave."""

    @property
    def is_exact(self) -> bool:
        """Whether every row of the request is exact, those to come included."""
        return self.exact_rows == sys.maxsize

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)

    @property
    def shown(self) -> Sequence[str] | Sequence[int]:
        """The answer so far as its listener gets it: pieces of text, or token ids."""
        return self.token_ids if self.shows_ids else self.text

    def show(self, piece: str) -> None:
        if piece:
            self.text.append(piece)

    def result(self) -> GenerationResult:
        """The result so far."""
        params = self.request.params
        return GenerationResult(
            output_text="".join(self.text),
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            timings=self.clock.timings(),
            reuse=self.reuse,
            logprobs=list(self.logprobs) if params.logprobs is not None else None,
            prompt_logprobs=(
                list(self.prompt_logprobs) if params.prompt_logprobs is not None else None
            ),
            answer_exact_from=self.exact_from if self.is_exact else len(self.token_ids),
            healing=self.healing,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
        )
