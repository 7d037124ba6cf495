"""One request: plan → assemble → repair or prefill → decode → admit.

``steps()`` is a generator. It yields the rows to run next and receives their logits. A request
that runs alone makes one forward of each segment (``runtime/computing.py``); in a batch,
``runtime/loop.py`` packs the segments of many requests into one forward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch

from kvboost.config import GenerationMode
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.sampling import Picked, describe_rows
from kvboost.model.execution.segment import Segment
from kvboost.model.execution.states import RowStates
from kvboost.model.far.memory import wait_for
from kvboost.model.paged.sampling import TokenSampler
from kvboost.results import SpanKind
from kvboost.reuse.plan import LEAST_TOKENS, Plan
from kvboost.runtime.answer import Answer
from kvboost.runtime.assembling import Assembling
from kvboost.runtime.audit import RECORDED_TOKENS, TopTokens
from kvboost.runtime.computing import Computing, Given, Steps, await_device, run_alone
from kvboost.runtime.drafts import Drafts
from kvboost.runtime.keeping import Keeping
from kvboost.runtime.planner import Lookup
from kvboost.runtime.repairing import Repairing
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.sight import Sight
from kvboost.runtime.step_healing import StepHealing
from kvboost.structured.grammars import Constraint
from kvboost.tokens.hashing import as_token_ids

DESCRIBED_ROWS = 128
"""Rows whose logits are held at a time, if the prompt's tokens are described too."""
KEPT_AFTER = 1.0
"""Seconds after the first token until the prompt's rows are kept, if no other request waits, which
may need them. A short answer ends before, and all of its rows are kept at once. So are those over
moved text: what they were moved from serves others, and healing may make them exact by then."""


