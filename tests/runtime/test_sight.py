"""Images of a request, for its forwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvboost.reuse.driver import step_end
from kvboost.runtime.generation import Generation
from kvboost.runtime.sight import Sight
from support.requests import begin
from support.vision_models import about, picture, vision_engine


def test_slices_do_not_end_inside_images_that_see_ahead() -> None:
    with vision_engine("gemma3") as engine:
        state = begin(engine, about(picture(), "What?", "Look: "))
        sight = Sight(engine.model.vision, state)
        ((start, end),) = sight.whole
        assert sight.slice_end(0, start + 3) == start
        assert sight.slice_end(start, start + 3) == end
        assert [sight.slice_end(0, one) for one in (start, end, end + 4)] == [start, end, end + 4]


@pytest.mark.parametrize("name", ("smolvlm", "gemma3"))
def test_rows_get_the_features_of_their_places(name: str) -> None:
    with vision_engine(name) as engine:
        prompt: Any = about(picture(), "What?", "Look: ")
        prompt[0]["content"] += about(picture(2), "And that?")[0]["content"]
        state = begin(engine, prompt)
        sight = Sight(engine.model.vision, state)

        def rows(positions: Any) -> Any:
            steps = sight.rows(positions)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value

        total = len(state.request.token_ids)
        every = rows(range(total))
        some = rows(torch.arange(1, total, 3))
        expected = {int(row): one for row, one in zip(every.rows, every.features, strict=True)}
        found = {1 + 3 * int(row): one for row, one in zip(some.rows, some.features, strict=True)}
        assert found and all(torch.equal(one, expected[row]) for row, one in found.items())
        assert rows(range(3)) is None and rows(range(total, total + 2)) is None


def test_an_answer_holds_no_features() -> None:
    with vision_engine("smolvlm") as engine:
        state = begin(engine, about(picture(), "What?"), 9)
        generation = Generation(engine.runtime, state)
        steps = generation.steps()
        segment, held = next(steps), 0
        while segment is None or segment.first == 0:
            held = max(held, len(generation._prefill.sight._features))
            given = None if segment is None else engine.model.forward.run_one(segment)
            segment = steps.send(given)
        assert held == 1 and not generation._prefill.sight._features
        steps.close()


def test_parts_of_a_repair_do_not_end_inside_an_interval() -> None:
    positions = np.array([0, 1, 5, 6, 7, 8, 9, 20])
    assert step_end(positions, 0, 4, [(5, 9)]) == 2
    assert step_end(positions, 2, 4, [(5, 9)]) == 6
    assert step_end(positions, 0, 2, [(5, 9)]) == 2
    assert step_end(positions, 0, 99, [(5, 9)]) == 8
    assert step_end(positions, 0, 4, []) == 4
