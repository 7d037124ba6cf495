from __future__ import annotations

import pytest

from kvboost import ConfigError
from kvboost.config import EngineOptions, LoadOptions, closest, refuse_unknown_options
from kvboost.config.keywords import REMOVED


def test_an_option_that_resembles_another_is_guessed() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_cache_bytes'") as error:
        refuse_unknown_options({"chunk_size": 8, "max_cache_byte": 1}, LoadOptions)
    assert "unknown option 'max_cache_byte'" in str(error.value)
    assert all(name in str(error.value) for name in ("chunk_size", "max_pause", "revision"))


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
