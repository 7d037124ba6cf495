from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from kvboost import StockModel
from kvboost.bench.kit.benchmark import Bench
from kvboost.bench.kit.timing import Sample
from kvboost.bench.peers.contenders import Contenders
from kvboost.bench.peers.setting import Setting
from kvboost.bench.texts.prompts import Unread, num_shared
from kvboost.bench.ttft import report
from kvboost.bench.ttft.chat import ANSWER_TOKENS, QUESTION_TOKENS, Chat, conversation, measure_chat
from kvboost.bench.ttft.patterns import (
    CONTENDERS,
    TTFT,
    Pooled,
    break_even,
    break_evens,
    measure_decode,
    measure_ttft,
)
from kvboost.bench.ttft.peers import PeerTime, make_round, measure_peers
from kvboost.bench.ttft.report import (
    faster_on_moved,
    faster_than_peers,
    faster_than_stock,
    faster_together,
    flat_chat,
)
from kvboost.bench.ttft.run import Settings, run
from kvboost.cli import app
from kvboost.errors import ConfigError
from kvboost.progress import Progress
from support.fake_worker import fake_engine
from support.homes import use_home
from support.tiny import make_engine, save_tiny, tiny_model


def encode(text: str) -> list[int]:
    return list(text.encode())


def shown(*tables: Table) -> str:
    console = Console(width=140, file=io.StringIO())
    console.print(*tables)
    return console.file.getvalue()


def ms(median: float) -> Sample:
    return Sample(median, median - 1, median + 1)


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Contenders]:
    setting = Setting("m", tmp_path, 1, threads=1, context_length=4096)
    engines = [
        fake_engine("quick"),
        fake_engine("silent", tells=False),
        fake_engine("mortal", after=14, then="die"),
    ]
    with Contenders(engines, setting, str) as made, Progress("") as progress:
        made.start(progress)
        yield made


def model():
    return tiny_model("llama", max_position_embeddings=4096)


def test_a_pattern_is_timed_with_every_contender() -> None:
    with make_engine(model(), reuse_moved="always") as engine:
        row = measure_ttft(engine, StockModel(model()), "rag", 400, 32, rounds=2)
        assert engine.cache_stats()["hot_chunks"] == 0  # it leaves nothing in the cache
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


def test_reuse_pays_from_the_length_from_which_it_is_always_faster() -> None:
    full = {100: 10.0, 200: 20.0, 400: 40.0, 800: 80.0}
    assert break_even(full, {100: 15.0, 200: 15.0, 400: 15.0, 800: 15.0}) == 200
    assert break_even(full, {100: 1.0, 200: 25.0, 400: 15.0, 800: 15.0}) == 400  # once is not on
    assert break_even(full, {100: 1.0, 200: 1.0, 400: 1.0, 800: 80.0}) is None
    assert break_even(full, dict.fromkeys(full, 1.0)) == 100


def test_break_evens_compare_with_the_same_engine() -> None:
    points = [
        TTFT("rag", 100, 32, *map(ms, (50, 90, 20, 95, 55))),
        TTFT("rag", 200, 32, *map(ms, (100, 110, 20, 95, 55))),
    ]
    assert break_evens(points) == {"warm": 100, "chunk": 200, "floor": 200}
    assert list(report.break_even_lines({"warm": 100, "chunk": 200, "x": None}, 100)) == [
        "warm: faster than reading everything at 100 tokens already, the shortest measured",
        "chunk: faster than reading everything from 200 tokens",
        "x: faster than reading everything not at any measured length",
    ]


def test_every_turn_continues_the_one_before() -> None:
    unread = Unread(encode)
    one, other = (conversation(encode, unread, number, 100, 4) for number in (0, 1))
    assert one[0] != other[0]
    for before, after in pairwise(one):
        assert after[: len(before)] == before
        assert len(after) - len(before) == QUESTION_TOKENS + ANSWER_TOKENS
    with pytest.raises(ValueError, match="unread text"):
        unread.take(1 << 40)


def test_a_conversation_is_timed_by_turns(crew: Contenders) -> None:
    with make_engine(model()) as engine:
        chat = measure_chat(
            engine, StockModel(model()), crew, opening_tokens=64, turns=8, conversations=1
        )
    own = ["stock", "baseline", "prefix", "chunk", "floor"]
    assert list(chat.turns) == [*own, "quick (pipe)", "silent (pipe)"]  # the third has died
    assert all(len(samples) == 8 for samples in chat.turns.values())
    ratio = chat.turns["prefix"][7].median_ms / chat.turns["prefix"][1].median_ms
    assert chat.growth("prefix") == ratio
    assert f"{ratio:.2f}" in shown(report.chat_table(chat))


def test_documents_come_back_at_the_front_and_at_other_places() -> None:
    unread = Unread(encode)
    one, other = (make_round(encode, unread, number, 548, 32) for number in range(2))
    assert {len(ids) for ids in one.values()} == {548}
    cold, warm, moved, reordered = one.values()
    assert num_shared(cold, warm) == 548 - 32
    assert moved[16:-32] == cold[16:-32] and num_shared(cold, moved) < 16
    parts = [cold[at : at + 100] for at in range(16, 516, 100)]
    again = [reordered[at : at + 100] for at in range(16, 516, 100)]
    assert sorted(again) == sorted(parts)
    assert again[0] != parts[0] and again[-1] != parts[-1]
    assert len({tuple(ids[-32:]) for ids in (*one.values(), *other.values())}) == 8
    assert num_shared(cold, other["cold"]) < 16


