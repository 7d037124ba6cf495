from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from fake_worker import fake_engine
from kvboost import StockModel
from kvboost.bench.peers.base import Setting
from kvboost.bench.peers.crew import Crew
from kvboost.bench.timing import Sample
from kvboost.bench.ttft import report
from kvboost.bench.ttft.chat import ANSWER_TOKENS, QUESTION_TOKENS, Chat, conversation, measure_chat
from kvboost.bench.ttft.goals import faster_than_peers, faster_than_stock, flat_chat
from kvboost.bench.ttft.lengths import (
    Length,
    beginnings,
    break_even,
    break_evens,
    measure_lengths,
    texts_for,
)
from kvboost.bench.ttft.patterns import CONTENDERS, TTFT, Pooled, measure_ttft
from kvboost.bench.ttft.peers import PeerTime, measure_peers, peer_break_evens
from kvboost.bench.ttft.plot import curves, plot_ttft, ttft_figure
from kvboost.bench.ttft.run import Plan, run_ttft
from kvboost.bench.workloads import Unread
from kvboost.errors import ConfigError
from kvboost.progress import Progress
from tiny import byte_tokenizer, make_engine, tiny_model


def encode(text: str) -> list[int]:
    return list(text.encode())


def shown(*tables: Table) -> str:
    console = Console(width=140, file=io.StringIO())
    console.print(*tables)
    return console.file.getvalue()


def ms(median: float) -> Sample:
    return Sample(median, median - 1, median + 1)


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    setting = Setting("m", tmp_path, 1, threads=1, context_length=4096)
    engines = [fake_engine("quick"), fake_engine("silent", tells=False)]
    with Crew(engines, setting, str) as made, Progress("") as progress:
        made.start(progress)
        yield made


def model():
    return tiny_model("llama", max_position_embeddings=4096)


def test_a_pattern_is_timed_with_every_contender() -> None:
    with make_engine(model(), reuse_moved="always") as engine:
        row = measure_ttft(engine, StockModel(model()), "rag", 400, 32, rounds=2)
        assert engine.cache_stats()["hot_chunks"] == 0  # it leaves nothing behind
    assert all(getattr(row, name).median_ms > 0 for name in CONTENDERS)
    assert row.speedup == row.stock.median_ms / row.warm.median_ms
    assert f"{row.speedup:.1f} ×" in shown(report.ttft_table([row]))
    assert "brackets" in shown(report.ttft_table([row]))
    assert "brackets" not in shown(report.ttft_table([row], 80))
    assert f"{row.chunk_speedup:.1f} ×" in shown(report.pooled_table([Pooled.of([row])]))


def test_pooled_ratios_are_of_sums() -> None:
    rows = [
        TTFT("a", 512, 32, *map(ms, (100, 100, 10, 50, 10))),
        TTFT("b", 512, 32, *map(ms, (300, 100, 10, 50, 30))),
    ]
    assert Pooled.of(rows) == Pooled(512, 0.5, 0.5, 20.0, 4.0)


def test_a_beginning_has_so_many_words() -> None:
    found = beginnings(encode, (200, 50, 100), None)
    texts = [bytes(one.ids).decode() for one in found]
    assert [len(text.split()) for text in texts] == [50, 100, 200]
    assert texts[2].startswith(texts[1])


def test_what_does_not_fit_is_cut_once() -> None:
    found = beginnings(encode, (50, 100, 1_000, 2_000), 1_000)
    assert [len(one.ids) for one in found][-1] == 1_000
    assert [one.words for one in found][:2] == [50, 100] and len(found) == 3
    text = bytes(found[-1].ids).decode()
    assert found[-1].words == pytest.approx(len(text.split()), rel=0.2)


def test_reuse_pays_from_the_length_from_which_on_it_is_faster() -> None:
    full = {100: 10.0, 200: 20.0, 400: 40.0, 800: 80.0}
    assert break_even(full, {100: 15.0, 200: 15.0, 400: 15.0, 800: 15.0}) == 200
    assert break_even(full, {100: 1.0, 200: 25.0, 400: 15.0, 800: 15.0}) == 400  # once is not on
    assert break_even(full, {100: 1.0, 200: 1.0, 400: 1.0, 800: 80.0}) is None
    assert break_even(full, dict.fromkeys(full, 1.0)) == 100


def test_lengths_are_timed_up_to_the_context() -> None:
    engine_model, stock_model = (
        tiny_model("llama", max_position_embeddings=1024) for _ in range(2)
    )
    with make_engine(engine_model) as engine:
        texts = texts_for(engine, (50, 4_000), 16)
        points = measure_lengths(engine, StockModel(stock_model), texts, 16, 1)
    assert points[-1].num_tokens == 1024 - 1
    assert [set(point.times) for point in points] == [set(CONTENDERS)] * 2


def test_break_evens_compare_with_the_same_engine() -> None:
    def point(tokens: int, *medians: float) -> Length:
        return Length(tokens, tokens, dict(zip(CONTENDERS, map(ms, medians), strict=True)))

    points = [point(100, 50, 90, 20, 95, 55), point(200, 100, 110, 20, 95, 55)]
    assert break_evens(points) == {"warm": 100, "chunk": 200, "floor": 200}


