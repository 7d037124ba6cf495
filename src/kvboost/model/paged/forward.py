"""Runs segments of requests with pages: decode steps, captured forwards, and all others packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig

from kvboost.config import SamplingParams
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.sampling import TokenMask
from kvboost.model.execution.segment import Segment
from kvboost.model.paged.graphs import Capture
from kvboost.model.paged.layers import FusedLayers
from kvboost.model.paged.sampling import TokenSampler
from kvboost.model.paged.slab import Slab
from kvboost.model.paged.steps import StepResult, Steps

MOST_APART = 16
"""Segments that run by themselves in one step: from more on, packing them is faster. One is a graph
that the host launches at once; packed, the host launches every kernel of every layer."""


class SegmentRunner(Protocol):
    """Runs some segments by themselves, faster than packed with others. Called by one thread at a
    time."""

    def takes(self, segment: Segment) -> bool: ...

    def run(self, segment: Segment) -> torch.Tensor | None:
        """The logits of a segment that it takes; None if it does not after all."""

    def forget_graphs(self) -> None:
        """The model has changed."""


class PagedForward:
    """Runs the next rows of requests with pages of ``slab`` as decode steps, all their rows through
    layers of ours, if the model has such, and what ``runner`` takes with it. Thread-safe, as the
    ``forward`` that runs everything else."""

    runner: SegmentRunner | None = None
    uses_one_thread = True

    def __init__(self, forward: Forward, slab: Slab, capture: Capture) -> None:
        self.slab = slab
        self._forward = forward
        self._adapters: tuple[str, ...] = ()
        self.layers: FusedLayers | None = None
        with forward.lock:
            forward.bind()
            if not forward.streams:
                self.layers = FusedLayers(forward.model, slab, forward.run_rows)
            slots = self.layers.adapter_slots() if self.layers is not None else None
            self.steps = Steps(slab, forward.run_rows, forward.num_logits, capture, slots)
            self.steps.runs_ahead = not forward.streams

    @property
    def beside_rows(self) -> int:
        """The number of a request's rows that can run beside its next one, in little more time."""
        return self.steps.beside_rows

    @property
    def num_graphs(self) -> int:
        """The number of recorded CUDA graphs."""
        return self.steps.capture.num_graphs

    def run(self, segments: Sequence[Segment]) -> list[StepResult | None]:
        """The result of each segment: the next token if it has a sampler and one can be picked on
        the device, or those after each row if it has several; else logits ``[num_logits, vocab]``.
        The next rows of requests are a decode step of their own, and a few segments that the runner
        takes are forwards of their own; the others are packed into one forward. A segment that
        joins steps under way may have no result yet: the next call with it has."""
        with self._turn():
            return self._run(segments)

    def _run(self, segments: Sequence[Segment]) -> list[StepResult | None]:
        self._leave_one_beside(segments)
        results: list[StepResult | None] = [None] * len(segments)
        next_rows: list[int] = []
        rest: list[int] = []
        for index, segment in enumerate(segments):
            (next_rows if self.steps.takes(segment) else rest).append(index)
        apart = self._runs_apart([segments[index] for index in rest])
        others: list[int] = []
        for index, alone in zip(rest, apart, strict=True):
            if alone and self.runner is not None:
                results[index] = self.runner.run(segments[index])
            if results[index] is None:
                others.append(index)
        if others:
            packed = self._forward.run([segments[index] for index in others])
            for index, part in zip(others, packed, strict=True):
                results[index] = part
        if next_rows:
            picked = self.steps.run([segments[index] for index in next_rows])
            for index, result in zip(next_rows, picked, strict=True):
                results[index] = result
        return results

    def run_one(self, segment: Segment) -> StepResult:
        """The same for a segment alone, which joins no others."""
        (result,) = self.run([segment])
        assert result is not None
        return result

    def exclusively(self, record: Callable[[], object]) -> None:
        """Calls what records steps or forwards, while nothing else runs."""
        with self._turn():
            record()

    def sampler(
        self,
        kv: RequestKV,
        params: SamplingParams,
        defaults: GenerationConfig,
        prompt_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        mask: TokenMask | None = None,
    ) -> TokenSampler:
        """The sampler of a request: on the device if its KV is in pages, unless a mask
        on the host says which tokens are allowed."""
        found = None
        if mask is None and kv.slab is self.slab:
            found = self.steps.sampling.register(kv.holding.row, params, defaults, prompt_ids)
        return found or self._forward.sampler(kv, params, defaults, prompt_ids, mask)

    def close(self) -> None:
        """Gives the model its own layers back."""
        with self._forward.lock:
            if self.layers is not None:
                self.layers.restore()

    def _leave_one_beside(self, segments: Sequence[Segment]) -> None:
        """Rows beside a step run in it, if it takes them; those of other segments run before."""
        is_taken = False
        for segment in segments:
            if segment.beside is None:
                continue
            if not is_taken and self.steps.takes(segment):
                is_taken = True
            else:
                self.run_one(segment.beside)
                segment.beside = segment.beside_ahead = None
                segment.ahead = False

    def _runs_apart(self, segments: Sequence[Segment]) -> list[bool]:
        """Which segments the runner runs: those that it takes, unless there are many. Segments with
        hooks would slow down all that they are packed with."""
        if self.runner is None:
            return [False] * len(segments)
        taken = [
            segment.kv.adapter is None
            and segment.images is None
            and segment.places is None
            and self.runner.takes(segment)
            for segment in segments
        ]
        if sum(taken) > MOST_APART:
            hooks = [segment.hook is not None for segment in segments]
            taken = [both and hooked for both, hooked in zip(taken, hooks, strict=True)]
        return taken

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """While it lasts, the model is this thread's, without gradients. Binds our attention. A
        graph is of the adapters that were active when it was recorded."""
        with self._forward.lock, torch.inference_mode():
            self._forward.bind()
            model = self._forward.model
            active = tuple(model.active_adapters()) if model._hf_peft_config_loaded else ()
            if active != self._adapters:
                self._adapters = active
                self.steps.forget_graphs()
                if self.runner is not None:
                    self.runner.forget_graphs()
            yield
