"""Compiled grammars, and how far an answer has come in one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvboost.errors import StructuredOutputError
from kvboost.structured.formats import grammar_for
from kvboost.structured.library import library

KEPT_GRAMMARS = 64
"""How many compiled grammars are kept; the one that was not used for longest goes first."""
MAX_FORCED = 64
"""How many forced tokens are taken at once: they are rows of one forward."""
SHOWN_CHARACTERS = 400
"""Of an error: it may quote the whole grammar."""


class Grammars:
    """The compiled grammars of one model. Thread-safe.

    ``tokenizer`` gives the model's tokenizer in the JSON format of the tokenizers library. It is
    asked once, when the first grammar is compiled.
    """

    def __init__(
        self, tokenizer: Callable[[], str], vocab_size: int, eos_ids: Iterable[int]
    ) -> None:
        self._read_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._tokenizer: Any = None
        self._reading = threading.Lock()
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Reads the tokenizer now, so that no request waits for it."""
        self._known_tokens()

    def compile(self, grammar: str, option: str = "grammar") -> Grammar:
        """The compiled ``grammar``, a kept one if there is one. Raises StructuredOutputError, which
        names ``option``, if it asks for something that cannot be enforced. A large grammar takes
        up to a second."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        matcher = library().LLMatcher(self._known_tokens(), grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # fails if no answer is possible
        if matcher.is_error():
            raise StructuredOutputError(option, _reason(matcher))
        with self._lock:
            found = self._compiled.setdefault(grammar, Grammar(matcher))
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        return found

    def of_format(self, options: Mapping[str, Any]) -> Grammar | None:
        """The compiled grammar of the format in ``options``; None if there is none."""
        if isinstance(compiled := options.get("grammar"), Grammar):
            return compiled
        found = grammar_for(options)
        return None if found is None else self.compile(*found)

    def _known_tokens(self) -> Any:
        """The tokenizer as llguidance wants it. Making it takes about a second, in which no other
        thread of the process runs."""
        with self._reading:
            if self._tokenizer is None:
                self._tokenizer = library().LLTokenizer(
                    self._read_tokenizer(),
                    n_vocab=self._vocab_size,
                    eos_token=self._eos_ids or None,
                )
            return self._tokenizer


class Grammar:
    """A compiled grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self, *, forces: bool = True) -> Constraint:
        """A new answer. Without ``forces``, no tokens are taken as forced."""
        return Constraint(self._matcher.deep_copy(), forces=forces)


class Constraint:
    """One answer in a grammar: which tokens may follow."""

    def __init__(self, matcher: Any, *, forces: bool) -> None:
        self._matcher = matcher
        self._forces = forces

    def allowed(self) -> bytes:
        """One bit per token, the lowest first: whether it may be the next one. The end of the
        sequence may be exactly where the grammar accepts the answer."""
        bits: bytes = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def take_forced(self) -> list[int]:
        """The next tokens if the grammar leaves no choice, up to ``MAX_FORCED``; accepts them."""
        if not self._forces or self.is_complete:
            return []
        forced: list[int] = self._matcher.compute_ff_tokens()[:MAX_FORCED]
        if forced:
            self._matcher.consume_tokens(forced)
        self._check()
        return forced

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these tokens may follow one another, the first one next. Accepts none."""
        return int(self._matcher.validate_tokens(token_ids)) if not self.is_complete else 0

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow but the end of the sequence."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise StructuredOutputError("grammar", _reason(self._matcher))


def _reason(matcher: Any) -> str:
    """The first paragraph of an error of llguidance's; the rest shows the state of its parser."""
    error = str(matcher.get_error()).strip()
    text = " ".join(error.partition("\n\n")[0].partition("<state>")[0].split())
    if text == "NoExtensionBias":
        return "no text matches it"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
