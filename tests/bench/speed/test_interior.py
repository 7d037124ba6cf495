from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fake_worker import fake_engine
from kvboost.bench.kit.benchmark import Bench
from kvboost.bench.kit.timing import Sample
from kvboost.bench.peers.contenders import Contenders
from kvboost.bench.peers.setting import Setting
from kvboost.bench.speed.interior.prompts import (
    INTERIOR,
    OTHER_TOKENS,
    PLACES,
    QUESTION_TOKENS,
    make_round,
)
from kvboost.bench.speed.interior.run import (
    Row,
    Settings,
    against_best,
    goal,
    interior_figure,
    interior_table,
    measure_interior,
    notes,
    run,
)
from kvboost.bench.texts.prompts import Unread
from kvboost.cli import app
from kvboost.errors import ConfigError
from kvboost.progress import Progress
from tiny import byte_tokenizer, tiny_model

SIZE = 100


def encode(text: str) -> list[int]:
    return list(text.encode())


def rounds(count: int):
    unread = Unread(encode)
    return [make_round(encode, unread, number, SIZE) for number in range(count)]


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Contenders]:
    setting = Setting("m", tmp_path, 1, threads=1, context_length=4096)
    engines = [
        fake_engine("kvboost"),
        fake_engine("silent", tells=False),
        fake_engine("mortal", after=8, then="die"),
    ]
    with Contenders(engines, setting, str) as made, Progress("") as progress:
        made.start(progress)
        yield made


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next(at for at, (a, b) in enumerate(pairs) if a != b)


def test_the_documents_are_where_the_place_says() -> None:
    (one,) = rounds(1)
    documents = [one.read[16 + at * SIZE :][:SIZE] for at in range(5)]
    read = one.read[: 16 + 5 * SIZE]
    ids = {place: prompt.ids for place, prompt in one.prompts.items()}
    assert ids["front"][: len(read)] == read and ids["front"] != one.read
    assert ids["middle"][OTHER_TOKENS:][: 5 * SIZE] == read[16:]
    assert ids["twice"][16:][: 2 * SIZE] == ids["twice"][-QUESTION_TOKENS - 2 * SIZE :][: 2 * SIZE]
    moved = ids["reordered"][16 : 16 + 5 * SIZE]
    parts = [moved[at : at + SIZE] for at in range(0, 5 * SIZE, SIZE)]
    assert sorted(parts) == sorted(documents) and parts[0] != documents[0]
    assert ids["header"][-QUESTION_TOKENS - 5 * SIZE : -QUESTION_TOKENS] == read[16:]


def test_only_the_front_is_a_prefix_and_all_questions_are_new() -> None:
    (one,) = rounds(1)
    shared = {place: common(prompt.ids, one.read) for place, prompt in one.prompts.items()}
    assert shared["front"] >= 16 + 5 * SIZE
    assert shared["twice"] < 16 + 3 * SIZE
    for place in ("middle", "header"):
        assert shared[place] < 16
    assert len({tuple(prompt.ids[-QUESTION_TOKENS:]) for prompt in one.prompts.values()}) == 5
    for prompt in one.prompts.values():
        assert 0 < prompt.known_tokens < len(prompt.ids)


def test_rounds_share_no_text_and_the_header_changes_its_length() -> None:
    first, *others = rounds(4)
    assert all(common(first.read, one.read) < 16 for one in others)
    lengths = {len(one.prompts["header"].ids) for one in (first, *others)}
    assert len(lengths) == 4


def test_every_engine_is_asked_and_the_first_round_does_not_count(crew: Contenders) -> None:
    rows = measure_interior(crew, rounds(3))
    assert [row.place for row in rows] == [place for place in PLACES for _ in range(2)]
    assert {row.engine for row in rows} == {"kvboost", "silent"}  # the third died on the way
    assert list(crew.failures) == ["mortal"]
    assert {row.rounds for row in rows} == {2}
    told = {row.place: row.reused_share for row in rows if row.engine == "kvboost"}
    assert told["front"] == 1.0 and told["middle"] < 0.1
    assert 0.4 < told["twice"] < 0.7
    assert all(row.reused_share is None for row in rows if row.engine == "silent")
    console = Console(width=140, file=io.StringIO())
    console.print(interior_table(rows), *notes(rows, against_best(rows), planned=3), sep="\n")
    assert "100%" in console.file.getvalue() and "–" in console.file.getvalue()
    assert "silent was too slow for 3 rounds; 2 counted" in console.file.getvalue()


def test_an_engine_that_has_used_its_time_is_not_asked_again(crew: Contenders) -> None:
    rows = measure_interior(crew, rounds(3), most_seconds=0.0)
    assert rows == []  # the first round, which does not count, has used it up


def row(engine: str, place: str, ms: float, share: float | None = None) -> Row:
    return Row(engine, place, 2048, Sample(ms, ms - 1, ms + 1), 5, share)


ROWS = [
    *(row("kvboost", place, 100, 0.8) for place in PLACES),
    *(row("kvboost-prefix", place, 50) for place in PLACES),
    *(row("stock", place, 900, 0.0) for place in PLACES),
    *(row("vllm", place, 310) for place in INTERIOR),
]


def test_the_goal_is_against_the_best_of_the_others() -> None:
    best = against_best(ROWS)
    assert best["front"] == ("stock", 9.0)
    assert best["middle"] == ("vllm", 3.1)
    assert goal(best, 2048).met is True
    assert goal(best, 700).met is None
    quicker = replace(ROWS[-1], ttft=Sample(290, 1, 400))
    assert goal(against_best([*ROWS[:-1], quicker]), 2048).met is False
    assert goal(against_best(ROWS[5:]), 2048).met is None  # ours is missing


def test_a_bar_per_engine_and_place() -> None:
    (axes,) = interior_figure(ROWS, "Interior").axes
    assert len(axes.patches) == len(ROWS)
    assert [label.get_text() for label in axes.get_xticklabels()] == list(PLACES)
    assert "80%" in {text.get_text() for text in axes.texts}
    with pytest.raises(ValueError, match="nothing to plot"):
        interior_figure([], "Interior")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", max_position_embeddings=1024).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


def test_a_whole_run(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    picture = tmp_path / "interior.svg"
    options = ("--tokens", "640", "--rounds", "1", "--plot", str(picture), "--dtype", "float32")
    engines = ("--peer", "stock", "--peer", "kvboost", "--peer", "vllm")
    done = CliRunner().invoke(app, ["bench", "interior", "-m", model, *options, *engines])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert "run make peers" in found["missing"]["vllm"] and "vllm is missing" in done.stdout
    rows = {(one["engine"], one["place"]): one for one in found["rows"]}
    assert len(rows) == 2 * len(PLACES) and found["failures"] == {}
    assert rows["stock", "front"]["reused_share"] == 0
    assert rows["kvboost", "front"]["reused_share"] == 1
    assert picture.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"engines": ("gpt",)}, "peer='gpt'"),
        ({"tokens": 100}, "tokens=100"),
        ({"rounds": 0}, "rounds=0"),
        ({"peer_seconds": 0.0}, "seconds=0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**wrong)


def test_prompts_must_fit_the_context(model: str) -> None:
    with pytest.raises(ConfigError, match=r"tokens=2048 does not fit .* 1,024"):
        settings = Settings(model=model)
        run(settings, Bench(Console(quiet=True), settings))
