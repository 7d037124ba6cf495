"""What operators ask of an engine, and what it counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost.integrations.vllm.connector import KVBoostConnector
from kvboost.integrations.vllm.metrics import Stats
from support.planting import chunk_files
from support.vllm_engines import ALWAYS, PAGE, Engine, Texts

EVERYTHING = {"forget": "everything"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    extra = {**ALWAYS, "disk_cache_dir": str(folder), "chunk_size": 128}  # several a prompt
    engine = Engine(extra, enable_prefix_caching=True)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def empty(engine: Engine) -> None:
    engine.empty()
    command(engine, EVERYTHING)


def command(engine: Engine, asked: dict[str, Any], **prompt: Any) -> dict[str, Any]:
    answer = engine.ask([5], asked, tokens=1, **prompt)
    assert answer.usage is not None
    return answer.usage


def stats(engine: Engine, **prompt: Any) -> dict[str, Any]:
    found: dict[str, Any] = command(engine, {"stats": True}, **prompt)["stats"]
    return found


def test_stats_count_what_requests_load(engine: Engine, texts: Texts) -> None:
    before = stats(engine)
    assert before["chunks"] == 0 and before["tiers"]["ram"]["bytes"] == 0
    ids, moved = texts.prompt(0, 1, 2), texts.prompt(2, 1, 0)
    engine.ask(ids, tokens=1)
    engine.fresh()
    exact = engine.ask(ids, "exact", tokens=1)
    repaired = engine.ask(moved, tokens=1)
    assert exact.usage is not None and repaired.usage is not None
    after = stats(engine)
    counted = {
        source: number - before["prompt_tokens"][source]
        for source, number in after["prompt_tokens"].items()
    }
    assert counted["exact"] == exact.usage["exact_tokens"] + repaired.usage["exact_tokens"] > 400
    assert counted["recomputed"] == repaired.usage["recomputed_tokens"] > 0
    assert counted["moved"] + counted["recomputed"] == repaired.usage["moved_tokens"] > 400
    # vLLM counts all of these rows as cached.
    assert sum(counted.values()) == exact.cached + repaired.cached
    assert after["loads"]["loaded"] == before["loads"]["loaded"] + 2
    assert after["load_seconds"] > before["load_seconds"]
    assert after["chunks"] == after["tiers"]["ram"]["chunks"] > 0


def test_a_forgotten_text_is_read_again(engine: Engine, texts: Texts, folder: Path) -> None:
    ids = texts.prompt(0, 1, 2)
    engine.ask(ids, tokens=1)
    engine.worker.thread.submit(engine.worker.data.flush).result()
    files = len(list(chunk_files(folder)))
    held = stats(engine)
    assert files == held["chunks"] == held["tiers"]["disk"]["chunks"] > 3
    passage = texts.documents[1]
    forgotten = command(engine, {"forget": [passage[40:90]]})["forgotten"]
    assert 0 < forgotten < files
    held = stats(engine)
    for count in (held["chunks"], *(held["tiers"][tier]["chunks"] for tier in ("ram", "disk"))):
        assert count == files - forgotten
    assert len(list(chunk_files(folder))) == files - forgotten
    engine.fresh()
    again = engine.ask(ids, "exact", tokens=1)
    start = len(texts.head) + len(texts.documents[0])
    assert again.usage is not None and 0 < again.usage["exact_tokens"] <= start + 40


def test_vllm_keeps_its_own_pages(engine: Engine, texts: Texts) -> None:
    ids = texts.prompt(0, 1, 2)
    engine.ask(ids, tokens=1)
    assert command(engine, EVERYTHING)["forgotten"] > 3
    again = engine.ask(ids, tokens=1)
    assert again.usage is None and again.cached == (len(ids) - 1) // PAGE * PAGE
    engine.empty()
    assert engine.ask(ids, tokens=1).cached == 0


def test_a_tenant_forgets_its_own(engine: Engine, texts: Texts) -> None:
    ids = texts.prompt(0, 1, 2)
    for salt in ("alice", "bob"):
        engine.ask(ids, tokens=1, cache_salt=salt)
    both = stats(engine, cache_salt="alice")
    assert both["chunks"] == 2 * both["chunks_of_salt"] > 6
    assert command(engine, {"forget": [ids]})["forgotten"] == 0
    forgotten = command(engine, {"forget": [ids]}, cache_salt="alice")["forgotten"]
    assert forgotten == both["chunks_of_salt"]
    assert stats(engine, cache_salt="alice")["chunks_of_salt"] == 0
    engine.fresh()
    assert engine.ask(ids, tokens=1, cache_salt="alice").usage is None
    bob = engine.ask(ids, "exact", tokens=1, cache_salt="bob")
    assert bob.usage is not None and bob.usage["exact_tokens"] > 400


def test_requests_that_run_meanwhile_are_not_kept(engine: Engine, texts: Texts) -> None:
    ids = texts.prompt(0, 1, 2)
    running = engine.add(ids, tokens=16)
    for _ in range(4):
        engine.engine.step()
    asked = engine.add([5], EVERYTHING, 1)
    answers = engine.finish()
    assert len(answers[running].tokens) == 16
    assert answers[asked].usage == {"forgotten": 0}
    assert stats(engine)["chunks"] == 0
    engine.fresh()
    engine.ask(ids, tokens=1)  # the next one is
    assert stats(engine)["chunks"] > 3


def test_a_load_that_fails_is_counted(engine: Engine, texts: Texts, folder: Path) -> None:
    ids = texts.prompt(0, 1, 2)
    first = engine.ask(ids, "exact", tokens=4)
    before = stats(engine)
    engine.fresh()
    index = engine.connector.planner.index
    assert index is not None
    engine.worker.data.drop(list(index._tiers))
    again = engine.ask(ids, "exact", tokens=4)
    assert again.tokens == first.tokens
    assert again.usage is not None and again.usage["exact_tokens"] == 0
    after = stats(engine)
    assert after["loads"]["failed"] == before["loads"]["failed"] + 1
    assert after["prompt_tokens"] == before["prompt_tokens"]


def test_a_command_that_cannot_be_read_is_answered(engine: Engine) -> None:
    assert "forget='all'" in command(engine, {"forget": "all"})["error"]


def test_commands_do_not_hold_up_others(engine: Engine, texts: Texts) -> None:
    request = engine.add(texts.prompt(0), tokens=4)
    asked = engine.add([5], {"stats": True}, 1)
    answers = engine.finish()
    assert len(answers[request].tokens) == 4
    assert answers[asked].usage is not None and "stats" in answers[asked].usage


def test_what_the_scheduler_sends_to_the_logger_adds_up() -> None:
    sent = [{"tokens": {"exact": 5}, "seconds": [0.5]}, {"tokens": {"exact": 2}, "chunks": 3}]
    first, second = (KVBoostConnector.build_kv_connector_stats(data) for data in sent)
    both = first.aggregate(second)
    assert isinstance(both, Stats) and not both.is_empty()
    assert both.reduce() == {
        "kvboost exact tokens": 7,
        "kvboost seconds of a load": 0.5,
        "kvboost chunks": 3,
    }
    both.reset()
    assert both.is_empty() and both.reduce() == {}
