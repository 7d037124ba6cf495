"""What users do with texts apart from asking about them."""

from __future__ import annotations

import time

import pytest

from kvboost import ConfigError, GenerationMode, PromptError
from support.tiny import make_engine, tiny_model

TEXT = "the quick brown fox jumps over the lazy dog and runs away. "
EXACT = GenerationMode.PREFIX_CACHE


def test_plan_reports_without_running_anything(engine) -> None:
    assert engine.plan(TEXT).cached_tokens == 0
    engine.warm(TEXT, header="")
    before = engine.cache_stats()
    report = engine.plan(TEXT + "what?")
    assert report.cached_tokens == len(TEXT)
    assert report.spans[-1].num_tokens == len("what?")
    assert engine.cache_stats() == before
    assert engine.plan(TEXT, "baseline").cached_tokens == 0


def test_documents_are_read_after_one_another(engine, monkeypatch) -> None:
    read = []
    monkeypatch.setattr(
        engine._documents,
        "_warm",
        lambda text, *_: read.append(engine.decode(text[0].token_ids.tolist())) or 1,
    )
    documents = ["one. ", "two. ", "three. "]
    assert engine.warm(documents, header="Read: ", contexts=4) == 9  # none after itself
    assert [text.removeprefix("Read: ") for text in read] == [
        *("one. ", "two. ", "three. "),
        *("two. one. ", "three. two. ", "one. three. "),
        *("three. one. ", "one. two. ", "two. three. "),
    ]
    for text, contexts in (("alone", 2), (["one", "two"], 0)):
        with pytest.raises(ConfigError, match=f"contexts={contexts}"):
            engine.warm(text, contexts=contexts)


DOCUMENTS = [letter * 3 + TEXT for letter in "abc"]


def known(engine, *texts: str) -> int:
    """How many tokens of these texts, after one another, are known exactly."""
    return engine.plan(f"Read: {''.join(texts)}!", EXACT).cached_tokens


def test_documents_are_read_in_other_contexts_in_idle_time(engine) -> None:
    one, two, three = DOCUMENTS
    assert engine.warm_later(DOCUMENTS, header="Read: ", contexts=2) == 3
    healing = engine.cache_stats()["healing"]
    assert (healing["readings_waiting"], healing["readings"], healing["waiting"]) == (3, 0, 0)
    assert known(engine, two, one) == 0
    report = engine.heal()
    assert (report.readings, report.conversations, report.waiting) == (3, 0, 0)
    length = len("Read: ") + 2 * len(one)
    assert (
        known(engine, two, one) == known(engine, three, two) == known(engine, one, three) == length
    )
    assert known(engine, three, one) == length - len(one)  # a third context
    healing = engine.cache_stats()["healing"]
    assert (healing["readings_waiting"], healing["readings"], healing["healed"]) == (0, 3, 0)
    assert healing["share"] is None and healing["computed_tokens"] == 0  # nothing was healed
    result = engine.generate(f"{one}What?", 1, reuse_moved="always")
    assert result.moved_tokens and engine.check_integrity() == []


def test_a_loop_reads_documents_when_it_is_idle(engine) -> None:
    engine.generate_batch(["start the loop"], 1)
    assert engine.warm_later(DOCUMENTS, header="Read: ") == 6  # two others each
    deadline = time.monotonic() + 60
    while engine.cache_stats()["healing"]["readings"] < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert known(engine, DOCUMENTS[2], DOCUMENTS[0]) == len("Read: ") + 2 * len(DOCUMENTS[0])


def test_what_is_forgotten_is_not_read_in_idle_time(engine) -> None:
    engine.warm_later(DOCUMENTS, header="Read: ")
    engine.forget(DOCUMENTS[0])
    report = engine.heal()
    assert report.readings == report.waiting == 0
    assert engine.cache_stats()["healing"]["readings_dropped"] == 6
    assert known(engine, DOCUMENTS[1], DOCUMENTS[0]) == 0


