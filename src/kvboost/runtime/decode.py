"""The answer of one request: its tokens, drafted ones among them, its text, and where it ends."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvboost.config import LIMIT_DRAFTED
from kvboost.model.execution.sampling import Picked
from kvboost.model.execution.segment import Segment
from kvboost.model.paged.sampling import TokenSampler
from kvboost.results import SpanKind
from kvboost.runtime.audit import RECORDED_TOKENS, TopTokens
from kvboost.runtime.computing import Computing, Given, Steps, await_device
from kvboost.runtime.prefill import Prefill
from kvboost.runtime.request import RequestState
from kvboost.runtime.speculation.speculation import Speculator
from kvboost.runtime.step_healing import StepHealing
from kvboost.structured.grammars import Constraint
from kvboost.tokens.images import num_text
from kvboost.tokens.text import AnswerText, Tokenizer

KEPT_AFTER = 1.0
"""Seconds after the first token until the prompt's rows are kept, if no other request waits, which
may need them. A short answer ends before, and all of its rows are kept at once. So are those over
moved text: what they were moved from serves others, and healing may make them exact by then."""


class Decode:
    """The answer of one request, whose prompt is in place."""

    def __init__(self, prefill: Prefill, num_graphs: int) -> None:
        """``num_graphs``: how many there were when the request began."""
        runtime, state, kv = prefill.runtime, prefill.state, prefill.kv
        self._runtime, self._state, self._kv = runtime, state, kv
        self._request, self._prefill = state.request, prefill
        self._num_graphs = num_graphs
        self._limit = runtime.answer_limit(state.request)
        self._constraint: Constraint | None = None
        if state.request.grammar is not None:  # a forced token has no logits to describe
            forces = state.request.params.logprobs is None
            self._constraint = state.request.grammar.start(forces=forces)
        self._sampler: TokenSampler = runtime.backend.forward.sampler(
            kv,
            state.request.params,
            runtime.model.generation_config,
            state.request.vocabulary_ids,
            self._constraint,
        )
        self.healing = StepHealing.of(runtime, state, kv)
        self._drafts = Drafts(state)
        self._last_token = np.zeros(1, np.int64)
        self._last_ids = torch.from_numpy(self._last_token)  # the same memory
        self._rows_run = 0
        """Rows of the forward that the next token comes from; 0 if it was drafted."""

    def steps(self, given: Given) -> Steps:
        """Generates tokens until the model, a stop string or the limit ends the answer. ``given``
        is the first token, or its logits."""
        state, model, constraint = self._state, self._runtime.model, self._constraint
        self._prefill.sight.rest()
        answer = Answer(state, model.tokenizer, model.eos_ids, self._limit)
        self._start_speculation()
        keeps_early = state.batched and state.is_exact
        keeps_at = time.monotonic() + KEPT_AFTER if keeps_early else math.inf
        is_first = True
        while True:
            if constraint is None and isinstance(given, tuple):  # nearly always, over pages
                picked = [given]
            else:
                picked = yield from self._choose(given)
            self._observe_cost()
            is_complete = constraint is not None and constraint.is_complete
            ended = answer.take(picked, completes=is_complete)
            self._record(given)
            if ended:
                break
            keeps = keeps_at < math.inf and (state.turn.is_awaited or time.monotonic() > keeps_at)
            if is_first or keeps:
                is_first = False
                yield None  # show the text before rows are kept, or a prompt searched for a draft
            if keeps:
                keeps_at = math.inf
                self._prefill.keeping.admit(ended=False)
                state.clock.lap("admit")
            given = yield from self._next()
        self._drafts.confirm()
        answer.finish()
        yield None  # show the text before admission takes its time

    def _choose(self, given: Given) -> Computing[list[Picked]]:
        """The next token, and with a constraint the tokens that it forces before or after it."""
        constraint = self._constraint
        if constraint is None:
            return [(yield from self._pick(given))]
        picked: list[Picked] = []
        forced = constraint.take_forced()
        if not forced:
            picked.append((yield from self._pick(given)))
            constraint.accept(picked[0][0])
            forced = constraint.take_forced()
        self._sampler.note(forced)
        return [*picked, *((token, None) for token in forced)]

    def _pick(self, given: Given) -> Computing[Picked]:
        """The next token: the one given, or one picked from the logits given, ``[vocab]``."""
        if not isinstance(given, torch.Tensor):
            return given
        state = self._state
        ids = state.token_ids or self._prefill.sight.token_ids
        soon = self._sampler.begin(given, state.rows, int(ids[-1]))
        yield from await_device(state, soon.is_done)
        return soon.get()

    def _record(self, given: Given) -> None:
        """Keeps what the last token was drawn from, to be compared when the request is healed. On a
        GPU that picks tokens itself, there are logits of the first one only."""
        state, request = self._state, self._request
        if not isinstance(given, torch.Tensor) or state.is_exact or request.heal == "off":
            return
        if request.grammar is not None:  # it decides as well, and forced tokens have no logits
            return
        if len(state.token_ids) == len(state.recorded) + 1 <= RECORDED_TOKENS:
            state.recorded.append(TopTokens.of(given))

    def _next(self) -> Computing[Given]:
        """Runs the tokens that have no rows yet, the last one and those that a grammar forced, and
        a draft of those that follow. Returns the next token or its logits."""
        state, kv = self._state, self._kv
        confirmed, logits = self._drafts.confirm()
        state.rows += confirmed
        self._rows_run = 0
        if logits is not None:
            return logits
        start, end = state.rows, len(self._request.token_ids) + len(state.token_ids)
        draft: list[int] = []
        support = self._runtime.model.support
        if support.switches and any(map(support.switches_at, range(start, end))):
            # From here on, every position rotates by other factors: compute the whole sequence
            # again. Its KV fits no shorter prompt, so it is not kept.
            state.kept = False
            given: Given | list[Picked] | None = yield from self._prefill.compute(range(end), 1)
        else:
            healing = self.healing if state.turn.has_slack else None
            if healing is not None and healing.catches_up(end):
                return (yield from healing.catch_up(end))
            draft = self._drafts.draft(
                end - start, self._limit, self._constraint, support.switches_at
            )
            self._rows_run = end + len(draft) - start
            kv.prepare(start, end + len(draft))
            beside = following = None
            if healing is not None and (beside := healing.rows_beside()) is not None:
                following = healing.rows_after(beside, end)
            self._last_token[0] = state.token_ids[-1]
            few = [*state.token_ids[start - end :], *draft] if self._rows_run > 1 else None
            given = yield Segment(
                kv,
                self._last_ids if few is None else torch.tensor(few),
                range(start, end + len(draft)),
                1 + len(draft),
                as_stock=self._prefill.as_stock,
                sampler=self._sampler.for_steps(drafted=bool(draft)),
                decodes=True,
                ahead=len(state.token_ids) + 1 < self._limit
                and (beside is None or following is not None),
                beside=beside,
                beside_ahead=following,
                places=self._prefill.sight.places(range(start, end + len(draft))),
            )
            if healing is not None and beside is not None:
                healing.computed(beside)
        assert given is not None
        state.rows = end  # only now: a request that is cancelled here keeps only computed rows
        if isinstance(given, tuple):
            return given
        self._drafts.hold(draft, given[1:])
        return given[0]

    def _start_speculation(self) -> None:
        runtime, request = self._runtime, self._request
        # The states of a model cannot go back to before a draft.
        if not self._prefill.as_stock and self.healing is None and self._kv.states is None:
            self._drafts.speculator = runtime.speculation.start(
                self._state,
                runtime.root_of(request),
                runtime.store.epoch,
                runs_ahead=self._kv.runs_ahead and not self._runtime.model.forward.streams,
            )

    def _observe_cost(self) -> None:
        """Teaches the cost model from the prefill and from the first decode step; the other steps
        of a request cost the same. A request that shared its forwards teaches nothing, nor does
        one during which CUDA graphs were recorded."""
        state, cost = self._state, self._runtime.cost
        if not state.token_ids:
            state.clock.first_token()
            seconds = state.clock.lap("prefill")
            # A prefill through stock transformers' calls says little of what our kernels cost.
            is_typical = not (self._prefill.as_stock and self._runtime.model.forward.has_kernels)
            if is_typical and self._is_alone and not state.reuse.count(SpanKind.MOVED):
                known, total = state.reuse.cached_tokens, state.reuse.prompt_tokens
                cost.observe(total - known, (known + total) // 2, seconds)
        else:
            seconds = state.clock.lap("decode")
            if self._rows_run and self._is_alone:
                if len(state.token_ids) == 1:
                    cost.observe(self._rows_run, state.rows, seconds)
                cost.observe_step(self._rows_run, state.step_seconds, drafted=self._rows_run > 1)

    @property
    def _is_alone(self) -> bool:
        """Whether its forwards were those of no other request, were not recorded meanwhile, and
        took as long as those of others would: not those of an adapter, or over far rows."""
        is_alone = not self._state.accompanied and self._request.adapter is None
        is_alone = is_alone and not self._kv.is_far
        return is_alone and self._runtime.backend.forward.num_graphs == self._num_graphs


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


class Drafts:
    """Tokens that may follow, whose rows are in place, each with the logits after it. The rows from
    the first other token on are never attended to: those of the tokens that do follow replace
    them."""

    def __init__(self, state: RequestState) -> None:
        self.speculator: Speculator | None = None
        """Drafts tokens; None if nothing is drafted."""
        self._state = state
        self._rows: deque[tuple[int, Given]] = deque()

    def hold(self, token_ids: Sequence[int], after: torch.Tensor | Sequence[Picked]) -> None:
        """``after``: the logits after each token, ``[tokens, vocab]``, or the tokens picked from
        them."""
        self._rows.extend(zip(token_ids, after, strict=True))

    def confirm(self) -> tuple[int, Given | None]:
        """How many of the answer's tokens without rows were drafted, and the logits after the last
        of them, or the token picked from these; None if some of the tokens were not drafted."""
        if not self._rows:
            return 0, None
        state = self._state
        confirmed, logits = 0, None
        for token in state.token_ids[state.rows - len(state.request.token_ids) :]:
            drafted, logits = self._rows.popleft() if self._rows else (None, None)
            if drafted != token:
                self._rows.clear()
                logits = None
                break
            confirmed += 1
        state.accepted_tokens += confirmed
        return confirmed, logits

    def draft(
        self,
        rows: int,
        limit: int,
        constraint: Constraint | None,
        switches_at: Callable[[int], bool],
    ) -> list[int]:
        """Tokens to run after the last ``rows`` of the answer: no more than it may still get after
        the next one if it has ``limit`` at most, and none from a position on at which the rotation
        changes."""
        if self.speculator is None or self.speculator.rests():
            return []
        state = self._state
        self.speculator.follow()
        end = len(state.request.token_ids) + len(state.token_ids)
        most = min(limit - len(state.token_ids) - 1, LIMIT_DRAFTED)
        most = next((count for count in range(most) if switches_at(end + count)), most)
        allowed = len if constraint is None else constraint.num_allowed

        def may_follow(tokens: list[int]) -> int:
            return allowed(tokens[: num_text(tokens)])

        drafted = self.speculator.draft(rows, most, may_follow) if most > 0 else []
        state.drafted_tokens += len(drafted)
        return drafted
