"""Which upstream a request should go to. Pure: no network, no clock, no chance.

The router knows what it has sent to each upstream and what is still open there. A request goes to
the upstream where it is expected to be read soonest::

    score  =  beginning * 1  +  passages elsewhere * 0.85      tokens that need not be computed
            - for each open request: what it costs, or          the queue
              the tokens it still has to read * 0.25, if that is more
            - the text this upstream holds more than others     keeps memories equally full

All terms are in prompt tokens, so no speed needs to be known. Passages elsewhere count 0.85,
because a server computes a part of moved text again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from kvboost.config import one_of, whole
from kvboost.deploy.content import BLOCK_TOKENS, MARK_TOKENS, NOTHING, Sketch
from kvboost.errors import ConfigError

POLICIES = ("content", "beginning", "round-robin")
MOVED_WORTH = 0.85
WAITING = 0.25
"""The cost of a token that another request still has to compute there. On average half of it is
done by now; and a token that is computed a second time, elsewhere, costs all users, while waiting
costs one."""
BALANCE = 1 / 8
"""The cost, for a request of new text, of a token that an upstream holds more than another.
Without this, all requests that share a system prompt would stay with the first upstream that read
it, and the memory of the others would stay empty."""
LEAST_MEMORY = 16 * 1024
"""Tokens that are always remembered, however often an upstream has lost them."""
LEAST_EVIDENCE = 256
"""Fewer tokens of an expected beginning, found or not, say nothing about an upstream's cache."""
LEAST_HIT = 32
"""Tokens. Anything less is chance, and saves nothing."""


@dataclass(frozen=True)
class RouterSettings:
    """The settings of routing. Validated on creation."""

    policy: str = "content"
    """``content``: by beginning and passages; ``beginning``: for upstreams that reuse prefixes
    only; ``round-robin``: in turn."""
    remember_tokens: int = 4 * 1024**2
    """Tokens of text that the router remembers for each upstream, at most. Best as much as the
    upstream's cache holds; if it is more, the router learns from answers of KVBoost that say what
    was found."""
    request_tokens: int = 64
    """The cost of an open request for the next one, as tokens to read."""

    def __post_init__(self) -> None:
        one_of(self.policy, POLICIES, "policy")
        whole(self.remember_tokens, BLOCK_TOKENS, "remember_tokens")
        whole(self.request_tokens, 0, "request_tokens")


@dataclass(frozen=True)
class Expected:
    """The tokens of a prompt by how an upstream would read them."""

    beginning: int = 0
    elsewhere: int = 0
    new: int = 0


@dataclass(frozen=True)
class Choice:
    """An upstream for a request, and why."""

    upstream: str
    expected: Expected
    score: float
    reason: str = ""
    """``beginning`` or ``content``: it knows most of the prompt; ``load``: another one knows more,
    but is busier; ``new``: none knows the prompt; ``only``: there is no other; ``turn``: it is its
    turn."""


