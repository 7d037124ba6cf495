"""An engine whose pages are too few: requests are preempted and run again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.vllm_engines import ALWAYS, PAGE, Engine, Texts


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(ALWAYS, max_model_len=1024, num_gpu_blocks_override=46)
    yield engine
    engine.close()


def test_preempted_requests_stay_out_of_the_exact_cache(
    engine: Engine, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = texts.prompt(2, 1, 0), texts.prompt(1, 2, 0)
    full = {name: engine.full(ids) for name, ids in (("first", first), ("second", second))}
    engine.ask(texts.prompt(0, 1, 2), tokens=1)
    engine.fresh()
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request

    def seen(request, *args, **more):  # type: ignore[no-untyped-def]
        preempted.append(request.request_id)
        preempt(request, *args, **more)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", seen)
    pages = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    room = pages - 2 * (len(first) // PAGE + 1)
    assert room >= 0
    names = [engine.add(ids, tokens=(room // 2 + 3) * PAGE) for ids in (first, second)]
    answers = engine.finish()
    assert preempted and answers.keys() == set(names)
    assert any(answer.usage and answer.usage["moved_tokens"] > 300 for answer in answers.values())
    for ids, before in ((first, full["first"]), (second, full["second"])):
        after = engine.ask(ids, "off")
        assert after.cached == 0
        assert after.tokens == before.tokens and after.logprobs == before.logprobs
        engine.fresh()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == pages
