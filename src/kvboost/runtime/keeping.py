"""Keeps what later requests can use of a request: chunks, texts to draft from, rows to heal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvboost.cache.lookup.hits import Hit
from kvboost.cache.states import KnownStates
from kvboost.config import GenerationMode
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.sampling import takes_likeliest
from kvboost.model.execution.states import RowStates
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.step_healing import StepHealing
from kvboost.tokens.hashing import TokenIds


class Keeping:
    """Keeps the rows of one request, as far as it may be kept."""

    def __init__(self, runtime: Runtime, state: RequestState, kv: RequestKV) -> None:
        self._runtime, self._state, self._kv = runtime, state, kv
        self._request = state.request
        self.reusable_rows = runtime.planner.reusable(state.request)
        """How many of the first rows another request could use."""
        self._ids = state.request.token_ids
        self.used: list[Sequence[Hit]] = []
        """Paths of chunks that served it, of which the eviction order has not heard yet."""

    def admit(self, *, ended: bool = True) -> int:
        """Keeps the rows this request computed, generated tokens included; returns how many
        chunks are new. If it has not ``ended``, keeps nothing while the store is busy, and the last
        chunk, which grows, only if other requests wait."""
        runtime, request, state, kv = self._runtime, self._request, self._state, self._kv
        self.touch_used()  # before what is new: it follows these chunks
        if not self._keeps_rows:
            return 0
        num_rows = min(state.rows, self.reusable_rows, request.cacheable_rows)
        boundaries: Sequence[int] = request.boundaries
        states: KnownStates | None = None
        if kv.states is not None:
            states = self._known_states(kv.states, num_rows, ended=ended)
            # Rows after the last states would serve nobody.
            num_rows = max([row for row in kv.states.ends if row <= num_rows], default=0)
            boundaries = [*boundaries, *kv.states.ends]
        ids = self._token_ids[:num_rows]
        new = runtime.store.admit(
            runtime.root_of(request),
            ids,
            runtime.backend.rows_of(kv).packing(),
            exact_rows=state.exact_rows,
            repair=request.repair.name,
            boundaries=boundaries,
            epoch=state.epoch,
            wait=ended,
            grows=not ended and not state.turn.is_awaited and kv.states is None,
            states=states,
            lag_of=request.images.lag_of if request.images and request.is_spatial else None,
        )
        state.new_chunks += new
        return new

    def _known_states(self, states: RowStates, num_rows: int, *, ended: bool) -> KnownStates:
        """Where the states of the first rows are known. Chunks end there."""
        rows = states.known_rows(num_rows, current=ended)
        states.ends.update(rows)
        turns: list[int] = []
        if self._state.token_ids and not self._state.reads:
            turns = [num_rows, len(self._request.token_ids) - 1]
        passing = frozenset(row for row in turns if not states.lasts(row))
        return KnownStates(frozenset(rows), passing, self._state.reuse.cached_tokens)

    def touch_used(self) -> None:
        """Tells the eviction order what served this request. It learns from that, which takes its
        time, so the first token does not wait for it."""
        used, self.used = self.used, []
        if used:
            self._runtime.store.touch(*used)

    def remember(self) -> None:
        """Later requests may be drafted from this text."""
        runtime, request, state = self._runtime, self._request, self._state
        if self._keeps_rows and request.speculate != "off":
            root = runtime.root_of(request)
            runtime.speculation.texts.add(root, self._token_ids, state.epoch)

    def leave_to_healing(self, healing: StepHealing | None) -> None:
        """If rows that were kept are approximate, they become exact when there is time."""
        runtime, request, state = self._runtime, self._request, self._state
        is_kept = self._keeps_rows and state.rows <= request.cacheable_rows
        if healing is not None and healing.is_done:
            healing.finish(is_kept=is_kept)
        elif is_kept:
            # A sequence that fills what may be reused could not be read again in parts.
            num_rows = max(0, min(state.rows, self.reusable_rows - 1))
            greedy = takes_likeliest(request.params, runtime.model.generation_config)
            is_free = request.grammar is None
            ids = self._token_ids[:num_rows]
            runtime.idle_work.add_unhealed(state, ids, takes_likeliest=greedy and is_free)

    @property
    def _keeps_rows(self) -> bool:
        request = self._request
        reuses = request.mode is not GenerationMode.BASELINE and self._kv.is_exact
        if not (reuses and request.keep and self._state.kept):
            return False
        applied = request.adapter  # rows of one that was unloaded would serve no request
        return applied is None or self._runtime.adapters.is_loaded(applied.adapter)

    @property
    def _token_ids(self) -> TokenIds:
        answer, known = self._state.token_ids, self._ids
        if len(known) < len(self._request.token_ids) + len(answer):
            self._ids = np.concatenate([self._request.token_ids, answer], dtype=np.int32)
            self._ids.flags.writeable = False
        return self._ids
