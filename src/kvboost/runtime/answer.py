"""The growing answer of one request: its tokens, its text, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost.model.sampling import Picked
from kvboost.runtime.request import RequestState
from kvboost.tokens.text import Detokenizer, StopMatcher, Tokenizer


class Answer:
    """Adds tokens to a request's state until the model, a stop string, a format or the limit ends
    the answer."""

    def __init__(
        self, state: RequestState, tokenizer: Tokenizer, eos_ids: frozenset[int], limit: int
    ) -> None:
        params = state.request.params
        self._state = state
        self._limit = limit
        self._skips = params.skip_special_tokens
        self._ends = frozenset[int]() if params.ignore_eos else eos_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._includes_stop = params.include_stop
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=self._skips)
        self._stops = StopMatcher(params.stop, includes=params.include_stop)

    def take(self, picked: Sequence[Picked], *, completes: bool = False) -> bool:
        """Adds the next tokens; True if the answer has ended. Tokens after its end are left out.
        ``completes``: after all of them, the format of the answer is complete."""
        state = self._state
        for number, (token, logprob) in enumerate(picked, start=1):
            state.accept(token, logprob)
            is_end = token in self._ends or token in self._stop_ids
            if self._shows(token):
                state.show(self._stops.push(self._detokenizer.push(token)))
            if is_end or self._stops.stopped or (completes and number == len(picked)):
                state.finish_reason = "stop"
                return True
            if len(state.token_ids) == self._limit:
                state.finish_reason = "length"
                return True
        return False

    def _shows(self, token: int) -> bool:
        """Whether the text of a token belongs to the answer. If special tokens are skipped, those
        that end it have none."""
        if token in self._stop_ids:
            return self._includes_stop
        return token not in self._ends or self._skips

    def finish(self) -> None:
        """Shows the text that was held back."""
        self._state.show(self._stops.push(self._detokenizer.finish()))
        self._state.show(self._stops.finish())
        if self._stops.stopped:
            self._state.finish_reason = "stop"
