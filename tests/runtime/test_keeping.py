"""What requests of models with states leave, and where later requests go on."""

from __future__ import annotations

import asyncio
import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel
from typer.testing import CliRunner

from kvboost import ConfigError, GenerationMode, KVBoost, StockModel
from kvboost.cli.main import app
from support.forwards import intercept
from support.hybrids import hybrid_model
from support.tiny import make_engine, random_ids

BASELINE, EXACT, MOVED = GenerationMode
CLOSE = {"atol": 1e-3, "rtol": 0}


@functools.cache
def model() -> PreTrainedModel:
    """Short convolutions: the quickest of these models on a CPU."""
    return hybrid_model("lfm2")


@functools.cache
def stock() -> StockModel:
    return StockModel(copy.deepcopy(model()))


def engine_of(**options: Any) -> KVBoost:
    return make_engine(model(), **{"state_every": 32, **options})


def expected(ids: list[int], count: int) -> list[int]:
    """The greedy answer of stock transformers."""
    return list(_expected(tuple(ids), count))


@functools.cache
def _expected(ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    if not count:
        return ()
    token = int(stock().logits(list(ids))[-1].argmax())
    return (token, *_expected((*ids, token), count - 1))


def answer(engine: KVBoost, ids: list[int], count: int = 3, **options: Any) -> int:
    """Answers as stock transformers does; returns how many tokens were reused."""
    result = engine.generate(ids, count, options.pop("mode", EXACT), ignore_eos=True, **options)
    assert result.token_ids == expected(ids, count)
    return result.cached_tokens


def stored(engine: KVBoost) -> dict[int, bool]:
    """The ends of all chunks, and whether states are stored there."""
    infos = engine.runtime.store.holdings.catalogue.infos().values()
    ends: dict[int, bool] = {}
    for info in infos:
        ends[info.end] = ends.get(info.end, False) or info.has_state
    return ends


@settings(max_examples=12, deadline=None)
@given(
    st.integers(8, 40),
    st.integers(16, 70),
    st.sampled_from(["fixed", "semantic", "document"]),
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 1), st.booleans()), max_size=5),
)
def test_a_prompt_goes_on_from_states_at_or_below_known_text(size, every, chunking, known) -> None:
    ids, others = random_ids(90, 1), random_ids(90, 2)
    with engine_of(chunk_size=size, state_every=every, chunking=chunking) as engine:
        longest = 0
        for length, tail, answers in known:
            text = ids[:length] + others[: 20 * tail]
            engine.generate(text, 2, EXACT, ignore_eos=True) if answers else engine.warm(text)
            longest = max(longest, length)
        scored = engine.score(ids[:60], [*ids[60:], 0], EXACT)
        reused = sum(s.num_tokens for s in scored.reuse.spans if s.tier is not None)
        assert reused <= min(59, longest + 1)
        assert reused >= min(59, longest) // every * every or (reused == 0 and longest < every)
        torch.testing.assert_close(scored.logits, stock().logits(ids)[59:], **CLOSE)
        assert engine.check_integrity() == []


def test_states_are_kept_on_a_grid_and_where_prompts_and_answers_end() -> None:
    with engine_of() as engine:
        answer(engine, random_ids(80, 1), 4)
        assert [end for end, has_state in sorted(stored(engine).items()) if has_state] == [
            *(32, 64, 79, 83)
        ]
        answer(engine, random_ids(40, 2), mode=BASELINE)
        engine.score(random_ids(40, 2), random_ids(40, 3))
        assert len(stored(engine)) == 6


def test_by_default_states_take_no_more_memory_than_rows() -> None:
    with make_engine(model()) as engine:
        forward, every = engine.model.forward, engine.runtime.backend.state_every
        assert every == 1024
        assert forward.states.nbytes <= every * forward.shape.row_bytes
    with make_engine(model(), chunk_size=600) as engine:
        assert engine.runtime.backend.state_every == 1200


def test_where_prompts_part_states_are_kept_for_the_next() -> None:
    with engine_of(state_every=1000) as engine:
        system = random_ids(50, 1)
        assert answer(engine, system + random_ids(30, 2)) == 0
        assert answer(engine, system + random_ids(30, 3)) == 0
        result = engine.plan(system + random_ids(30, 4))
        assert result.cached_tokens == 50
        assert answer(engine, system + random_ids(30, 4)) == 50
        again = engine.plan(random_ids(50, 1)[:40] + random_ids(30, 5))
        assert again.cached_tokens == 0 and "40 tokens are known" in again.notes[-1]


