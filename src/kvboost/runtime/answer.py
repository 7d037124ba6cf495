"""The growing answer of one request: its tokens, its text, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost.model.execution.sampling import Picked
from kvboost.runtime.request import RequestState
from kvboost.tokens.text import AnswerText, Tokenizer


class Answer:
    """Adds tokens to a request's state until the model, a stop string, a format or the limit ends
    the answer."""

    def __init__(
        self, state: RequestState, tokenizer: Tokenizer, eos_ids: frozenset[int], limit: int
    ) -> None:
        params = state.request.params
        self._state = state
        self._limit = limit
        ends = frozenset[int]() if params.ignore_eos else eos_ids
        self._ends = ends | frozenset(params.stop_token_ids)
        self._text: AnswerText | None = None
        if params.stop or not state.shows_ids:
            self._text = AnswerText(
                tokenizer,
                eos_ids,
                stop=params.stop,
                stop_token_ids=params.stop_token_ids,
                include_stop=params.include_stop,
                ignore_eos=params.ignore_eos,
                skip_special_tokens=params.skip_special_tokens,
            )

    def take(self, picked: Sequence[Picked], *, completes: bool = False) -> bool:
        """Adds the next tokens; True if the answer has ended. Tokens after its end are left out.
        ``completes``: after all of them, the format of the answer is complete."""
        state, text = self._state, self._text
        for number, (token, logprob) in enumerate(picked, start=1):
            state.accept(token, logprob)
            is_end = token in self._ends
            if text is not None:
                state.show(text.push(token))
                is_end = is_end or text.stopped
            if is_end or (completes and number == len(picked)):
                state.finish_reason = "stop"
                return True
            if len(state.token_ids) == self._limit:
                state.finish_reason = "length"
                return True
        return False

    def finish(self) -> None:
        """Shows the text that was held back."""
        if self._text is not None:
            self._state.show(self._text.finish())
            if self._text.stopped:
                self._state.finish_reason = "stop"
