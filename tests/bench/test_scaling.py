from __future__ import annotations

import json

import pytest

from kvboost.bench.scaling import (
    CHUNK,
    DOCUMENT_CHUNKS,
    Series,
    Shelf,
    Sizes,
    measure_chunks,
    measure_lengths,
    measure_requests,
)
from kvboost.bench.study_plots import plot_scaling, scaling_figure
from kvboost.bench.study_report import scaling_table
from kvboost.bench.timing import Sample
from kvboost.errors import ConfigError
from kvboost.model.load import wrap
from tiny import byte_tokenizer, make_engine, tiny_model


def test_prompts_of_every_length_are_timed_both_ways() -> None:
    with make_engine(tiny_model("llama", max_position_embeddings=1024)) as engine:
        full, exact = measure_lengths(engine, [96, 192], rounds=1)
        assert full.sizes == exact.sizes == [96, 192]
        assert engine.cache_stats()["hot_chunks"] == 0


def test_a_shelf_finds_what_it_was_given_and_nothing_else() -> None:
    shelf = Shelf()
    shelf.fill(50)
    assert shelf.num_chunks == 64  # whole documents
    document = shelf.last
    assert len(document) == DOCUMENT_CHUNKS * CHUNK
    assert shelf.plan(document) == len(document)
    assert 0 < shelf.plan(document[40:]) < len(document) - 40 + 1
    assert shelf.plan(shelf.document()) == 0
    shelf.close()


def test_chunks_stay_as_many_as_they_are_said_to_be() -> None:
    told: list[float] = []
    series = measure_chunks([32, 64], rounds=3, on_chunks=told.append)
    assert sum(told) == 64  # what is admitted for the clock is not left behind
    assert [one.sizes for one in series] == [[32, 64]] * 4
    assert all(sample.median_ms > 0 for one in series for sample in one.samples)


def test_requests_are_answered_at_once() -> None:
    model = wrap(tiny_model("llama", max_position_embeddings=2048), byte_tokenizer())
    together, each = measure_requests(model, [1, 3], rounds=1)
    assert together.sizes == each.sizes == [1, 3]
    assert each.samples[1].median_ms == pytest.approx(together.samples[1].median_ms / 3)


def made(name: str, over: str, exponent: float) -> Series:
    series = Series(name, over)
    for size in (10, 100, 1000):
        series.add(size, Sample(size**exponent, 0.9 * size**exponent, 1.2 * size**exponent))
    return series


def test_exponents_are_fitted_shown_and_drawn(tmp_path, capsys) -> None:
    from rich.console import Console

    series = [made("full", "tokens", 1.5), made("hit", "tokens", 0.0), made("plan", "chunks", 0.5)]
    assert json.loads(json.dumps(series[0].as_json()))["exponent"] == pytest.approx(1.5)
    Console(width=80).print(scaling_table(series))
    shown = capsys.readouterr().out
    assert "1.50 ± 0.00" in shown and "0.50 ± 0.00" in shown
    tokens, chunks = scaling_figure(series, title="x").axes
    assert tokens.get_xscale() == tokens.get_yscale() == "log"
    labels = [text.get_text() for text in tokens.get_legend().get_texts()]
    assert labels == ["full: 1.50", "hit: 0.00"]
    assert [text.get_text() for text in chunks.get_legend().get_texts()] == ["plan: 0.50"]
    plot_scaling(series, tmp_path / "scaling.png", title="x")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"lengths": (8,)}, "lengths=8"), ({"chunks": (3,)}, "chunks=3"), ({"rounds": 0}, "rounds=0")],
)
def test_sizes_too_small_to_mean_anything_are_refused(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Sizes(**changes)
