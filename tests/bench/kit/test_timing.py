from __future__ import annotations

from kvboost.bench.kit.timing import Contender, Sample, interleave


def test_every_contender_runs_once_a_round_and_the_first_round_is_not_counted() -> None:
    log: list[str] = []
    rounds: list[int] = []
    samples = interleave(
        {
            "a": Contender(lambda n: log.append(f"a{n}"), after=lambda: log.append("tidy")),
            "b": Contender(lambda n: log.append(f"b{n}")),
        },
        rounds=2,
        on_round=lambda: rounds.append(1),
    )
    assert log == ["b0", "a0", "tidy", "a1", "tidy", "b1", "b2", "a2", "tidy"]
    assert len(rounds) == 3
    assert set(samples) == {"a", "b"}


def test_a_sample_is_the_median_and_its_spread() -> None:
    assert Sample.of([3.0, 1.0, 10.0]) == Sample(3.0, 1.0, 10.0)
