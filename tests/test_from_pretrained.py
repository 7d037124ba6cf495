"""The options of ``KVBoost.from_pretrained`` and ``from_model``."""

from __future__ import annotations

import pytest

from kvboost import ConfigError, EngineConfig, KVBoost
from support.tiny import byte_tokenizer, tiny_model


@pytest.fixture(autouse=True)
def no_loading(monkeypatch) -> None:
    """A mistake must be found before anything is loaded."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr("kvboost.runtime.loading.load", load)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_cache_byte", 1, "did you mean 'max_cache_bytes'"),
        ("max_cache_bytes", "lots", "max_cache_bytes='lots'"),
        ("prefill_chunk_size", 512, "prefill_chunk_size was removed.*in slices"),
        ("awq_path", "folder", r"awq_path was removed in 1.0.*weights='packed'"),
    ],
)
def test_a_mistake_is_named_before_anything_is_loaded(option, value, message) -> None:
    with pytest.raises(ConfigError, match=message):
        KVBoost.from_pretrained("no-such-model", **{option: value})


def test_options_of_transformers_are_passed_on(monkeypatch) -> None:
    given = {}

    def load(name: str, **options: object) -> None:
        given.update(options)
        raise InterruptedError

    monkeypatch.setattr("kvboost.runtime.loading.load", load)
    with pytest.raises(InterruptedError):
        KVBoost.from_pretrained(
            "m", chunk_size=16, revision="main", torch_dtype="float32", model_kwargs={"tp_plan": 1}
        )
    assert given.pop("strict") is True and given.pop("weight_form") == "auto"
    assert {name: value for name, value in given.items() if value is not None} == {
        "revision": "main",
        "torch_dtype": "float32",
        "tp_plan": 1,
    }


def test_from_model_takes_options_and_a_config() -> None:
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    config = EngineConfig(chunk_size=32, max_running=3)
    with KVBoost.from_model(
        model, tokenizer, config=config, max_cache_bytes="1MiB", max_running=4
    ) as engine:
        assert engine.config == EngineConfig(chunk_size=32, max_running=4, max_cache_bytes=1024**2)
    with pytest.raises(ConfigError, match="did you mean 'chunk_size'"):
        KVBoost.from_model(model, tokenizer, chunksize=32)
    with pytest.raises(ConfigError, match="unknown option 'revision'"):
        KVBoost.from_model(model, tokenizer, revision="main")


def test_the_engine_says_what_it_is() -> None:
    model, tokenizer = tiny_model("llama"), byte_tokenizer()
    with KVBoost.from_model(model, tokenizer, max_cache_bytes="1MiB") as engine:
        assert repr(engine) == "KVBoost('custom', cpu, float32, cache: 1MiB in memory)"
    assert repr(engine) == "KVBoost('custom', cpu, float32, closed)"


def test_the_description_hides_the_remote_address_and_names_the_folder(tmp_path) -> None:
    remote = (tmp_path / "shared").as_uri()
    with KVBoost.from_model(
        tiny_model("llama"),
        byte_tokenizer(),
        disk_cache_dir=tmp_path / "kv",
        disk_cache_bytes="3MiB",
        remote_cache_url=remote,
        remote_cache_bytes="3MiB",
    ) as engine:
        assert f"3MiB in '{tmp_path / 'kv'}', a remote store" in repr(engine)
        assert remote not in repr(engine)


def test_reset_cache_empties_the_cache_as_in_09() -> None:
    with KVBoost.from_model(tiny_model("llama"), byte_tokenizer(), chunk_size=16) as engine:
        engine.generate("The lamp burned paraffin until the cable came.", 2)
        assert engine.cache_stats()["chunks"] > 0
        engine.reset_cache()
        assert engine.cache_stats()["chunks"] == 0
