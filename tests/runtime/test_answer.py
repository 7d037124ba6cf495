"""Where an answer ends, and which tokens it may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost import ConfigError, GenerationMode, KVBoost
from kvboost.model.execution.reference import StockModel
from support.tiny import EOS, dynamic_model, longrope_model, make_engine, tiny_model

TEXT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def engine():
    with make_engine(tiny_model("llama")) as made:
        yield made


def both(engine: KVBoost, **options: Any) -> tuple[list[int], str]:
    """The answer alone, and in a batch: they are the same."""
    alone = engine.generate(TEXT, 20, **options)
    (batched,) = engine.generate_batch([TEXT], 20, **options)
    assert (alone.token_ids, alone.output_text) == (batched.token_ids, batched.output_text)
    return alone.token_ids, alone.output_text


def test_a_stop_token_ends_the_answer_and_is_shown_only_if_asked_for(engine) -> None:
    ids, _ = both(engine, ignore_eos=True)
    stop = next(one for one in ids[3:] if one not in ids[:3])
    end = ids.index(stop)
    found, text = both(engine, ignore_eos=True, stop_token_ids=[stop])
    assert found == ids[: end + 1]
    assert text == engine.decode(ids[:end])
    _, text = both(engine, ignore_eos=True, stop_token_ids=[stop], include_stop=True)
    assert text == engine.decode(ids[: end + 1])


def test_a_stop_string_is_the_end_of_the_text_if_asked_for(engine) -> None:
    _, text = both(engine, ignore_eos=True)
    stop = text[4:6]
    ids, without = both(engine, ignore_eos=True, stop=stop)
    assert len(ids) < 20
    _, included = both(engine, ignore_eos=True, stop=stop, include_stop=True)
    assert included == without + stop == text[: text.index(stop) + len(stop)]


def test_no_token_ends_an_answer_before_its_least_length(engine) -> None:
    likely_end = {"logit_bias": {EOS: 100.0}}
    assert both(engine, **likely_end)[0] == [EOS]
    ids, _ = both(engine, **likely_end, min_new_tokens=5)
    assert EOS not in ids[:5] and ids[5:] == [EOS]
    stop, *_ = both(engine, ignore_eos=True)[0]
    ids, _ = both(engine, ignore_eos=True, stop_token_ids=[stop], min_new_tokens=3)
    assert stop not in ids[:3] and len(ids) >= 3


def test_only_allowed_tokens_come(engine) -> None:
    allowed = [65, 66, 67]
    ids, _ = both(engine, allowed_token_ids=allowed)
    assert set(ids) <= set(allowed) and len(ids) == 20
    ids, _ = both(engine, allowed_token_ids=allowed, temperature=5.0, seed=3)
    assert set(ids) == set(allowed)


def test_bad_words_never_come(engine) -> None:
    letters: dict[str, Any] = {
        "allowed_token_ids": engine.encode("abc"),
        "temperature": 5.0,
        "ignore_eos": True,
    }
    for seed in range(4):
        _, text = both(engine, **letters, seed=seed, bad_words=["aba", "bb"])
        assert "aba" not in text and "bb" not in text
    assert any("bb" in both(engine, **letters, seed=seed)[1] for seed in range(4))


def test_the_prompts_tokens_are_described(engine) -> None:
    """By the logits of all of its rows, whatever is cached and however it is cut."""
    engine.generate(TEXT, 1)
    result = engine.generate(TEXT, 4, prompt_logprobs=2, logprobs=1)
    (batched,) = engine.generate_batch([TEXT], 4, prompt_logprobs=2)
    ids = engine.encode(TEXT)
    assert result.prompt_logprobs is not None and result.cached_tokens == 0
    assert [one.token_id for one in result.prompt_logprobs] == ids[1:]
    logits = engine.score(ids[:1], ids[1:], GenerationMode.BASELINE).logits
    expected = torch.log_softmax(logits.float(), -1)
    for place, one in enumerate(result.prompt_logprobs):
        assert one.logprob == pytest.approx(float(expected[place, one.token_id]), abs=1e-4)
        best, value = one.top[0]
        assert value == pytest.approx(float(expected[place].max()), abs=1e-4)
        assert expected[place, best] == pytest.approx(value, abs=1e-4) and len(one.top) == 2
    for one, other in zip(result.prompt_logprobs, batched.prompt_logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert engine.generate(TEXT, 4).prompt_logprobs is None
    assert result.token_ids == engine.generate(TEXT, 4).token_ids


def test_a_long_prompt_is_described_slice_by_slice(monkeypatch) -> None:
    with make_engine(tiny_model("llama", max_position_embeddings=1024)) as engine:
        prompt = [number % 250 for number in range(3, 500)]
        (whole,) = engine.generate_batch([prompt], 1, prompt_logprobs=0)
        monkeypatch.setattr("kvboost.runtime.prefill.DESCRIBED_ROWS", 7)
        (sliced,) = engine.generate_batch([prompt], 1, prompt_logprobs=0)
    assert [one.token_id for one in sliced.prompt_logprobs or ()] == prompt[1:]
    for one, other in zip(whole.prompt_logprobs or (), sliced.prompt_logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert sliced.token_ids == whole.token_ids


@pytest.mark.parametrize("make_model", [dynamic_model, longrope_model])
def test_a_prompt_whose_rotation_depends_on_its_length_is_described_whole(
    make_model, monkeypatch
) -> None:
    monkeypatch.setattr("kvboost.runtime.prefill.DESCRIBED_ROWS", 7)
    prompt = list(range(100))
    with make_engine(make_model()) as engine:
        described = engine.generate(prompt, 3, prompt_logprobs=0)
        assert described.token_ids == engine.generate(prompt, 3).token_ids
    expected = torch.log_softmax(StockModel(make_model()).logits(prompt).float(), -1)
    for place, one in enumerate(described.prompt_logprobs or ()):
        assert one.logprob == pytest.approx(float(expected[place, one.token_id]), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"mode": "turbo"}, "mode='turbo'"),
        ({"temprature": 1.0}, "unknown option 'temprature'"),
        ({"cache_salt": 5}, "cache_salt=5"),
        ({"top_p": 2.0}, "top_p=2.0"),
        ({"min_new_tokens": 65}, "min_new_tokens=65"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allows no token at all"),
        ({"bad_words": [""]}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs=21"),
        ({"regex": "a+", "min_new_tokens": 2}, "do not go with a format"),
        ({"end_ids": [3]}, "unknown option 'end_ids'"),
    ],
)
def test_mistakes_are_named_at_the_call(engine, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        engine.stream(TEXT, **options)


def test_an_answer_goes_on_where_the_rules_leave_no_token(engine) -> None:
    (only,) = engine.encode("a")
    ids, _ = both(engine, allowed_token_ids=[only], bad_words=["a"])
    assert ids == [only] * 20
