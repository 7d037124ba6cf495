from __future__ import annotations

import random

from kvboost.cache.eviction.return_rates import FIRST_FIT, ReturnModel


def watched() -> tuple[ReturnModel, list[int]]:
    """A model of chunks of two kinds; those of the first kind were used again soon."""
    model, rng, left = ReturnModel(1), random.Random(0), []
    for time in range(200):
        kind = rng.randrange(2)
        probe = model.watch((kind, 7), time)
        if kind == 0:
            model.used(probe, time + rng.randrange(1, 20))
        else:
            left.append(probe)
    return model, left


def test_a_copy_learns_what_the_model_itself_would_and_hands_it_over() -> None:
    model, reference = watched()[0], watched()[0].to_fit()
    reference.fit(300)
    fitted = model.to_fit()
    fitted.fit(300)
    assert model.fits == 0 and model.quickness((0, 7)) == model.quickness((1, 7)) == 0
    model.adopt(fitted)
    assert model.fits == 1 and model.quickness((0, 7)) > model.quickness((1, 7))
    for cells in ((0, 7), (1, 7), (None, 7)):
        assert model.quickness(cells) == reference.quickness(cells)
        assert model.worth(model.quickness(cells), 5) == reference.worth(
            reference.quickness(cells), 5
        )


def test_what_happens_while_a_copy_learns_counts_in_the_next_fit() -> None:
    model, left = watched()
    fitted = model.to_fit()
    for probe in left:
        model.used(probe, 250)
    for _ in range(FIRST_FIT):
        model.watch((1, 7), 250)
    fitted.fit(300)
    model.adopt(fitted)
    before = model.quickness((1, 7)) - model.quickness((0, 7))
    assert model.is_due()
    again = model.to_fit()
    assert not model.is_due()
    again.fit(300)
    assert again.quickness((1, 7)) - again.quickness((0, 7)) > before