class Recent:
    """A set of hashes that forgets those used longest ago."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, value: int) -> bool:
        return value in self._known

    def add(self, values: Iterable[int]) -> list[int]:
        """Makes ``values`` the most recent ones; returns those that were not known."""
        new = []
        for value in values:
            if value in self._known:
                self._known.move_to_end(value)
            else:
                self._known[value] = None
                new.append(value)
        self.resize(self.limit)
        return new

    def resize(self, limit: int) -> None:
        self.limit = limit
        while len(self._known) > limit:
            self._known.popitem(last=False)

    def discard(self, values: Iterable[int]) -> None:
        for value in values:
            self._known.pop(value, None)

    def newest(self, count: int) -> list[int]:
        """Up to ``count`` values, the oldest of them first."""
        values = list(self._known)
        return values[-count:] if count else []


class Known:
    """The text that an upstream has read, as far as the router has seen."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens
        self.blocks = Recent(max(1, tokens // BLOCK_TOKENS))
        self.marks = Recent(max(1, tokens // MARK_TOKENS))

    @property
    def tokens(self) -> int:
        return len(self.marks) * MARK_TOKENS

    def learn(self, expected: int, found: int) -> None:
        """Learns how much the upstream keeps: ``found`` of ``expected`` tokens of a beginning."""
        if expected < LEAST_EVIDENCE:
            return
        limit = self.marks.limit * MARK_TOKENS
        if found < expected / 4:  # both are estimates
            limit = max(min(LEAST_MEMORY, self._most), round(0.9 * min(limit, self.tokens)))
        else:
            limit = min(self._most, ceil(1.01 * limit))
        self.blocks.resize(max(1, limit // BLOCK_TOKENS))
        self.marks.resize(max(1, limit // MARK_TOKENS))

    def expect(self, sketch: Sketch, policy: str = "content") -> Expected:
        beginning = elsewhere = 0
        if policy != "round-robin" and sketch.reuses != "nothing":
            beginning = self._beginning(sketch)
            if policy == "content" and sketch.reuses == "content":
                elsewhere = self._elsewhere(sketch, beginning)
        return Expected(beginning, elsewhere, max(0, sketch.tokens - beginning - elsewhere))

    def _beginning(self, sketch: Sketch) -> int:
        known = 0
        for block in sketch.blocks:
            if block not in self.blocks:
                break
            known += 1
        return min(known * BLOCK_TOKENS, sketch.tokens)

    def _elsewhere(self, sketch: Sketch, after: int) -> int:
        """The share of the marks after ``after`` that is known, of the tokens there."""
        rest = [
            mark for mark, place in zip(sketch.marks, sketch.places, strict=True) if place >= after
        ]
        if not rest:
            return 0
        known = sum(mark in self.marks for mark in rest)
        tokens = round((sketch.tokens - after) * known / len(rest))
        return tokens if tokens >= LEAST_HIT else 0

    def add(self, sketch: Sketch) -> tuple[list[int], list[int]]:
        """Notes that the upstream reads ``sketch``; returns what is new, to take it back."""
        if sketch.reuses == "nothing":
            return [], []
        return self.blocks.add(sketch.blocks), self.marks.add(sketch.marks)


@dataclass
class _Upstream:
    known: Known
    open: int = 0
    """Requests without a complete answer."""
    extra: float = 0.0
    """The extra cost of requests that are still read over one that is being answered."""
    last: int = 0
    """The number of the last request that was sent there."""
    reading: Counter[int] = field(default_factory=Counter)
    """The first blocks of prompts that have no answer yet."""


@dataclass
class Flight:
    """A request on its way to an upstream. Must be ended."""

    upstream: str
    _state: _Upstream
    _expected: Expected
    _extra: float
    _first: int | None
    """The first block of its prompt."""
    _added: tuple[list[int], list[int]]
    _is_evidence: bool
    """Whether the beginning that is expected was read before, and is not being read now."""
    _is_reading: bool = True
    _is_open: bool = True

    def answering(self) -> None:
        """The answer has begun: the prompt is read."""
        if not self._is_reading:
            return
        self._is_reading = False
        self._state.extra -= self._extra
        if self._first is not None:
            self._state.reading -= Counter([self._first])

    def found(self, beginning: int) -> None:
        """The upstream says that it had ``beginning`` tokens of the prompt's beginning."""
        if self._is_evidence:
            self._state.known.learn(self._expected.beginning, beginning)

    def end(self, *, was_read: bool) -> None:
        """The request is over. If its prompt was not read, the upstream does not know it."""
        if not self._is_open:
            return
        self._is_open = False
        self.answering()
        self._state.open -= 1
        if not was_read:
            blocks, marks = self._added
            self._state.known.blocks.discard(blocks)
            self._state.known.marks.discard(marks)


class Router:
    """Scores upstreams. Not thread-safe: one event loop calls it."""

    def __init__(
        self, upstreams: Sequence[str] = (), settings: RouterSettings | None = None
    ) -> None:
        self.settings = settings or RouterSettings()
        self._upstreams: dict[str, _Upstream] = {}
        self._sent = 0
        for name in upstreams:
            if name in self._upstreams:
                raise ConfigError(f"upstream {name!r} is given twice; name every upstream once")
            self.add(name)

    def add(self, name: str) -> None:
        """Makes an upstream known, unless it is."""
        self._upstreams.setdefault(name, _Upstream(Known(self.settings.remember_tokens)))

    def remove(self, name: str) -> None:
        """Forgets an upstream and what it has read."""
        self._upstreams.pop(name, None)

    def known(self, name: str) -> Known:
        return self._upstreams[name].known

    def open_requests(self, name: str) -> int:
        return self._upstreams[name].open

    def forget(self, name: str) -> None:
        """The upstream has lost its memory, for instance because it was started anew."""
        self._upstreams[name].known = Known(self.settings.remember_tokens)

    def rank(
        self, sketch: Sketch, among: Collection[str], elsewhere: Mapping[str, int] | None = None
    ) -> list[Choice]:
        """The upstreams ``among`` which a request may choose, the best one first. ``elsewhere``:
        open requests that other routers have sent there."""
        policy = self.settings.policy
        candidates = {name: self._upstreams[name] for name in among}
        expected = {name: one.known.expect(sketch, policy) for name, one in candidates.items()}
        least = min((one.known.tokens for one in candidates.values()), default=0)
        choices = []
        for name, one in candidates.items():
            others = self.settings.request_tokens * (elsewhere or {}).get(name, 0)
            score = self._score(one, expected[name], sketch, least) - others
            choices.append(Choice(name, expected[name], score))
        choices.sort(key=lambda choice: self._order(choice, policy))
        reason = _reason(choices, policy)
        return [
            Choice(one.upstream, one.expected, one.score, reason if not number else "retry")
            for number, one in enumerate(choices)
        ]

    def send(self, choice: Choice, sketch: Sketch = NOTHING) -> Flight:
        """Notes that a request goes to the upstream of ``choice``."""
        state = self._upstreams[choice.upstream]
        self._sent += 1
        state.open += 1
        state.last = self._sent
        extra = max(0.0, WAITING * choice.expected.new - self.settings.request_tokens)
        state.extra += extra
        first = sketch.blocks[0] if sketch.blocks else None
        is_evidence = first not in state.reading
        if first is not None:
            state.reading[first] += 1
        added = state.known.add(sketch)
        return Flight(choice.upstream, state, choice.expected, extra, first, added, is_evidence)

    def _score(self, one: _Upstream, expected: Expected, sketch: Sketch, least: int) -> float:
        queue = one.extra + self.settings.request_tokens * one.open
        share = expected.new / sketch.tokens if sketch.tokens else 0.0
        return _saved(expected) - queue - BALANCE * share * (one.known.tokens - least)

    def _order(self, choice: Choice, policy: str) -> tuple[float, int, int]:
        """The best score, then the fewest open requests, then the one that has waited longest."""
        one = self._upstreams[choice.upstream]
        return (
            (0.0, 0, one.last) if policy == "round-robin" else (-choice.score, one.open, one.last)
        )


def _reason(choices: Sequence[Choice], policy: str) -> str:
    if len(choices) < 2:
        return "only"
    if policy == "round-robin":
        return "turn"
    best = choices[0].expected
    most = max(_saved(one.expected) for one in choices)
    if not most:
        return "new"
    if _saved(best) < most:
        return "load"
    return "beginning" if best.beginning >= best.elsewhere else "content"


def _saved(expected: Expected) -> float:
    return expected.beginning + MOVED_WORTH * expected.elsewhere
