"""The pipeline on a tiny model: what users may expect of every call."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest
import torch
import transformers

from kvboost import (
    ContextLengthError,
    GenerationMode,
    KVBoost,
    KVBoostError,
    PromptError,
    SpanKind,
    StockModel,
    UnsupportedModelError,
)
from kvboost.model.execution.sampling import Sampler
from kvboost.results import PHASES
from support.batches import on_buffers
from support.forwards import intercept
from support.tiny import (
    CONTEXT,
    EOS,
    byte_tokenizer,
    chunk_bytes,
    dynamic_model,
    in_slices,
    longrope_model,
    make_engine,
    tiny_model,
)

TEXT = "the quick brown fox jumps over the lazy dog and runs away. "
EXACT = GenerationMode.PREFIX_CACHE


def test_a_second_request_reuses_what_the_first_read_and_generated(engine) -> None:
    first = engine.generate(TEXT, 20, EXACT, ignore_eos=True)
    assert (first.cached_tokens, first.prompt_tokens) == (0, len(TEXT))
    follow = engine.encode(TEXT) + first.token_ids + engine.encode(" and then?")
    second = engine.generate(follow, 5, EXACT)
    assert second.exact_tokens == len(TEXT) + 20 - 1
    assert second.kv_reuse_ratio == second.cached_tokens / len(follow)
    assert [span.kind for span in second.spans][-1] is SpanKind.COMPUTE
    assert sum(span.num_tokens for span in second.spans) == len(follow)
    assert (second.moved_tokens, second.recomputed_tokens) == (0, 0)


def test_a_fully_cached_prompt_still_computes_its_last_token(engine) -> None:
    engine.warm(TEXT, header="")
    result = engine.generate(TEXT, 3, EXACT)
    assert result.exact_tokens == len(TEXT) - 1
    assert result.token_ids == engine.generate(TEXT, 3, GenerationMode.BASELINE).token_ids


def test_baseline_neither_reads_nor_writes_the_cache(engine) -> None:
    engine.generate(TEXT, 5, GenerationMode.BASELINE)
    assert engine.cache_stats()["hot_chunks"] == 0
    engine.warm(TEXT, header="")
    before = engine.cache_stats()
    assert engine.generate(TEXT, 5, GenerationMode.BASELINE).cached_tokens == 0
    after = engine.cache_stats()
    assert after["hot_chunks"] == before["hot_chunks"]
    assert after["cache_hits"] == before["cache_hits"]


def test_only_baseline_makes_stock_transformers_calls(engine, monkeypatch) -> None:
    seen = []

    def noted(run, segments, cache):
        seen.append([segment.as_stock for segment in segments])
        return run(segments, cache)

    intercept(engine, monkeypatch, noted)
    for mode in GenerationMode:
        engine.generate(TEXT, 1, mode, cache_salt=mode.value)
    assert seen == [[True], [False], [False]]


def test_salts_never_share(engine) -> None:
    engine.warm(TEXT, header="", cache_salt="alice")
    assert engine.generate(TEXT, 2, EXACT, cache_salt="alice").cached_tokens > 0
    assert engine.generate(TEXT, 2, EXACT, cache_salt="bob").cached_tokens == 0
    assert engine.generate(TEXT, 2, EXACT).cached_tokens == 0


def test_two_models_dtypes_or_adapters_never_share() -> None:
    def fingerprint(model):
        return make_engine(model).model.fingerprint

    base = fingerprint(tiny_model("llama"))
    assert base == fingerprint(tiny_model("llama"))
    edited = tiny_model("llama")
    with torch.no_grad():
        edited.model.layers[0].self_attn.q_proj.weight[3, 5] += 0.01
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    others = [
        fingerprint(edited),
        fingerprint(tiny_model("llama").to(torch.bfloat16)),
        fingerprint(tiny_model("llama", rope_parameters=rope)),
        fingerprint(tiny_model("mistral")),
    ]
    assert len({base, *others}) == 5


def test_chat_uses_the_template_and_grows_without_reading_again(engine) -> None:
    messages = [{"role": "user", "content": "hello there, how are you today?"}]
    first = engine.chat(messages, 8, EXACT)
    assert first.prompt_tokens == len("u:hello there, how are you today?\na:")
    messages += [{"role": "assistant", "content": "fine"}, {"role": "user", "content": "and now?"}]
    assert engine.chat(messages, 8, EXACT).cached_tokens >= first.prompt_tokens - 1


def test_a_stream_gives_the_text_in_pieces_and_the_result_after(engine) -> None:
    whole = engine.generate(TEXT, 30, ignore_eos=True)
    stream = engine.stream(TEXT, 30, ignore_eos=True)
    pieces = [next(stream), next(stream)]
    assert stream.result.total_ms > stream.result.ttft_ms > 0  # true on the way too
    pieces += stream
    assert "".join(pieces) == whole.output_text == stream.result.output_text
    assert stream.result.token_ids == whole.token_ids
    assert engine.decode(whole.token_ids) == whole.output_text


def test_a_failure_frees_everything_and_keeps_nothing_half_done(engine, monkeypatch) -> None:
    engine.warm(TEXT, header="")
    before = engine.cache_stats()

    def broken(*given):
        raise MemoryError("no room")

    intercept(engine, monkeypatch, broken)
    stream = engine.stream(TEXT + "more and more", 5, EXACT)
    with pytest.raises(MemoryError):
        next(stream)
    assert stream.result.finish_reason == "error"
    monkeypatch.undo()
    after = engine.cache_stats()
    assert (after["hot_chunks"], after["in_use"]) == (before["hot_chunks"], 0)
    base = engine.generate(TEXT + "more", 5, GenerationMode.BASELINE).token_ids
    assert engine.generate(TEXT + "more", 5, EXACT).token_ids == base


def test_a_long_answer_makes_its_kv_grow(engine, monkeypatch) -> None:
    expected = engine.generate([1] * 250, 5, GenerationMode.BASELINE, ignore_eos=True).token_ids
    monkeypatch.setattr("kvboost.runtime.runtime.INITIAL_ANSWER_ROWS", 1)
    monkeypatch.setattr("kvboost.model.execution.kv._ROUND", 1)
    engine.runtime.pool.clear()
    grown = engine.generate([1] * 250, 5, GenerationMode.BASELINE, ignore_eos=True).token_ids
    assert grown == expected
    assert engine.runtime.pool._idle[0].capacity == 2 * 251


def test_a_stop_that_only_the_last_flush_completes_is_a_stop(engine, monkeypatch) -> None:
    tokenizer = engine.model.tokenizer
    half = tokenizer.encode("é")[0]
    monkeypatch.setattr(Sampler, "__call__", lambda *_: (half, None))
    result = engine.generate(TEXT, 1, stop="\ufffd")
    assert (result.finish_reason, result.output_text) == ("stop", "")


def test_every_end_of_sequence_token_ends(engine) -> None:
    free = engine.generate(TEXT, 10, ignore_eos=True).token_ids
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [EOS, free[3]]
    result = make_engine(model).generate(TEXT, 10)
    assert result.finish_reason == "stop"
    assert result.token_ids == free[: free.index(free[3]) + 1]


def test_an_answer_ends_where_the_context_does(engine) -> None:
    prompt = [1] * (CONTEXT - 6)
    result = engine.generate(prompt, 50, ignore_eos=True)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 6)


def test_a_prompt_longer_than_the_context_names_both_numbers(engine) -> None:
    for length in (CONTEXT, CONTEXT + 44):
        with pytest.raises(ContextLengthError, match=f"{length} tokens.*holds {CONTEXT}"):
            engine.generate([1] * length)
    with pytest.raises(ContextLengthError):
        engine.warm([1] * (CONTEXT + 1))


@pytest.mark.parametrize(
    "prompt", ["", [], None, 7, 1.5, ["a"], [1.5], [1, 1.5], [1, 2**70], {"a": 1}]
)
def test_a_bad_prompt_is_refused(engine, prompt) -> None:
    with pytest.raises(PromptError, match=r"empty|a prompt is a string"):
        engine.generate(prompt)


@pytest.mark.parametrize(
    "rows", [torch.tensor([[1, 2, 3]]), np.array([[1, 2, 3]]), [[1, 2, 3]], ((1, 2, 3),)]
)
def test_token_ids_in_rows_are_refused_with_what_to_do(engine, rows) -> None:
    with pytest.raises(PromptError, match=r"in one row, so use ids\[0\]"):
        engine.generate(rows)
    assert engine.generate(rows[0], 1).prompt_tokens == 3
    with pytest.raises(PromptError, match=r"in 2 rows, so give one, or all to generate_batch"):
        engine.generate([[1, 2], [3, 4]])


def test_the_tokenizer_is_the_one_of_the_model() -> None:
    tokenizer = byte_tokenizer()
    with KVBoost.from_model(tiny_model("llama"), tokenizer) as engine:
        assert engine.tokenizer is tokenizer
        assert engine.tokenizer("hello")["input_ids"] == engine.encode("hello")


def test_token_ids_outside_the_vocabulary_are_refused(engine) -> None:
    for ids in ([1, 260], [-1]):
        with pytest.raises(PromptError, match=r"outside the model's vocabulary of 260"):
            engine.generate(ids)


def test_chat_messages_that_cannot_be_read_are_refused(engine) -> None:
    with pytest.raises(PromptError, match="chat\\(\\) takes messages"):
        engine.chat("hello")
    with pytest.raises(PromptError, match="'role' and 'content'"):
        engine.chat([{"role": "user"}])
    with pytest.raises(PromptError, match="'role' and 'content'"):
        engine.chat([{"role": "user", "content": "a"}, "b"])
    messages = [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]
    for ask in (engine.chat, engine.generate):
        with pytest.raises(PromptError, match="role 'bot' is unknown; roles are system, developer"):
            ask(messages)


def test_a_model_without_chat_template_says_so(engine, monkeypatch) -> None:
    monkeypatch.setattr(engine.model.tokenizer.hf, "chat_template", None)
    with pytest.raises(PromptError, match="no chat template"):
        engine.chat([{"role": "user", "content": "a"}])


def test_long_prompts_are_prefilled_in_slices_with_the_same_result() -> None:
    whole = make_engine(tiny_model("llama"))
    sliced = in_slices(make_engine(tiny_model("llama")), 16)
    prompt = [number * 7 % 256 for number in range(120)]
    expected = whole.generate(prompt, 8, GenerationMode.BASELINE).token_ids
    assert sliced.generate(prompt, 8, EXACT).token_ids == expected
    assert sliced.generate([*prompt, 1], 8, EXACT).exact_tokens == 120
    assert torch.allclose(
        whole.score(prompt, expected, "baseline").logits,
        sliced.score(prompt, expected, "baseline").logits,
        atol=1e-4,
    )


def test_an_answer_that_crosses_the_switch_is_what_a_full_prefill_gives_and_not_kept() -> None:
    engine, stock = make_engine(longrope_model()), StockModel(longrope_model())
    prompt = [number * 5 % 256 for number in range(58)]
    answer = engine.generate(prompt, 14, EXACT, ignore_eos=True).token_ids
    for length, token in enumerate(answer):
        assert token == stock.logits(prompt + answer[:length])[-1].argmax()
    assert engine.cache_stats()["hot_chunks"] == 0


@pytest.mark.parametrize("make_model", [dynamic_model, longrope_model])
def test_if_rotation_depends_on_length_only_short_prompts_are_reused(make_model) -> None:
    engine = in_slices(make_engine(make_model()), 16)
    short, long = [number * 5 % 256 for number in range(40)], list(range(100))
    engine.warm(short)
    assert engine.generate([*short, 1], 4, EXACT).exact_tokens == 40
    expected = StockModel(make_model()).logits(long)[-1]
    assert torch.allclose(engine.score(long, [0], EXACT).logits[0], expected, atol=1e-4)
    for _ in range(2):
        result = engine.generate(long, 4, EXACT)
        assert result.exact_tokens == 0
        assert "depends on the prompt's length" in "".join(result.reuse.notes)


def test_reported_times_are_true_by_an_outside_clock(engine, monkeypatch) -> None:
    """Planning and every forward are made to take a known while: no time may go unreported, and
    none that did not pass may be reported."""
    lookup = engine.runtime.store.lookup

    def slowly(call, *arguments, **options):
        time.sleep(0.02)
        return call(*arguments, **options)

    intercept(engine, monkeypatch, slowly)
    monkeypatch.setattr(engine.runtime.store, "lookup", partial(slowly, lookup))
    start = time.perf_counter()
    stream = engine.stream(TEXT, 12, EXACT, ignore_eos=True)
    next(stream)
    first = (time.perf_counter() - start) * 1e3
    list(stream)
    total = (time.perf_counter() - start) * 1e3
    timings = stream.result.timings
    assert 2 * 20 <= timings.ttft_ms <= first
    assert 13 * 20 <= timings.total_ms <= total
    assert timings.plan_ms >= 20 and timings.prefill_ms >= 20 and timings.decode_ms >= 11 * 20
    phases = sum(asdict(timings)[f"{phase}_ms"] for phase in PHASES)
    assert phases == pytest.approx(timings.total_ms)
    assert stream.result.tokens_per_sec == pytest.approx(12 / timings.total_ms * 1e3)


def test_the_callers_own_time_is_not_counted(engine) -> None:
    start = time.perf_counter()
    stream = engine.stream(TEXT, 4, ignore_eos=True)
    time.sleep(0.05)
    next(stream)
    first = (time.perf_counter() - start) * 1e3
    pauses = 1
    for _ in stream:
        time.sleep(0.05)
        pauses += 1
    total = (time.perf_counter() - start) * 1e3
    assert pauses > 1 and stream.result.ttft_ms <= first - 50
    assert stream.result.total_ms <= total - pauses * 50


def test_a_hit_too_short_to_use_is_no_hit(engine) -> None:
    engine.warm("abcde" + "x" * 30)
    assert engine.generate("abcde" + "y" * 30, 1, EXACT).exact_tokens == 0
    assert engine.cache_stats()["cache_hits"] == 0


def test_an_unclosed_stream_takes_no_lock_when_it_is_collected(engine) -> None:
    """The collector may run in a thread that holds our locks; here this very thread does."""
    stream = engine.stream(TEXT, 50, EXACT, ignore_eos=True)
    next(stream)
    with engine.runtime.store._admission, engine.runtime.store.lock, engine.runtime.pool._lock:
        del stream
        gc.collect()
    assert engine.generate(TEXT, 3, EXACT).cached_tokens == 0


def test_logprobs_come_with_every_token(engine) -> None:
    result = engine.generate(TEXT, 5, ignore_eos=True, logprobs=3)
    assert [one.token_id for one in result.logprobs] == result.token_ids
    for one in result.logprobs:
        assert len(one.top) == 3
        assert one.top[0] == (one.token_id, pytest.approx(one.logprob))
    assert engine.generate(TEXT, 2).logprobs is None


def test_a_closed_engine_raises_and_restores_the_model() -> None:
    model = tiny_model("llama")
    own = model.config._attn_implementation
    with make_engine(model) as first, make_engine(model) as second:
        expected = first.generate(TEXT, 4, "baseline").token_ids
        assert second.generate(TEXT, 4, "baseline").token_ids == expected
        first.close()
        assert second.generate(TEXT, 4, "baseline").token_ids == expected
        second.warm(TEXT, header="")
    assert model.config._attn_implementation == own
    assert second.cache_stats()["hot_chunks"] == 0 and first.check_integrity() == []
    for ask in (first.generate, first.forget, first.forget_salt, lambda _: first.clear()):
        with pytest.raises(KVBoostError, match="engine is closed"):
            ask(TEXT)
    first.close()


def test_adapters_switched_at_run_time_never_share(engine, monkeypatch) -> None:
    model = engine.model.forward.model
    monkeypatch.setattr(model, "_hf_peft_config_loaded", True)
    active = ["first"]
    monkeypatch.setattr(model, "active_adapters", lambda: active)
    engine.warm(TEXT, header="")
    assert engine.plan(TEXT).cached_tokens > 0
    active[0] = "second"
    assert engine.plan(TEXT).cached_tokens == 0


def test_statistics_add_up(engine) -> None:
    engine.generate(TEXT, 4, EXACT, ignore_eos=True)
    engine.generate(TEXT, 4, EXACT, ignore_eos=True)
    stats = engine.cache_stats()
    assert stats["requests"] == 2
    assert stats["prompt_tokens"] == 2 * len(TEXT)
    assert stats["exact_tokens"] == len(TEXT) - 1
    assert stats["generated_tokens"] == 8
    assert (stats["cache_hits"], stats["cache_misses"]) == (4, 4 + 1)
    assert stats["hit_rate"] == stats["exact_hit_rate"] == 4 / 9
    assert stats["tiers"]["ram"]["bytes"] == stats["hot_memory_mb"] * 1e6
    engine.clear()
    assert engine.cache_stats()["hot_chunks"] == 0


def test_threads_get_the_answers_they_would_get_alone() -> None:
    model = tiny_model("llama")
    engine = make_engine(model, max_cache_bytes=12 * chunk_bytes(model))
    prompts = [f"{TEXT}{'ab' * (number % 4)}{number % 3}" for number in range(12)]
    expected = [engine.generate(prompt, 6, GenerationMode.BASELINE).token_ids for prompt in prompts]
    answers: dict[int, list[int]] = {}

    def work(number: int) -> None:
        answers[number] = engine.generate(prompts[number], 6, EXACT).token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[number] for number in range(12)] == expected
    assert engine.cache_stats()["in_use"] == 0
    assert engine.check_integrity() == []


def test_a_small_cache_changes_speed_and_nothing_else() -> None:
    model = tiny_model("llama")
    most = 2 * chunk_bytes(model)
    engine = make_engine(model, max_cache_bytes=most)
    for number in range(8):
        prompt = TEXT * 2 + str(number)
        expected = engine.generate(prompt, 5, GenerationMode.BASELINE).token_ids
        assert engine.generate(prompt, 5, EXACT).token_ids == expected
        assert 0 < engine.cache_stats()["tiers"]["ram"]["bytes"] <= most
    nothing = make_engine(tiny_model("llama"), max_cache_bytes=0)
    assert nothing.generate(TEXT, 3, EXACT).token_ids == nothing.generate(TEXT, 3).token_ids
    assert nothing.cache_stats()["hot_chunks"] == 0


def test_our_attention_outside_the_engine_explains_itself(engine) -> None:
    engine.generate(TEXT, 1)
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        engine.model.forward.model(torch.tensor([[1, 2, 3]], device=engine.device))


def test_a_model_that_keeps_no_plain_kv_is_refused() -> None:
    config = transformers.MambaConfig(
        vocab_size=260, hidden_size=32, num_hidden_layers=1, state_size=4
    )
    with pytest.raises(UnsupportedModelError, match="keeps no keys and values"):
        make_engine(transformers.MambaForCausalLM(config), strict=False)


@on_buffers
def test_the_most_valuable_chunks_are_shown(engine) -> None:
    engine.warm("the same text again and again " * 3)
    engine.generate("the same text again and again " * 3, 1)
    chunks = engine.chunks(3)
    assert 0 < len(chunks) <= 3
    assert {"key", "text", "tokens", "bytes", "tier", "lineage", "position", "uses"} <= set(
        chunks[0]
    )
    assert max(chunk["uses"] for chunk in chunks) >= 2 and "same text" in chunks[0]["text"]
    assert engine.estimate_ms(100) is None or engine.estimate_ms(100) > 0