def test_documents_are_not_read_again_if_half_of_the_cache_is_taken(caplog) -> None:
    caplog.set_level("INFO")
    with make_engine(tiny_model("llama")) as engine:
        engine.warm(DOCUMENTS, header="Read: ", progress=False)
        budget = 5 * engine.cache_stats()["tiers"]["ram"]["bytes"] // 2
    with make_engine(tiny_model("llama"), max_cache_bytes=budget) as engine:
        engine.warm(DOCUMENTS, header="Read: ", progress=False)
        engine.warm_later(DOCUMENTS, header="Read: ")
        report = engine.heal()
        assert 0 < report.readings < 6 and report.waiting == 0
        assert engine.cache_stats()["healing"]["readings_dropped"] == 6 - report.readings
        assert all(known(engine, document) > 60 for document in DOCUMENTS)  # none was pushed out
        assert caplog.text.count("half of the cache is taken") == 1


def test_readings_that_do_not_fit_are_left_out(engine, monkeypatch, caplog) -> None:
    long = "x" * (engine.context_length - len("Read: ") - 50)
    assert engine.warm_later([long, *DOCUMENTS[:1]], header="Read: ") == 0
    monkeypatch.setattr("kvboost.runtime.idle_work.MOST_READ_TOKENS", 200)
    assert engine.warm_later(DOCUMENTS, header="Read: ") == 1
    assert "1 of 6 readings wait" in caplog.text
    for documents in ("text", ["one"], [], [1, 2], ["one", 2]):
        with pytest.raises(PromptError, match="at least two strings"):
            engine.warm_later(documents)
    for contexts in (1, 5):
        with pytest.raises(ConfigError, match=f"contexts={contexts}"):
            engine.warm_later(DOCUMENTS, contexts=contexts)


def test_warm_counts_new_chunks_and_reads_after_a_header(engine) -> None:
    assert engine.warm("x" * 40, header="") == 3
    assert engine.warm("x" * 40, header="") == 0
    assert engine.warm(TEXT, header="header: ") > 0
    assert engine.plan(f"header: {TEXT}!").cached_tokens == len(TEXT) + 8
    with pytest.raises(ConfigError, match="position_offset=5"):
        engine.warm(TEXT, position_offset=5)
    with pytest.raises(PromptError, match="header="):
        engine.warm([1, 2, 3], header="h")


def test_a_document_is_read_as_the_beginning_of_a_chat(engine) -> None:
    engine.warm(TEXT)
    asked = [{"role": "user", "content": f"{TEXT} And then?"}]
    assert engine.plan(asked, EXACT).cached_tokens == len(f"u:{TEXT}")


def test_many_documents_are_read_and_serve_in_any_order(engine) -> None:
    documents = [letter * 3 + TEXT[number : number + 40] for number, letter in enumerate("abc")]
    new = engine.warm(documents)
    assert new == sum(-(-len(f"u:{text}") // 16) for text in documents)
    assert engine.warm(documents) == 0
    asked = [{"role": "user", "content": "".join(reversed(documents)) + " What is new here?"}]
    report = engine.plan(asked, recompute_strategy="query")
    assert report.cached_tokens >= sum(map(len, documents))
    with pytest.raises(PromptError, match="a document is a non-empty string"):
        engine.warm(["a", ""])


def test_a_callers_boundaries_are_kept(engine) -> None:
    engine.generate(TEXT, 1, boundaries=[5, 11])
    chunks = {span.end for span in engine.plan(TEXT + "!").spans}
    assert {5, 11} <= chunks
    with pytest.raises(ConfigError, match="boundaries=1000"):
        engine.generate(TEXT, 1, boundaries=[1000])
    with make_engine(tiny_model("llama"), chunking="document") as by_document:
        by_document.warm("x" * 40)  # after the two tokens of the chat template's header
        report = by_document.plan([{"role": "user", "content": "x" * 40}], EXACT)
        assert [span.end for span in report.spans[:2]] == [2, 18]


def test_arranging_documents_finds_the_longest_exact_hit(engine) -> None:
    documents = [letter * 30 for letter in "abc"]
    assert engine.arrange("read: ", documents, "?").exact_tokens == 0
    engine.generate(f"read: {documents[2]}{documents[0]}", 1)
    found = engine.arrange("read: ", documents, "?")
    assert found.order == (2, 0, 1)
    assert found.exact_tokens == len("read: ") + 60
    assert found.exact_tokens_as_given == len("read: ")
    result = engine.generate(found.prompt, 1, EXACT)
    assert result.exact_tokens == found.exact_tokens
    framed = engine.arrange(None, documents, "What?")
    asked = [{"role": "user", "content": "".join(documents) + "What?"}]
    assert framed.prompt == engine.encode(asked)
    with pytest.raises(PromptError, match="must be several strings"):
        engine.arrange("", "abc", "?")
