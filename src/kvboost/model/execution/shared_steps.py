"""One forward for the next rows of several answers, for a model with states.

The model gets a sequence of one row for each request. So its layers with states run as they are,
with the states of the requests stacked; its attention is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost.model.execution import attention
from kvboost.model.execution.attention import Batch
from kvboost.model.execution.caches import StepCache
from kvboost.model.execution.segment import Segment
from kvboost.model.execution.states import StackedStates
from kvboost.model.triton.host import to_device


class SharedSteps:
    """Runs the next rows of several answers together."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Mapping[int, int],
        call: Callable[..., torch.Tensor],
        alone_beyond: int | None,
    ) -> None:
        """``layers``: as in ``caches.py``. ``call`` runs ``model`` for segments and returns its
        logits. Rows from position ``alone_beyond`` on run alone."""
        self._config: Any = model.config.get_text_config()
        self._device = model.device
        self._layers = layers
        self._call = call
        self._alone_beyond = alone_beyond

    def run(self, segments: Sequence[Segment]) -> None:
        """Runs those of the segments that are next rows of answers, if there are several. Their
        states have the results. If it fails, the states are as before."""
        step = [segment for segment in segments if self._takes(segment)]
        if len(step) > 1:
            states, logits = self.compute(step)
            states.end([segment.end for segment in step], step, logits)

    def compute(self, segments: Sequence[Segment]) -> tuple[StackedStates, torch.Tensor]:
        """The states after one row of each segment, and the logits. The states of the requests do
        not change."""
        states = StackedStates([s.kv.states for s in segments if s.kv.states is not None])
        batch = Batch(segments)  # no others run between its layers: their attention may be another
        token_ids = torch.cat([segment.token_ids.to(self._device) for segment in segments])
        positions = to_device([s.first for s in segments], torch.int64, self._device)
        with self._attending():
            logits = self._call(
                segments,
                input_ids=token_ids[:, None],
                position_ids=positions[:, None],
                past_key_values=StepCache(batch, self._layers, states),
            )
        return states, logits[:, 0]

    def _takes(self, segment: Segment) -> bool:
        states, limit = segment.kv.states, self._alone_beyond
        is_next = segment.decodes and len(segment) == 1 and segment.first > 0
        can_follow = states is not None and states.is_at(segment.first)
        return (
            is_next
            and can_follow
            and segment.places is None
            and (limit is None or segment.end <= limit)
        )

    @contextmanager
    def _attending(self) -> Iterator[None]:
        """The model's own attention is back at the end, since this may run between two layers of a
        forward that uses it."""
        own = self._config._attn_implementation
        self._config._attn_implementation = attention.STEP
        try:
            yield
        finally:
            self._config._attn_implementation = own
