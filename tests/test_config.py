from __future__ import annotations

from pathlib import Path

import pytest

from kvboost import ConfigError, EngineConfig, GenerationMode
from kvboost.config import SamplingParams, choose, home, parse_bytes, stop_strings


@pytest.mark.parametrize(
    ("written", "expected"),
    [(0, 0), (2048, 2048), ("2GiB", 2 * 1024**3), ("500 MB", 500_000_000), ("1.5kib", 1536)],
)
def test_sizes_as_people_write_them(written, expected) -> None:
    assert parse_bytes(written) == expected


@pytest.mark.parametrize("written", ["", "2 GB please", "GiB", "-1", -1, 1.5, None, True])
def test_a_size_that_is_none_names_the_value(written) -> None:
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
        ("remote_cache_bytes", "2GB"),
        ("prefill_slice", 0),
    ],
)
def test_an_engine_option_out_of_range_names_option_and_value(option, value) -> None:
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
def test_a_sampling_option_out_of_range_names_option_and_value(option, value) -> None:
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
def test_when_a_request_samples(options, samples) -> None:
    assert SamplingParams(**options).samples is samples


def test_a_mode_by_name_and_an_unknown_one() -> None:
    assert choose(GenerationMode, "baseline", "mode") is GenerationMode.BASELINE
    with pytest.raises(ConfigError, match=r"mode='turbo'.*'prefix_cache'"):
        choose(GenerationMode, "turbo", "mode")


def test_stop_is_one_string_or_several() -> None:
    assert stop_strings(None) == ()
    assert stop_strings("END") == ("END",)
    assert stop_strings(["a", "b"]) == ("a", "b")
    with pytest.raises(ConfigError, match="stop=5"):
        stop_strings(5)


def test_home_follows_the_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("KVBOOST_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert home() == Path("/xdg/kvboost")
