from __future__ import annotations

import typing
from dataclasses import fields

import pytest

from kvboost import ConfigError, EngineConfig
from kvboost.config import SIZES, EngineOptions


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("chunk_size", 0),
        ("chunk_size", 12.5),
        ("state_every", 15),
        ("max_cache_bytes", -1),
        ("chunking", "paragraphs"),
        ("recompute_strategy", "magic"),
        ("recompute_ratio", 1.5),
        ("kv_cache_bits", 3),
        ("disk_cache_dir", ""),
        ("disk_cache_bytes", -1),
        ("gpu_cache_bytes", 1.5),
        ("remote_cache_bytes", "2 gigs"),
        ("max_cache_bytes", None),
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


def test_engine_config_parses_sizes_itself() -> None:
    config = EngineConfig(
        max_cache_bytes="1GiB",
        gpu_cache_bytes="2 MB",
        disk_cache_bytes="3KiB",
        remote_cache_bytes=4,
    )
    assert (config.max_cache_bytes, config.gpu_cache_bytes) == (1024**3, 2_000_000)
    assert (config.disk_cache_bytes, config.remote_cache_bytes) == (3072, 4)
    assert config.max_kv_bytes is None


def test_engine_options_are_the_fields_of_engine_config() -> None:
    declared = typing.get_type_hints(EngineConfig)
    options = typing.get_type_hints(EngineOptions)
    assert set(options) == {field.name for field in fields(EngineConfig)}
    wider = {name: declared[name] | str for name in SIZES}
    assert options == declared | wider