def test_marks_of_a_prompt_have_states() -> None:
    with engine_of(state_every=1000) as engine:
        system = random_ids(50, 1)
        answer(engine, system + random_ids(30, 2), marks=[50])
        assert stored(engine)[50]
        for seed in (3, 4):
            assert answer(engine, system + random_ids(30, seed)) == 50
        with pytest.raises(ConfigError, match="marks"):
            engine.generate(system, marks=[51])


def test_a_conversation_keeps_the_states_of_its_last_turns() -> None:
    with engine_of(state_every=1000) as engine:
        ids, known = random_ids(40, 1), 0
        for turn in range(4):
            assert answer(engine, ids, 4) == known
            known = len(ids) + 3
            ids = [*ids, *expected(ids, 4), *random_ids(20, 10 + turn)]
        ends = [end for end, has_state in sorted(stored(engine).items()) if has_state]
        # Where the answer before the last one ended, before the last token of the last prompt,
        # and where the last answer ended.
        assert ends == [91, 111, 115]
        assert answer(engine, ids, 4) == known
        assert engine.check_integrity() == []


def test_states_from_which_two_texts_go_on_stay() -> None:
    with engine_of(state_every=1000) as engine:
        ids = random_ids(40, 1)
        answer(engine, ids, 4)
        past = [*ids, *expected(ids, 4)]
        answer(engine, past + random_ids(20, 2), 4)
        answer(engine, past + random_ids(20, 3), 4)
        longer = past + random_ids(20, 2) + expected(past + random_ids(20, 2), 4)
        for seed in (4, 5):
            answer(engine, longer + random_ids(20, seed), 4)
            longer = longer + random_ids(20, seed) + expected(longer + random_ids(20, seed), 4)
        assert stored(engine)[43]
        assert answer(engine, past + random_ids(20, 6), 4) == 43


def test_states_that_a_chunk_lacks_are_added() -> None:
    with engine_of(state_every=1000) as engine:
        ids = random_ids(64, 1)
        engine.warm(ids)
        assert stored(engine) == {16: False, 32: False, 48: False, 64: True}
        engine.warm(ids[:32])
        assert stored(engine)[32]
        assert answer(engine, ids[:32] + random_ids(20, 2)) == 32
        assert answer(engine, ids + random_ids(20, 2)) == 64
        assert engine.check_integrity() == []


def test_drafts_are_not_made() -> None:
    with engine_of(speculate=8) as engine:
        ids = random_ids(20, 1) * 3
        for _ in range(2):
            result = engine.generate(ids, 12, EXACT, ignore_eos=True)
            assert result.token_ids == expected(ids, 12) and result.drafted_tokens == 0


def test_a_cancelled_answer_leaves_what_was_computed() -> None:
    with engine_of(state_every=1000) as engine:
        ids = random_ids(60, 1)
        stream = engine.stream(ids, 20, mode=EXACT, ignore_eos=True)
        next(iter(stream))
        stream.close()
        assert 59 <= answer(engine, [*ids, *expected(ids, 1), 7, 8, 9]) <= 61


def test_a_failed_prompt_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        ids = random_ids(90, 1)

        def fail(run: Any, segments: Any, cache: Any) -> torch.Tensor:
            if segments[0].first >= 64:
                cache.states.extend_conv(cache.states.shape.places[0], torch.ones(1, 32, 1), None)
                raise RuntimeError("no memory")
            return run(segments, cache)

        with monkeypatch.context() as patched:
            intercept(engine, patched, fail)
            with pytest.raises(RuntimeError, match="no memory"):
                engine.generate(ids, 3, EXACT)
        assert stored(engine) == {} and answer(engine, ids) == 0


def test_requests_of_a_batch_are_cancelled_one_by_one() -> None:
    async def main(engine: KVBoost) -> list[int]:
        first = engine.astream(random_ids(60, 1), 50, mode=EXACT, ignore_eos=True)
        second = engine.astream(random_ids(50, 2), 5, mode=EXACT, ignore_eos=True)
        async for _ in first:
            break
        await first.aclose()
        async for _ in second:
            pass
        return second.result.token_ids

    with engine_of() as engine:
        assert asyncio.run(main(engine)) == expected(random_ids(50, 2), 5)
        assert answer(engine, random_ids(60, 1)) >= 59