def test_engines_are_asked_at_every_place_and_one_that_fails_is_left_out(crew: Contenders) -> None:
    rows = measure_peers(crew, encode, (128, 256), num_new=32, rounds=1)
    assert [(row.name, row.num_tokens) for row in rows] == [
        ("quick", 128),
        ("silent", 128),
        ("mortal", 128),
        ("quick", 256),
        ("silent", 256),
    ]
    assert list(crew.failures) == ["mortal"]
    quick, silent, *_ = rows
    assert quick.reused["warm"] == 1.0 and quick.reused["moved"] < 0.2
    assert set(silent.reused.values()) == {None}
    assert "100%, " in shown(report.peers_table(rows)) and "–, –" in shown(report.peers_table(rows))


def test_a_slow_engine_is_not_given_long_prompts(
    crew: Contenders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.bench.ttft.peers.SLOW_MS", 0.0)
    rows = measure_peers(crew, encode, (128, 256), num_new=32, rounds=1)
    assert {row.num_tokens for row in rows} == {128}


def test_a_decode_step_is_timed_alone_and_together() -> None:
    with make_engine(model()) as engine:
        decode = measure_decode(engine, StockModel(model()), 200, rounds=1)
        assert engine.cache_stats()["hot_chunks"] == 0
    assert decode.together_gain == decode.ours.median_ms / decode.together.median_ms
    assert faster_together(decode).met is (decode.together_gain >= 3)
    assert f"{decode.together_gain:.1f} ×" in shown(report.decode_table(decode))


def peer(name: str, tokens: int, warm: float, moved: float = 900) -> PeerTime:
    reused = dict.fromkeys(("warm", "moved", "reordered"))
    return PeerTime(name, tokens, ms(1000), ms(warm), ms(moved), ms(moved), reused)


def test_goals_are_judged_where_they_were_set() -> None:
    pooled = [Pooled(512, 1, 1, 9.0, 1), Pooled(2048, 1, 1, 7.0, 1)]
    assert faster_than_stock(pooled).met is False
    assert faster_than_stock(pooled[:1]).met is None
    rows = [peer("kvboost-prefix", 2048, 80), peer("vllm", 2048, 200), peer("stock", 2048, 990)]
    assert faster_than_peers(rows).met is True
    assert faster_than_peers([*rows, peer("openvino", 2048, 70)]).met is False
    assert faster_than_peers(rows[:1]).met is None and faster_than_peers([]).met is None
    ours, theirs = peer("kvboost", 2048, 90, moved=200), peer("vllm", 2048, 80, moved=620)
    assert faster_on_moved([ours, theirs]).met is True
    assert faster_on_moved([ours, theirs, peer("openvino", 2048, 70, moved=580)]).met is False
    assert faster_on_moved([peer("kvboost", 512, 9, 20), peer("vllm", 512, 9, 70)]).met is None
    assert faster_on_moved([theirs]).met is None and faster_on_moved([ours]).met is None


def test_a_chat_is_flat_if_both_kinds_of_reuse_are() -> None:
    def chat(prefix: float, chunk: float, turns: int = 8) -> Chat:
        def line(last: float) -> list[Sample]:
            return [ms(100.0)] * (turns - 1) + [ms(last)]

        return Chat((1,) * turns, {"prefix": line(prefix), "chunk": line(chunk)})

    assert flat_chat(chat(120, 129)).met is True
    assert flat_chat(chat(120, 131)).met is False
    assert flat_chat(chat(100, 100, turns=4)).met is None


@pytest.mark.parametrize(
    "wrong", [{"tokens": (32,)}, {"lengths": (32,)}, {"peer_tokens": (32,), "peers": True}]
)
def test_prompts_without_a_beginning_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="tokens=32 must be more than the 32 new ones"):
        Settings(**wrong)


def test_a_whole_run_with_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_home(monkeypatch, tmp_path)
    save_tiny(tmp_path, max_position_embeddings=2048)
    picture = tmp_path / "ttft.svg"
    few = ("--rounds", "1", "--peer-rounds", "1", "--turns", "2", "--tokens", "256")
    options = ("--quick", *few, "--length", "128", "--plot", str(picture))
    engines = ("--peer", "kvboost", "--peer", "vllm", "--dtype", "float32")
    done = CliRunner().invoke(app, ["bench", "ttft", "-m", str(tmp_path), *options, *engines])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert "run make peers" in found["missing"]["vllm"] and "vllm is missing" in done.stdout
    assert found["failures"] == {}
    (ours,) = found["peers"]
    assert (ours["name"], ours["num_tokens"], ours["reused"]["warm"]) == ("kvboost", 512, 1)
    (row,) = found["rows"]
    assert row["num_tokens"] == 256
    ratio = row["warm"]["median_ms"] / row["floor"]["median_ms"]
    assert row["warm_over_floor"] == pytest.approx(ratio)
    # One pattern: pooled is that pattern.
    assert found["pooled"][0]["speedup"] == pytest.approx(row["speedup"])
    assert found["decode"]["num_tokens"] == 256
    assert [point["num_tokens"] for point in found["lengths"]] == [128]
    assert len(found["chat"]["turns"]["prefix"]) == 2
    assert found["goals"][0]["met"] is None  # it is about 2,048 tokens
    assert found["machine"]["dtype"] == "float32"
    assert picture.read_bytes().startswith(b"<?xml")


def test_turns_must_fit_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_home(monkeypatch, tmp_path)
    save_tiny(tmp_path, max_position_embeddings=512)
    with pytest.raises(ConfigError, match="turns=10 do not fit the model's context of 512"):
        settings = Settings(model=str(tmp_path))
        run(settings, Bench(Console(quiet=True), settings))