def test_unread_text_comes_once() -> None:
    unread = Unread(encode)
    first, second = unread.take(500), unread.take(700)
    assert Unread(encode).take(1_200) == first + second
    with pytest.raises(ValueError, match="unread text"):
        unread.take(1 << 40)


def test_every_turn_goes_on_where_the_last_ended() -> None:
    unread = Unread(encode)
    one, other = (conversation(encode, unread, number, 100, 4) for number in (0, 1))
    assert one[0] != other[0]
    for before, after in pairwise(one):
        assert after[: len(before)] == before
        assert len(after) - len(before) == QUESTION_TOKENS + ANSWER_TOKENS


def test_a_conversation_is_timed_by_turns(crew: Crew) -> None:
    with make_engine(model()) as engine:
        chat = measure_chat(
            engine, StockModel(model()), crew, opening_tokens=64, turns=8, conversations=1
        )
    own = ["stock", "baseline", "prefix", "chunk", "floor"]
    assert list(chat.turns) == [*own, "quick (pipe)", "silent (pipe)"]
    assert all(len(samples) == 8 for samples in chat.turns.values())
    ratio = chat.turns["prefix"][7].median_ms / chat.turns["prefix"][1].median_ms
    assert chat.growth("prefix") == ratio
    assert f"{ratio:.2f}" in shown(report.chat_table(chat))


def test_peers_are_cold_and_warm(crew: Crew) -> None:
    rows = measure_peers(crew, encode, (128, 256), num_new=32, rounds=1)
    assert [(row.name, row.num_tokens) for row in rows] == [
        ("quick", 128),
        ("silent", 128),
        ("quick", 256),
        ("silent", 256),
    ]
    assert [row.reused_share for row in rows] == [1.0, None, 1.0, None]
    assert set(peer_break_evens(rows)) == {"quick", "silent"}
    nothing = [replace(row, reused_share=0.0) for row in rows if row.name == "quick"]
    assert set(peer_break_evens(nothing)) == set()
    assert "100%" in shown(report.peers_table(rows)) and "–" in shown(report.peers_table(rows))


def test_who_is_slow_is_spared_long_prompts(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.bench.ttft.peers.SLOW_MS", 0.0)
    rows = measure_peers(crew, encode, (128, 256), num_new=32, rounds=1)
    assert {row.num_tokens for row in rows} == {128}


def peer(name: str, tokens: int, warm: float) -> PeerTime:
    return PeerTime(name, tokens, ms(1000), ms(warm), None)


def test_goals_are_judged_where_they_were_set() -> None:
    pooled = [Pooled(512, 1, 1, 9.0, 1), Pooled(2048, 1, 1, 7.0, 1)]
    assert faster_than_stock(pooled).met is False
    assert faster_than_stock(pooled[:1]).met is None
    rows = [peer("kvboost-prefix", 2048, 80), peer("vllm", 2048, 200), peer("stock", 2048, 990)]
    assert faster_than_peers(rows).met is True
    assert faster_than_peers([*rows, peer("openvino", 2048, 70)]).met is False
    assert faster_than_peers(rows[:1]).met is None and faster_than_peers([]).met is None


def test_a_chat_is_flat_if_both_kinds_of_reuse_are() -> None:
    def chat(prefix: float, chunk: float, turns: int = 8) -> Chat:
        def line(last: float) -> list[Sample]:
            return [ms(100.0)] * (turns - 1) + [ms(last)]

        return Chat((1,) * turns, {"prefix": line(prefix), "chunk": line(chunk)})

    assert flat_chat(chat(120, 129)).met is True
    assert flat_chat(chat(120, 131)).met is False
    assert flat_chat(chat(100, 100, turns=4)).met is None


POINTS = [
    Length(n, n, {name: ms(n / at) for at, name in enumerate(CONTENDERS, start=1)})
    for n in (100, 800)
]
ROWS = [peer("kvboost", 256, 50), peer("vllm", 256, 60), peer("vllm", 512, 65)]


@pytest.mark.parametrize(("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture_is_drawn(tmp_path: Path, suffix: str, beginning: bytes) -> None:
    path = tmp_path / f"ttft{suffix}"
    plot_ttft(curves(POINTS, ROWS), path, title="TTFT")
    assert path.read_bytes().startswith(beginning)


def test_a_panel_each_for_ours_and_for_engines_on_log_axes() -> None:
    ours, engines = ttft_figure(curves(POINTS, ROWS), title="TTFT").axes
    assert (ours.get_xscale(), engines.get_yscale()) == ("log", "log")
    assert len(ours.lines) == len(CONTENDERS)
    styles = {line.get_label(): line.get_linestyle() for line in engines.lines}
    assert (styles["vllm"], styles["_vllm, cold"]) == ("-", "--")
    assert len(ttft_figure(curves(POINTS, []), title="TTFT").axes) == 1


def test_no_points_are_no_picture() -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        ttft_figure({"": {}}, title="TTFT")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"patterns": ("nonsense",)}, "pattern='nonsense'"),
        ({"tokens": (32,)}, "tokens=32"),
        ({"engines": ("gpt",)}, "peer='gpt'"),
        ({"turns": 1}, "turns=1"),
        ({"words": (3,)}, "words=3"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan("m", **wrong)


def test_turns_must_fit_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    tiny_model("llama", max_position_embeddings=512).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="turns=10 do not fit the model's context of 512"):
        run_ttft(Plan(str(tmp_path)), Console(quiet=True))
