"""Chooses who drafts the tokens of requests, and how many: the engine's part and a request's
part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvboost.config import GenerationMode, most_drafted
from kvboost.reuse.cost import CostModel
from kvboost.runtime.request import Request, RequestState
from kvboost.runtime.speculation.drafters import Drafter, Kind, Offer, TextDrafter
from kvboost.runtime.speculation.lengths import (
    NO_DRAFT,
    WAITING,
    Chances,
    Pace,
    Pauses,
    best_pace,
    promise,
)
from kvboost.runtime.speculation.suffixes import IndexedText, TenantTexts
from kvboost.tokens.hashing import ChunkKey

ROUNDING = 1e-6
"""Of a sum of expected tokens."""
MakeDrafters = Callable[[Request, Sequence[IndexedText]], Sequence[Drafter]]
"""The drafters of a request, given its tenant's last texts."""


def draft_from_text(request: Request, texts: Sequence[IndexedText]) -> Sequence[Drafter]:
    return [TextDrafter(request.token_ids, texts)]


class Speculation:
    """An engine's: what all requests learn about drafts. Thread-safe."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.texts = TenantTexts()
        self._chances = Chances(weight=16)
        self.make_drafters: MakeDrafters = draft_from_text

    def start(
        self, state: RequestState, root: ChunkKey, epoch: int, *, runs_ahead: bool = False
    ) -> Speculator | None:
        """The speculator of one request; None if nothing drafts for it. ``runs_ahead``: without a
        draft, its steps are launched before the last token is known."""
        request = state.request
        most = most_drafted(request.speculate)
        if not most or request.mode is GenerationMode.BASELINE:
            return None
        drafters = self.make_drafters(request, self.texts.of(root, epoch))
        speculator = Speculator(
            drafters, state, most, Chances(4, self._chances), self._cost, runs_ahead=runs_ahead
        )
        speculator.only_alone = runs_ahead and request.speculate == "auto"
        return speculator


@dataclass
class _Draft:
    """The drafted tokens, and the kind of each."""

    kinds: Sequence[Kind]
    tokens: Sequence[int]
    place: int = 0
    """How many of them the answer has got."""


class Speculator:
    """One request's."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        state: RequestState,
        most: int,
        chances: Chances,
        cost: CostModel,
        *,
        runs_ahead: bool = False,
    ) -> None:
        self._drafters = drafters
        self._pauses = Pauses() if runs_ahead else None
        self.only_alone = False
        """Whether nothing is drafted beside other requests: on a GPU, where steps run ahead of the
        host, drafts in a batch make all requests wait for it."""
        self._drafted = False
        self._state = state
        self._most = most
        self._chances = chances
        self._cost = cost
        self._num_seen = 0
        self._expected: list[_Draft] = []

    def follow(self) -> None:
        """Learns which tokens the answer has got since the last call."""
        new = self._state.token_ids[self._num_seen :]
        self._num_seen += len(new)
        for drafter in self._drafters:
            drafter.push(new)
        for token in new:
            self._compare(token)

    def rests(self) -> bool:
        """Whether nothing is drafted now. Then there is no need to ``follow`` either."""
        if not self._is_paused():
            return False
        if self._expected:
            self.follow()
            self._expected = []
        self._state.expected_tokens, self._drafted = 1.0, False
        return True

    def draft(self, rows: int, most: int, allowed: Callable[[list[int]], int]) -> list[int]:
        """The tokens to run with the next ``rows`` rows of the request: at most ``most``, and those
        at their beginning that may follow, as ``allowed`` counts them."""
        self._expected = []
        tokens = self._choose(rows, most, allowed)
        self._drafted = bool(tokens)
        return tokens

    def _is_paused(self) -> bool:
        if self.only_alone and self._state.turn.other_rows:
            return True
        return self._pauses is not None and not self._pauses.is_over(self._state.accepted_tokens)

    def _choose(self, rows: int, most: int, allowed: Callable[[list[int]], int]) -> list[int]:
        best, chosen = NO_DRAFT, None
        self._state.promised_tokens = 0.0
        for drafter in self._drafters:
            offer = drafter.offer(min(most, self._most))
            if offer is None:
                continue
            if known := drafter.foresees():
                self._expected.append(_Draft(offer.kinds, known[:1]))
            pace = self._pace(offer, rows)
            if pace.gain > best.gain:
                best, chosen = pace, (drafter, offer)
        self._state.expected_tokens = best.tokens
        if self._pauses is not None:
            self._pauses.looked(self._state.promised_tokens)
        if chosen is None:
            return []
        self._state.promised_tokens = 0.0
        drafter, offer = chosen
        tokens = drafter.draft(best.length)
        tokens = tokens[: allowed(tokens)]
        if tokens:
            others = [draft for draft in self._expected if draft.kinds is not offer.kinds]
            self._expected = [*others, _Draft(offer.kinds, tokens)]
        return tokens

    def _pace(self, offer: Offer, rows: int) -> Pace:
        state, turn, cost = self._state, self._state.turn, self._cost
        others_draft = turn.other_rows > turn.other_tokens + ROUNDING

        def step(length: int) -> float:
            total, keys = turn.other_rows + rows + length, state.rows + rows
            drafted = others_draft or length + rows > 1
            seconds = cost.step(total, keys, drafted=drafted)
            if self._pauses is None or not drafted:
                return seconds
            return max(seconds, WAITING * cost.step(turn.other_rows + rows, keys))

        chances = [self._chances.of(*kind) for kind in offer.kinds]
        if self._pauses is None:
            return best_pace(chances, step, turn.other_tokens, offer.seconds)
        state.promised_tokens = max(state.promised_tokens, promise(chances))
        is_ahead = not self._drafted and not others_draft
        return best_pace(
            chances,
            step,
            turn.other_tokens,
            offer.seconds,
            is_ahead=is_ahead,
            promised=turn.other_promises if is_ahead else 0.0,
        )

    def _compare(self, token: int) -> None:
        """A token that was expected counts, whether its row was run or not: so what would have been
        drafted is measured also where it does not pay."""
        for draft in self._expected:
            if draft.place < len(draft.tokens):
                accepted = draft.tokens[draft.place] == token
                self._chances.observe(draft.kinds[draft.place].name, accepted)
                draft.place = draft.place + 1 if accepted else len(draft.tokens)
