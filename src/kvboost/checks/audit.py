"""Auditing: compares a share of the answers over moved text with a full prefill, when idle."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from kvboost.config import GenerationMode
from kvboost.results import Score, kl_divergence
from kvboost.runtime.request import RequestState

Given = TypeVar("Given")
Sent = TypeVar("Sent")

MOST_WAITING = 16
IDLE_SECONDS = 0.5


class Engine(Protocol):
    """What auditing needs of an engine: its public face."""

    def score(
        self, prompt: Sequence[int], continuation: Sequence[int], mode: GenerationMode
    ) -> Score: ...


@dataclass(frozen=True)
class _Sample:
    prompt: list[int]
    answer: list[int]
    logits: torch.Tensor


class Auditor:
    """Samples ``fraction`` of the requests that reused moved text and compares the distributions of
    their first tokens with a full prefill. A separate thread does so once no request has run for
    ``IDLE_SECONDS``; it starts with the first sample."""

    def __init__(self, engine: Engine, fraction: float) -> None:
        self._engine = engine
        self._fraction = fraction
        self._random = random.Random(1)
        self._waiting: deque[_Sample] = deque(maxlen=MOST_WAITING)
        self._audited = 0
        self._total_kl = 0.0
        self._max_kl = 0.0
        self._agreed = 0
        self._failed = 0
        self._active = 0
        self._quiet_since = time.monotonic()
        self._changed = threading.Condition()
        self._comparing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(
        self, state: RequestState, steps: Generator[Given, Sent, None]
    ) -> Generator[Given, Sent, None]:
        """Wraps ``steps``: the request counts as active while they run."""
        if not self._fraction:
            return steps
        return self._watch(state, steps)

    def _watch(
        self, state: RequestState, steps: Generator[Given, Sent, None]
    ) -> Generator[Given, Sent, None]:
        state.record = self._random.random() < self._fraction
        with self._changed:
            self._active += 1
            self._changed.notify_all()
        try:
            yield from steps
        finally:
            with self._changed:
                self._active -= 1
                self._quiet_since = time.monotonic()
                if state.recorded and state.finish_reason in ("stop", "length"):
                    answer = state.token_ids[: len(state.recorded)]
                    logits = torch.stack(state.recorded[: len(answer)]).cpu()
                    sample = _Sample(state.request.token_ids.tolist(), answer, logits)
                    self._waiting.append(sample)
                    self._start()
                self._changed.notify_all()

    def drain(self) -> None:
        """Compares all waiting samples now, and waits for one that is being compared."""
        while self._compare_next():
            pass

    def stats(self) -> dict[str, Any]:
        with self._changed:
            count = self._audited
            return {
                "fraction": self._fraction,
                "audited": count,
                "waiting": len(self._waiting),
                "failed": self._failed,
                "mean_kl": self._total_kl / count if count else None,
                "max_kl": self._max_kl if count else None,
                "first_token_agreement": self._agreed / count if count else None,
            }

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._work, name="kvboost-audit", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while self._await_idle():
            self._compare_next()

    def _await_idle(self) -> bool:
        """Waits until there is a sample and no request has run for a while; False once closed."""
        with self._changed:
            while not self._closed:
                rest = self._quiet_since + IDLE_SECONDS - time.monotonic()
                if self._waiting and not self._active and rest <= 0:
                    return True
                # Every request that begins or ends wakes it; so does the end of the quiet time.
                self._changed.wait(rest if self._waiting and not self._active else None)
            return False

    def _compare_next(self) -> bool:
        """Compares one sample; False if none is waiting."""
        with self._comparing:
            with self._changed:
                sample = self._waiting.popleft() if self._waiting else None
            if sample is not None:
                self._compare(sample)
        return sample is not None

    def _compare(self, sample: _Sample) -> None:
        try:
            full = self._engine.score(sample.prompt, sample.answer, GenerationMode.BASELINE)
        except Exception:  # out of memory, or closed in the meantime: serving goes on
            with self._changed:
                self._failed += 1
            return
        divergence = float(kl_divergence(full.logits, sample.logits).mean())
        with self._changed:
            self._audited += 1
            self._total_kl += divergence
            self._max_kl = max(self._max_kl, divergence)
            self._agreed += int(full.logits[0].argmax()) == int(sample.logits[0].argmax())
