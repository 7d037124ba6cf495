"""A smaller model drafts, and the answer stays that of the large one."""

from __future__ import annotations

import pytest

from kvboost import ConfigError, KVBoost
from kvboost.runtime.speculation import draft_model
from support.prompts import words
from support.scripted_drafts import always_draft
from support.tiny import byte_tokenizer, make_engine, save_tiny, tiny_model

PROMPT = words(8, 40)


@pytest.fixture
def folder(tmp_path):
    """Saves a tiny model."""

    def save(**changes: int) -> str:
        save_tiny(tmp_path, **changes)
        return str(tmp_path)

    return save


def without_text(engine: KVBoost, monkeypatch) -> None:
    """Leaves the model as the only drafter."""
    speculation = engine.runtime.speculation
    make = speculation.make_drafters
    monkeypatch.setattr(speculation, "make_drafters", lambda *given: make(*given)[1:])


def test_a_model_that_thinks_alike_drafts_right(folder, monkeypatch) -> None:
    with make_engine(tiny_model("llama"), speculate=20, draft_model=folder()) as engine:
        without_text(engine, monkeypatch)
        always_draft(monkeypatch)
        for seed, prompt in enumerate([PROMPT, [*PROMPT, *words(9, 10)]]):
            plain = engine.generate(prompt, 40, ignore_eos=True, speculate="off")
            drafted = engine.generate(prompt, 40, ignore_eos=True)
            assert drafted.token_ids == plain.token_ids
            assert drafted.drafted_tokens == drafted.accepted_tokens == 37
            how = {"temperature": 0.15, "seed": seed}  # about every second token is the likeliest
            plain = engine.generate(prompt, 30, ignore_eos=True, speculate="off", **how)
            drafted = engine.generate(prompt, 30, ignore_eos=True, **how)
            assert drafted.token_ids == plain.token_ids
            assert 0 < drafted.accepted_tokens < drafted.drafted_tokens


def test_a_model_that_thinks_otherwise_drafts_for_nothing(folder, monkeypatch) -> None:
    draft_model = folder(num_hidden_layers=1)
    monkeypatch.setattr("kvboost.runtime.speculation.draft_model.READ_TOKENS", 24)
    monkeypatch.setattr("kvboost.runtime.speculation.draft_model.LEAST_LEFT", 1)
    with make_engine(tiny_model("llama"), speculate=3, draft_model=draft_model) as engine:
        without_text(engine, monkeypatch)
        always_draft(monkeypatch)
        prompts = [PROMPT, words(2, 30)]
        plain = [engine.generate(p, 16, speculate="off", ignore_eos=True) for p in prompts]
        drafted = engine.generate_batch(prompts, 16, ignore_eos=True)
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        assert all(one.accepted_tokens < one.drafted_tokens for one in drafted)


def test_a_draft_model_drafts_for_a_model_whose_layers_differ(folder) -> None:
    with make_engine(tiny_model("gemma4_text"), speculate=3, draft_model=folder()) as engine:
        plain = engine.generate(PROMPT, 16, ignore_eos=True, speculate="off")
        assert engine.generate(PROMPT, 16, ignore_eos=True).token_ids == plain.token_ids


def test_a_draft_model_must_have_the_same_tokens(folder) -> None:
    tokenizer = byte_tokenizer()
    path = folder()
    other = type(tokenizer).from_pretrained(path)
    other.add_tokens(["another"])
    other.save_pretrained(path)
    with pytest.raises(ConfigError, match="another vocabulary than"):
        make_engine(tiny_model("llama"), speculate="auto", draft_model=path)


def test_a_draft_model_is_not_loaded_where_nothing_is_drafted() -> None:
    with make_engine(tiny_model("llama"), draft_model="/nowhere") as engine:
        assert engine.generate(PROMPT, 4).drafted_tokens == 0


def test_an_installed_model_drafts_from_its_codes(folder, monkeypatch) -> None:
    forms: list[str] = []
    load = draft_model.load

    def recorded(name: str, *, weight_form: str, **given: object) -> object:
        forms.append(weight_form)
        return load(name, weight_form="auto", **given)

    monkeypatch.setattr(draft_model, "load", recorded)
    monkeypatch.setattr(draft_model, "is_fast", lambda *_: True)
    path = folder()
    for names in ([], [path]):
        monkeypatch.setattr(draft_model, "_has_codes", names.__contains__)
        with make_engine(tiny_model("llama"), speculate=3, draft_model=path) as engine:
            engine.generate(PROMPT, 2)
    assert forms == ["auto", "packed"]
