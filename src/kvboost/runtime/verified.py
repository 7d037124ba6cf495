"""Verified answers: drafted over repaired rows, released once exact rows have confirmed them.

The draft shows nobody anything. Then prompt and draft go through the model once more, front to back
from the end of the exact prefix, in place of the rows that they were drafted on. From the exact
logits the request picks its tokens as ever, with the random numbers of its seed: as long as these
are the drafted ones, their rows are there already; from the first other one on, it decodes. So the
answer is the one that a full prefill gives, greedy or sampled, whatever the draft was.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import replace

import numpy as np
import torch

from kvboost.model.kv import RequestKV
from kvboost.results import Healing
from kvboost.runtime.computing import Computing, Steps
from kvboost.runtime.generation import Generation
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.tokens.hashing import as_token_ids

MOST_DRAFTED = 256
"""Tokens of a draft, whose logits are all held at once. What follows them is decoded exactly."""


class VerifiedGeneration(Generation):
    """One request with ``exactness="verified"``. Its draft is the whole answer."""

    speculates = False

    def __init__(self, runtime: Runtime, state: RequestState) -> None:
        super().__init__(runtime, state)
        params = self._request.params
        if params.samples and params.seed is None:  # draft and answer draw the same numbers
            seeded = replace(params, seed=secrets.randbits(63))
            self._request = replace(self._request, params=seeded)

    def steps(self) -> Steps:
        with self._lend_kv(), self._keep_at_end():
            plan = yield from self._assemble()
            logits = yield from (self._repair(plan) if plan.moved else self._prefill())
            given = logits[-1]
            if not self._state.is_exact:
                self._state.clock.lap("prefill")
                draft = yield from self._draft(given)
                given = yield from self._confirm(draft)
                self._state.clock.lap("verify")
            yield from self._decode(given)

    def _draft(self, given: torch.Tensor) -> Computing[list[int]]:
        """The tokens of an answer over the rows as they are."""
        request, params = self._request, self._request.params
        limit = min(self._runtime.answer_limit(request), MOST_DRAFTED)
        if (reuse_limit := self._runtime.model.support.reuse_limit) is not None:
            limit = min(limit, reuse_limit - len(request.token_ids))
        if limit <= 0:
            return []
        params = replace(params, max_new_tokens=limit, logprobs=None)
        state = RequestState(replace(request, params=params), rows=self._state.rows)
        state.accompanied = True  # its times say nothing about what forwards cost
        yield from _Draft(self._runtime, state).over(self._kv, given)
        # A device has picked the last token, and may have launched a step with it.
        self._runtime.model.forward.forget_step(self._kv)
        return state.token_ids

    def _confirm(self, draft: list[int]) -> Computing[torch.Tensor]:
        """Computes prompt and draft exactly; returns the logits of the prompt's last row."""
        state, num_prompt = self._state, len(self._request.token_ids)
        ids = as_token_ids(np.concatenate([self._request.token_ids, draft]))
        state.accompanied = True
        approximate = num_prompt - state.exact_rows
        logits = []
        while (start := state.exact_rows) < len(ids):
            step = state.slice_rows or self._runtime.prefill_slice
            end = min((start // step + 1) * step, len(ids))
            num_logits = max(0, end - max(start, num_prompt - 1))
            logits.append((yield from self._compute(ids[start:end], range(start, end), num_logits)))
            state.exact_rows = end  # whatever happens now, so many rows are exact
        state.exact_rows = sys.maxsize
        after = torch.cat(logits)
        self._drafts.hold(draft, after[1:])
        state.healing = Healing(approximate, approximate, "done", draft=tuple(draft))
        return after[0]


class _Draft(Generation):
    """An answer over the KV of another request, which it neither plans nor keeps."""

    speculates = False

    def over(self, kv: RequestKV, given: torch.Tensor) -> Steps:
        self._take(kv)
        return self._decode(given)


def make_generation(runtime: Runtime, state: RequestState) -> Generation:
    """What runs a request."""
    if state.request.exactness == "verified":
        return VerifiedGeneration(runtime, state)
    return Generation(runtime, state)