def test_chunks_with_states_are_evicted() -> None:
    with engine_of(max_cache_bytes="60KiB") as engine:
        for seed in (1, 2, 3, 1, 4, 5, 2):
            answer(engine, random_ids(70, seed))
            assert engine.check_integrity() == []
        stats = engine.cache_stats()["tiers"]["ram"]
        assert 0 < stats["bytes"] <= 60 * 1024 < 7 * 70 * 256
        answer(engine, random_ids(70, 2), 3)


def test_the_next_engine_goes_on_from_states_on_disk(tmp_path: Path) -> None:
    ids = random_ids(70, 1)
    with engine_of(disk_cache_dir=tmp_path) as engine:
        answer(engine, ids, 4)
    with engine_of(disk_cache_dir=tmp_path) as engine:
        follow = [*ids, *expected(ids, 4), *random_ids(10, 2)]
        result = engine.generate(follow, 3, EXACT, ignore_eos=True)
        assert result.cached_tokens == 73 and result.token_ids == expected(follow, 3)
        assert {span.tier for span in result.spans} == {"disk", None}
        assert engine.check_integrity() == []
    done = CliRunner().invoke(app, ["cache", "verify", "--cache-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["cache", "ls", "--cache-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    archive, other = tmp_path / "all.tar", tmp_path / "other"
    for command, folder in (("export", tmp_path), ("import", other)):
        options = ["cache", command, str(archive), "--cache-dir", str(folder)]
        done = CliRunner().invoke(app, options)
        assert done.exit_code == 0, done.output
    with engine_of(disk_cache_dir=other) as engine:
        assert answer(engine, ids) == 69


def test_other_machines_find_states_on_the_grid(tmp_path: Path) -> None:
    ids, url = random_ids(90, 1), f"file://{tmp_path}"
    remote = {"remote_cache_url": url, "remote_cache_bytes": 1 << 30}
    with engine_of(**remote) as engine:
        answer(engine, ids)
    with engine_of(**remote) as engine:
        assert answer(engine, ids) == 64
    with engine_of(**remote, state_every=48) as engine:  # looks for others than there are
        answer(engine, ids)


def test_pins_and_forgetting() -> None:
    with engine_of(max_cache_bytes="60KiB", max_pinned_bytes="30KiB") as engine:
        ids = random_ids(50, 1)
        assert engine.pin(ids).tokens == 50
        for seed in (2, 3, 4, 5):
            answer(engine, random_ids(70, seed))
        assert answer(engine, ids + random_ids(20, 6)) == 50
        engine.drop_pin(engine.pins()[0].name)
        assert engine.forget(ids) > 0
        assert answer(engine, ids + random_ids(20, 6)) == 0
        assert engine.check_integrity() == []


def test_prompts_are_described_scored_and_verified() -> None:
    with engine_of() as engine:
        ids = random_ids(70, 1)
        whole = engine.generate(ids, 2, BASELINE, prompt_logprobs=0, ignore_eos=True)
        engine.warm(ids[:40])
        result = engine.generate(ids, 2, EXACT, ignore_eos=True, exactness="verified")
        assert result.cached_tokens == 40 and result.token_ids == whole.token_ids
        logprobs = stock().logits(ids)[:-1].log_softmax(-1)
        chosen = logprobs[torch.arange(69), torch.tensor(ids[1:])]
        given = torch.tensor([one.logprob for one in whole.prompt_logprobs])
        torch.testing.assert_close(given, chosen, **CLOSE)
        assert engine.verify_correctness(max_new_tokens=2)
        assert engine.embed([ids[:20]]).shape == (1, 32)


@pytest.mark.parametrize("bits", [8, 4])
def test_states_stay_whole_beside_quantised_rows(bits: int) -> None:
    with engine_of(kv_cache_bits=bits) as engine:
        ids = random_ids(90, 1)
        first = engine.generate(ids, 1, EXACT)
        again = engine.generate(ids, 1, EXACT)
        assert (first.cached_tokens, again.cached_tokens) == (0, 89)
        assert engine.check_integrity() == []


def test_a_text_that_a_loop_reads_has_states_at_its_end_only() -> None:
    with engine_of(state_every=1000) as engine:
        asyncio.run(engine.awarm(random_ids(40, 1)))
        assert stored(engine) == {16: False, 32: False, 40: True}
        for seed in (2, 3):
            answer(engine, random_ids(40, 1) + random_ids(20, seed))
        assert stored(engine)[40]
