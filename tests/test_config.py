from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from kvboost import ConfigError, EngineConfig, GenerationMode
from kvboost.config import (
    REMOVED,
    SIZES,
    EngineOptions,
    LoadOptions,
    SamplingParams,
    choose,
    closest,
    home,
    parse_bytes,
    progress_allowed,
    refuse_unknown_options,
    stop_strings,
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [(0, 0), (2048, 2048), ("2GiB", 2 * 1024**3), ("500 MB", 500_000_000), ("1.5kib", 1536)],
)
def test_parse_bytes_reads_sizes_as_people_write_them(written, expected) -> None:
    assert parse_bytes(written) == expected


@pytest.mark.parametrize("written", ["", "2 GB please", "GiB", "-1", -1, 1.5, None, True])
def test_text_that_is_not_a_size_is_refused_with_its_value(written) -> None:
    with pytest.raises(ConfigError, match="max_cache_bytes="):
        parse_bytes(written, "max_cache_bytes")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("chunk_size", 0),
        ("chunk_size", 12.5),
        ("max_chunks", 0),
        ("max_cache_bytes", -1),
        ("chunking", "paragraphs"),
        ("recompute_strategy", "magic"),
        ("recompute_ratio", 1.5),
        ("recompute_overlap", -1),
        ("kv_cache_bits", 3),
        ("disk_cache_dir", ""),
        ("disk_cache_bytes", -1),
        ("gpu_cache_bytes", 1.5),
        ("remote_cache_bytes", "2 gigs"),
        ("max_cache_bytes", None),
        ("document_markers", 5),
        ("document_markers", " "),
        ("prefill_slice", 0),
        ("speculate", "always"),
        ("speculate", 0),
        ("speculate", 65),
        ("speculate", True),
    ],
)
def test_a_bad_engine_option_is_refused_with_its_name_and_value(option, value) -> None:
    with pytest.raises(ConfigError, match=option) as error:
        EngineConfig(**{option: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -3),
        ("max_new_tokens", 2.0),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("stop", ("",)),
        ("logprobs", 100),
        ("do_sample", "yes"),
        ("temperature", float("nan")),
        ("repetition_penalty", "x"),
        ("logprobs", 2.5),
        ("seed", 2**70),
        ("ignore_eos", "no"),
    ],
)
def test_a_bad_sampling_option_is_refused_with_its_name(option, value) -> None:
    with pytest.raises(ConfigError, match=option):
        SamplingParams(**{option: value})


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({}, False),
        ({"temperature": 0.7}, True),
        ({"temperature": 0}, False),
        ({"temperature": 0, "do_sample": True}, False),
        ({"temperature": 0.7, "do_sample": False}, False),
        ({"top_p": 0.9}, True),
        ({"do_sample": True}, True),
        ({"seed": 1}, False),
        ({"repetition_penalty": 1.2}, False),
    ],
)
def test_which_options_make_a_request_sample(options, samples) -> None:
    assert SamplingParams(**options).samples is samples


def test_a_mode_is_chosen_by_name_and_an_unknown_one_is_refused() -> None:
    assert choose(GenerationMode, "baseline", "mode") is GenerationMode.BASELINE
    with pytest.raises(ConfigError, match=r"mode='turbo'.*'prefix_cache'"):
        choose(GenerationMode, "turbo", "mode")


def test_stop_may_be_one_string_or_several() -> None:
    assert stop_strings(None) == ()
    assert stop_strings("END") == ("END",)
    assert stop_strings(["a", "b"]) == ("a", "b")
    with pytest.raises(ConfigError, match="stop=5"):
        stop_strings(5)


def test_engine_config_parses_sizes_and_markers_itself() -> None:
    config = EngineConfig(
        max_cache_bytes="1GiB",
        gpu_cache_bytes="2 MB",
        disk_cache_bytes="3KiB",
        remote_cache_bytes=4,
        document_markers="---",
    )
    assert (config.max_cache_bytes, config.gpu_cache_bytes) == (1024**3, 2_000_000)
    assert (config.disk_cache_bytes, config.remote_cache_bytes) == (3072, 4)
    assert config.max_kv_bytes is None
    assert config.document_markers == ("---",)
    assert EngineConfig(document_markers=["a", "b"]).document_markers == ("a", "b")


def test_engine_options_are_the_fields_of_engine_config() -> None:
    declared = typing.get_type_hints(EngineConfig)
    options = typing.get_type_hints(EngineOptions)
    assert set(options) == {field.name for field in fields(EngineConfig)}
    wider = {name: declared[name] | str for name in SIZES}
    wider["document_markers"] = str | Sequence[str]
    assert options == declared | wider


def test_an_option_that_resembles_another_is_guessed() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_cache_bytes'") as error:
        refuse_unknown_options({"chunk_size": 8, "max_cache_byte": 1}, LoadOptions)
    assert "unknown option 'max_cache_byte'" in str(error.value)
    assert all(name in str(error.value) for name in ("chunk_size", "sharing_wait", "revision"))


def test_an_option_that_resembles_nothing_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigError, match="unknown option 'xyzzy'") as error:
        refuse_unknown_options({"xyzzy": 1}, EngineOptions)
    assert "did you mean" not in str(error.value) and "revision" not in str(error.value)


def test_an_option_of_09_says_what_to_do_instead() -> None:
    assert not set(REMOVED) & set(LoadOptions.__annotations__)
    for name, instead in REMOVED.items():
        with pytest.raises(ConfigError, match=f"{name} was removed") as error:
            refuse_unknown_options({name: 1}, LoadOptions)
        assert instead in str(error.value)


def test_the_closest_name_ignores_case() -> None:
    assert closest("SmolM2-135M", ["other", "smollm2-135m"]) == "smollm2-135m"
    assert closest("gpt-7", ["smollm2-135m"]) is None


def test_progress_can_be_switched_off_by_the_environment(monkeypatch) -> None:
    monkeypatch.delenv("KVBOOST_PROGRESS", raising=False)
    assert progress_allowed()
    monkeypatch.setenv("KVBOOST_PROGRESS", "0")
    assert not progress_allowed()


def test_home_follows_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("KVBOOST_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert home() == Path("/xdg/kvboost")
