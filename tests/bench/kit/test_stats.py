from __future__ import annotations

import numpy as np
import pytest

from kvboost.bench.kit.stats import edit_similarity, f1, paired_bootstrap, rouge_l


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("Exeter College", "Exeter College", 1.0),
        ("the exeter college.", "Exeter College", 1.0),
        ("Exeter", "Exeter College", 2 / 3),
        ("at Exeter College in Oxford", "Exeter College", 4 / 7),
        ("college, college", "Exeter College", 1 / 2),  # a word counts as often as both have it
        ("Oxford", "Exeter College", 0.0),
        ("Yes.", "yes", 1.0),
        ("No", "yes", 0.0),
        ("", "yes", 0.0),
        ("The", "A", 1.0),  # nothing is left of either
        ("theatre", "atre", 0.0),  # articles are words, not letters
    ],
)
def test_f1_is_that_of_squad(answer, reference, expected) -> None:
    assert f1(answer, [reference]) == pytest.approx(expected)
    assert f1(answer, ["Boston", answer, reference]) == 1.0  # that of the best reference


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        # The example of the package rouge-score: 5 of 8 and of 9 words.
        (
            "The quick brown dog jumps on the log.",
            "The quick brown fox jumps over the lazy dog",
            10 / 17,
        ),
        ("police killed the gunman", "police kill the gunman", 3 / 4),
        ("the gunman kill police", "police kill the gunman", 1 / 2),  # the order counts
        ("Same, words!", "same words", 1.0),
        ("one", "two", 0.0),
        ("", "two", 0.0),
        ("", ".", 1.0),
    ],
)
def test_rouge_l_is_the_share_of_words_in_the_same_order(answer, reference, expected) -> None:
    assert rouge_l(answer, reference) == pytest.approx(expected)
    assert rouge_l(reference, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("kitten", "sitting", 1 - 3 / 7),
        ("saturday", "sunday", 1 - 3 / 8),
        ("return x", "return  x", 1 - 1 / 9),  # spaces count: they are code
        ("same", "same", 1.0),
        ("abc", "", 0.0),
        ("", "", 1.0),
    ],
)
def test_edit_similarity_is_that_of_levenshtein(answer, reference, expected) -> None:
    assert edit_similarity(answer, reference) == pytest.approx(expected)
    assert edit_similarity(reference, answer) == pytest.approx(expected)


def test_an_interval_is_that_of_the_normal_distribution_for_many_values() -> None:
    values = np.random.default_rng(1).normal(0.3, 2.0, size=1000)
    low, high = paired_bootstrap(list(values))
    error = values.std() / 1000**0.5
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.1 * error)


def test_intervals_follow_their_level_and_seed() -> None:
    values = [0.0, 1.0, 2.0, 5.0, -3.0]
    low, high = paired_bootstrap(values)
    inner_low, inner_high = paired_bootstrap(values, level=0.5)
    assert low < inner_low < inner_high < high
    assert paired_bootstrap(values, rounds=50) == paired_bootstrap(values, rounds=50)
    assert paired_bootstrap(values, rounds=50) != paired_bootstrap(values, rounds=50, seed=1)
    assert paired_bootstrap([0.25] * 7) == (0.25, 0.25)
    with pytest.raises(ValueError, match="no differences"):
        paired_bootstrap([])
