"""One request: plan → assemble → repair or prefill → decode → admit.

``steps()`` is a generator. It yields the rows to run next and receives their logits. A request
that runs alone makes one forward of each segment (``runtime/computing.py``); in a batch,
``runtime/stepping.py`` packs the segments of many requests into one forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvboost.config import GenerationMode
from kvboost.model.execution.kv import RequestKV
from kvboost.runtime.computing import Computing, Steps, run_alone
from kvboost.runtime.decode import Decode
from kvboost.runtime.keeping import Keeping
from kvboost.runtime.planner import Lookup
from kvboost.runtime.prefill import Prefill
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime


class Generation:
    """One request, from its plan to the chunks it leaves. Use each instance for one call of
    ``steps``, ``read``, ``score`` or ``heal``."""

    def __init__(self, runtime: Runtime, state: RequestState, num_logits: int = 1) -> None:
        """``num_logits``: how many of the prompt's last rows to return logits for. They are always
        computed; the rest of the prompt is what they answer."""
        self._runtime = runtime
        self._request = state.request
        self._state = state
        self._live_end = len(state.request.token_ids) - num_logits + 1
        self._num_graphs = runtime.backend.forward.num_graphs
        self._keeping: Keeping
        self._prefill: Prefill
        self._decode: Decode | None = None
        self._leaves = True
        """Whether it leaves its rows to later requests."""

    def steps(self) -> Steps:
        """The whole request. Progress and text appear in its ``RequestState``."""
        with self._lend_kv(), self._keep_at_end():
            logits = yield from self._prefill.steps()
            self._decode = Decode(self._prefill, self._num_graphs)
            yield from self._decode.steps(logits[-1])

    def read(self) -> int:
        """Computes the unknown part of the prompt and keeps it; returns the new chunks."""
        with self._lend_kv():
            run_alone(self._runtime.backend, self._prefill.steps())
            new = self._keeping.admit()
            self._keeping.remember()
            return new

    def score(self) -> torch.Tensor:
        """The logits of the prompt's last ``num_logits`` rows; keeps nothing."""
        self._leaves = False
        with self._lend_kv():
            logits = run_alone(self._runtime.backend, self._prefill.steps())
            self._prefill.kv.shape.traits.wait(logits.device)
            self._state.clock.lap("prefill")
            self._keeping.touch_used()
            return logits

    def heal(self, epoch: int) -> Computing[torch.Tensor]:
        """Computes the unknown part of the prompt and keeps every slice before it yields the next:
        it may be closed at any moment. Keeps nothing if something was forgotten after ``epoch``.
        Does not wait for the remote store."""
        rows = self._runtime.rows_for(self._request, batched=False)
        with self._runtime.pool.lend(rows) as kv:
            self._take(kv, self._look_up(ask_remote=False))
            yield from self._prefill.assemble()
            self._state.epoch = epoch
            return (yield from self._prefill.compute_rest(keep_slices=True))

    @contextmanager
    def _lend_kv(self) -> Iterator[None]:
        """Borrows KV. Its first rows may be those of a running request, or pages of the cache."""
        runtime, request, state = self._runtime, self._request, self._state
        root = runtime.root_of(request)
        rows = runtime.rows_for(request, batched=state.batched)
        state.epoch = runtime.store.epoch
        with runtime.idle_work.hold(), self._look_up() as lookup:
            prefix = runtime.running.shared_prefix_for(request, root) if state.batched else None
            num_shared = prefix.count if prefix is not None else 0
            kept = runtime.backend.kept_prefix(lookup.known, self._live_end - 1)
            if kept is not None and kept.count > num_shared:
                prefix, num_shared = kept, 0
            with runtime.pool.lend(rows, prefix) as kv, runtime.running.register(state, root, kv):
                del prefix, kept
                self._take(kv, lookup, num_shared)
                yield

    def _take(self, kv: RequestKV, lookup: Lookup, num_shared: int = 0) -> None:
        """``num_shared``: how many rows a running request has in place."""
        kv.adapter = self._request.adapter
        request = self._request
        kept = request.keep and request.mode is not GenerationMode.BASELINE and self._leaves
        kv.states = self._runtime.make_states(kept=kept)
        self._keeping = Keeping(self._runtime, self._state, kv)
        self._prefill = Prefill(
            self._runtime, self._state, kv, self._keeping, self._live_end, lookup, num_shared
        )

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
                self._keeping.leave_to_healing(self._decode.healing if self._decode else None)
                self._runtime.totals.add(state)
                self._runtime.trimmer.after_request()
                state.clock.lap("admit")

    def _look_up(self, *, ask_remote: bool = True) -> Lookup:
        """The cached rows of the prompt, held until they are in place."""
        planner, state = self._runtime.planner, self._state
        early, state.early = state.early, None
        return planner.lookup(self._request, self._live_end, ask_remote=ask_remote, early=early)
