from __future__ import annotations

import pytest

from kvboost import ConfigError, GenerationMode
from kvboost.config import SamplingParams, choose, stop_strings


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