class Generation:
    """One request, from its plan to the chunks it leaves. Use each instance for one call of
    ``steps``, ``read``, ``score`` or ``heal``."""

    def __init__(self, runtime: Runtime, state: RequestState, num_logits: int = 1) -> None:
        """``num_logits``: how many of the prompt's last rows to return logits for. They are always
        computed; the rest of the prompt is what they answer."""
        self._runtime = runtime
        self._request = state.request
        self._state = state
        self._num_logits = num_logits
        self._live_end = len(state.request.token_ids) - num_logits + 1
        self._backend = runtime.backend
        self._num_graphs = self._backend.forward.num_graphs
        self._kv: RequestKV
        self._keeping: Keeping
        self._lookup: Lookup
        self._num_shared = 0
        """Rows that a running request has in place."""
        self._healing: StepHealing | None = None
        self._last_token = np.zeros(1, np.int64)
        self._last_ids = torch.from_numpy(self._last_token)  # the same memory
        self._drafts = Drafts(state)
        self._leaves = True
        """Whether it leaves its rows to later requests."""
        self._sight = Sight(runtime.model.vision, state)
        self._rows_run = 0
        """Rows of the forward that the next token comes from; 0 if it was drafted."""

    def steps(self) -> Steps:
        """The whole request. Progress and text appear in its ``RequestState``."""
        with self._lend_kv(), self._keep_at_end():
            plan = yield from self._assemble()
            logits = yield from (self._repair(plan) if plan.moved else self._prefill())
            yield from self._decode(logits[-1])

    def read(self) -> int:
        """Computes the unknown part of the prompt and keeps it; returns the new chunks."""
        with self._lend_kv():
            run_alone(self._backend, self._prompt_logits())
            new = self._keeping.admit()
            self._keeping.remember()
            return new

    def score(self) -> torch.Tensor:
        """The logits of the prompt's last ``num_logits`` rows; keeps nothing."""
        self._leaves = False
        with self._lend_kv():
            logits = run_alone(self._backend, self._prompt_logits())
            wait_for(logits.device)
            self._state.clock.lap("prefill")
            self._keeping.touch_used()
            return logits

    def heal(self, epoch: int) -> Computing[torch.Tensor]:
        """Computes the unknown part of the prompt and keeps every slice before it yields the next:
        it may be closed at any moment. Keeps nothing if something was forgotten after ``epoch``.
        Does not wait for the remote store."""
        rows = self._runtime.rows_for(self._request, batched=False)
        with self._runtime.pool.lend(rows) as kv:
            self._take(kv)
            self._look_up(ask_remote=False)
            yield from self._assemble()
            self._state.epoch = epoch
            return (yield from self._prefill(keep_slices=True))

    def _prompt_logits(self) -> Computing[torch.Tensor]:
        plan = yield from self._assemble()
        return (yield from (self._repair(plan) if plan.moved else self._prefill()))

    @contextmanager
    def _lend_kv(self) -> Iterator[None]:
        """Borrows KV. Its first rows may be those of a running request, or pages of the cache."""
        runtime, request, state = self._runtime, self._request, self._state
        root = runtime.root_of(request)
        rows = runtime.rows_for(request, batched=state.batched)
        state.epoch = runtime.store.epoch
        with runtime.idle_work.hold(), self._look_up() as known:
            prefix = runtime.running.shared_prefix_for(request, root) if state.batched else None
            self._num_shared = prefix.count if prefix is not None else 0
            kept = self._backend.kept_prefix(known, self._live_end - 1)
            if kept is not None and kept.count > self._num_shared:
                prefix, self._num_shared = kept, 0
            with runtime.pool.lend(rows, prefix) as kv, runtime.running.register(state, root, kv):
                del prefix, kept
                self._take(kv)
                yield

    def _take(self, kv: RequestKV) -> None:
        kv.adapter = self._request.adapter
        request = self._request
        kept = request.keep and request.mode is not GenerationMode.BASELINE and self._leaves
        kv.states = self._runtime.make_states(kept=kept)
        self._kv = kv
        self._keeping = Keeping(self._runtime, self._state, kv, self._reusable_rows)

    @contextmanager
    def _keep_at_end(self) -> Iterator[None]:
        """Keeps the computed rows and counts the request, also if it is cancelled."""
        state = self._state
        settled = True
        try:
            yield
        except GeneratorExit:
            # The garbage collector may close a stream in a thread that holds any of our locks.
            settled = state.closing
            raise
        except BaseException:
            state.finish_reason, state.kept = "error", False
            raise
        finally:
            if settled:
                self._keeping.touch_used()
                state.clock.lap("decode")
                self._keeping.admit()
                self._keeping.remember()
                self._keeping.leave_to_healing(self._healing)
                self._runtime.totals.add(state)
                self._runtime.trimmer.after_request()
                state.clock.lap("admit")

    def _look_up(self, *, ask_remote: bool = True) -> Lookup:
        """What is known of the prompt, until it is in place."""
        planner = self._runtime.planner
        self._lookup = planner.lookup(self._request, self._live_end, ask_remote=ask_remote)
        return self._lookup

    def _assemble(self) -> Computing[Plan]:
        """Plans the prompt and copies the known rows into place."""
        assembling = Assembling(self._runtime, self._state, self._kv, self._live_end, self._keeping)
        plan = yield from assembling.run(self._lookup, self._num_shared)
        if self._kv.states is not None:
            self._mark_states(self._kv.states, plan.num_known)
        return plan

    def _mark_states(self, states: RowStates, start: int) -> None:
        """Chooses where states are kept beside the grid: where the prompt leaves text that is
        known, as other prompts may, and before its last token, for the same prompt again. Those at
        the last row that runs are kept in any case."""
        request, last = self._request, len(self._request.token_ids)
        rows = dict.fromkeys(
            (self._lookup.known.matched, request.cacheable_rows, *request.marks), True
        )
        if not self._state.reads:
            rows.setdefault(last - 1, False)
        for row, lasts in rows.items():
            if start + LEAST_TOKENS <= row <= last:
                states.mark(row, lasts=lasts)

    def _prefill(self, *, keep_slices: bool = False) -> Computing[torch.Tensor]:
        """Computes the rest of the prompt, slice by slice. Returns the logits of its last rows."""
        state, ids = self._state, self._sight.token_ids
        described = self._request.params.prompt_logprobs
        state.rows = state.reuse.cached_tokens
        logits = []
        while (start := state.rows) < len(ids):
            end = self._slice_end(start)
            if described is not None and self._reusable_rows:
                end = self._sight.slice_end(start, min(end, start + DESCRIBED_ROWS))
            num_logits = max(0, end - max(start, self._live_end - 1))
            wanted = num_logits if described is None else end - start
            given = yield from self._compute(range(start, end), wanted)
            if described is not None:
                state.prompt_logprobs += describe_rows(given, ids[start + 1 : end + 1], described)
            logits.append(given[len(given) - num_logits :])
            state.rows = end
            if keep_slices:
                self._keeping.admit()
        return logits[-1] if len(logits) == 1 else torch.cat(logits)

    def _repair(self, plan: Plan) -> Computing[torch.Tensor]:
        """Computes the new rows of a prompt with moved spans, together with the moved rows that
        the repair strategy chooses. Returns the logits of the prompt's last rows."""
        repairing = Repairing(self._runtime, self._state, self._kv, self._num_logits, self._sight)
        return (yield from repairing.run(plan))

    def _decode(self, given: Given) -> Steps:
        """Generates tokens until the model, a stop string or the limit ends the answer."""
        request, state, model = self._request, self._state, self._runtime.model
        self._sight.rest()
        params = request.params
        constraint = None
        if request.grammar is not None:  # a forced token has no logits to describe
            constraint = request.grammar.start(forces=params.logprobs is None)
        sampler = self._backend.forward.sampler(
            self._kv, params, model.generation_config, request.vocabulary_ids, constraint
        )
        limit = self._runtime.answer_limit(request)
        self._healing = StepHealing.of(self._runtime, state, self._kv)
        answer = Answer(state, model.tokenizer, model.eos_ids, limit)
        self._start_speculation()
        keeps_early = state.batched and state.is_exact
        keeps_at = time.monotonic() + KEPT_AFTER if keeps_early else math.inf
        is_first = True
        while True:
            if constraint is None and isinstance(given, tuple):  # nearly always, over pages
                picked = [given]
            else:
                picked = yield from self._choose(sampler, constraint, given)
            self._observe_cost()
            is_complete = constraint is not None and constraint.is_complete
            ended = answer.take(picked, completes=is_complete)
            self._record(given)
            if ended:
                break
            keeps = keeps_at < math.inf and (state.is_awaited or time.monotonic() > keeps_at)
            if is_first or keeps:
                is_first = False
                yield None  # show the text before rows are kept, or a prompt searched for a draft
            if keeps:
                keeps_at = math.inf
                self._keeping.admit(ended=False)
                state.clock.lap("admit")
            given = yield from self._next(sampler, constraint, limit)
        self._drafts.confirm()
        answer.finish()
        yield None  # show the text before admission takes its time

    def _choose(
        self, sampler: TokenSampler, constraint: Constraint | None, given: Given
    ) -> Computing[list[Picked]]:
        """The next token, and with a constraint the tokens that it forces before or after it."""
        if constraint is None:
            return [(yield from self._pick(sampler, given))]
        picked: list[Picked] = []
        forced = constraint.take_forced()
        if not forced:
            picked.append((yield from self._pick(sampler, given)))
            constraint.accept(picked[0][0])
            forced = constraint.take_forced()
        sampler.note(forced)
        return [*picked, *((token, None) for token in forced)]

    def _pick(self, sampler: TokenSampler, given: Given) -> Computing[Picked]:
        """The next token: the one given, or one picked from the logits given, ``[vocab]``."""
        if not isinstance(given, torch.Tensor):
            return given
        state = self._state
        ids = state.token_ids or self._sight.token_ids
        soon = sampler.begin(given, state.rows, int(ids[-1]))
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

    def _next(
        self, sampler: TokenSampler, constraint: Constraint | None, limit: int
    ) -> Computing[Given]:
        """Runs the tokens that have no rows yet, the last one and those that a grammar forced, and
        a draft of those that follow. Returns the next token or its logits. An answer has at most
        ``limit`` tokens."""
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
            given: Given | list[Picked] | None = yield from self._compute(range(end), 1)
        else:
            healing = self._healing if state.has_slack else None
            if healing is not None and healing.catches_up(end):
                return (yield from healing.catch_up(end))
            draft = self._drafts.draft(end - start, limit, constraint, support.switches_at)
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
                as_stock=self._as_stock,
                sampler=sampler.for_steps(drafted=bool(draft)),
                decodes=True,
                ahead=len(state.token_ids) + 1 < limit
                and (beside is None or following is not None),
                beside=beside,
                beside_ahead=following,
                places=self._sight.places(range(start, end + len(draft))),
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
        if not self._as_stock and self._healing is None and self._kv.states is None:
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
        state = self._state
        if not state.token_ids:
            state.clock.first_token()
            seconds = state.clock.lap("prefill")
            # A prefill through stock transformers' calls says little of what our kernels cost.
            is_typical = not (self._as_stock and self._runtime.model.forward.has_kernels)
            if is_typical and self._is_alone and not state.reuse.count(SpanKind.MOVED):
                known, total = state.reuse.cached_tokens, state.reuse.prompt_tokens
                self._runtime.cost.observe(total - known, (known + total) // 2, seconds)
        else:
            seconds = state.clock.lap("decode")
            if self._rows_run and self._is_alone:
                cost, drafted = self._runtime.cost, self._rows_run > 1
                if len(state.token_ids) == 1:
                    cost.observe(self._rows_run, state.rows, seconds)
                cost.observe_step(self._rows_run, state.step_seconds, drafted=drafted)

    @property
    def _is_alone(self) -> bool:
        """Whether its forwards were those of no other request, were not recorded meanwhile, and
        took as long as those of others would: not those of an adapter, or over far rows."""
        is_alone = not self._state.accompanied and self._request.adapter is None
        is_alone = is_alone and not self._kv.is_far
        return is_alone and self._backend.forward.num_graphs == self._num_graphs

    def _compute(self, positions: range, num_logits: int) -> Computing[torch.Tensor]:
        """Runs the tokens of the prompt, and perhaps of the answer, at ``positions``."""
        self._kv.prepare(positions.start, positions.stop)
        ids = self._sight.token_ids
        if positions.stop > len(ids):
            ids = as_token_ids(np.concatenate([ids, self._state.token_ids]))
        images = yield from self._sight.rows(positions)
        logits = yield Segment(
            self._kv,
            torch.from_numpy(ids[positions.start : positions.stop].astype(np.int64)),
            positions,
            num_logits,
            as_stock=self._as_stock,
            images=images,
            places=self._sight.places(positions),
        )
        assert isinstance(logits, torch.Tensor)
        return logits

    @cached_property
    def _reusable_rows(self) -> int:
        return self._runtime.planner.reusable(self._request)

    @cached_property
    def _as_stock(self) -> bool:
        """Whether a request that runs alone makes stock transformers' calls: if nothing is reused,
        and if the prompt must go through in one piece, which would take too much scratch memory."""
        return self._request.mode is GenerationMode.BASELINE or not self._reusable_rows

    def _slice_end(self, start: int) -> int:
        """Where the slice that begins at ``start`` ends. Slices bound the memory of one forward,
        and in a batch its time. They end on a fixed grid, so that a hit does not move the later
        slices. If rotation depends on the prompt's length, the model must see it whole."""
        total = len(self._request.token_ids)
        step = total
        if self._reusable_rows:
            step = self._state.slice_rows or self._backend.prefill_slice
        if self._kv.most_rows is not None:
            step = min(step, self._kv.most_rows)
        end = min(self._sight.slice_end(start, (start // step + 1) * step), total)
        mark = None if self._kv.states is None else self._kv.states.next_mark(start)
        return end if mark is None else min(end, mark)
