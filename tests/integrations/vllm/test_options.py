from __future__ import annotations

from typing import Any

import pytest

from kvboost.errors import ConfigError
from kvboost.integrations.vllm.options import (
    MOST_BOUNDARIES,
    MOST_TEXTS,
    MOST_TOKENS,
    Command,
    Options,
    RequestOptions,
)


def test_options_of_the_cache_and_the_repair_are_passed_on() -> None:
    extra = {"chunk_size": 32, "recompute_ratio": 0.5, "mode": "exact", "slice_rows": 64}
    options = Options.parse(extra)
    assert (options.engine.chunk_size, options.engine.repair.ratio) == (32, 0.5)
    assert (options.mode, options.slice_rows) == ("exact", 64)
    options = Options.parse({})
    assert (options.mode, options.slice_rows, options.self_check) == ("repaired", 2048, True)
    assert options.engine.gpu_cache_bytes == 0  # vLLM takes the GPU's memory


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"chunksize": 32}, "chunksize"),
        ({"model": "x"}, "model"),
        ({"mode": "always"}, "mode='always'"),
        ({"slice_rows": 8}, "slice_rows=8"),
        ({"slice_rows": "64"}, "slice_rows='64'"),
        ({"self_check": "false"}, "self_check='false'"),
        ({"commands": 1}, "commands=1"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"recompute_ratio": 2}, "recompute_ratio=2"),
    ],
)
def test_bad_options_are_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Options.parse(extra)


def test_a_request_says_a_mode_or_an_object_or_nothing() -> None:
    defaults = Options.parse({"recompute_ratio": 0.2})
    assert RequestOptions.parse(None, defaults) == RequestOptions("repaired", 0.2)
    assert RequestOptions.parse("off", defaults) == RequestOptions("off", 0.2)
    said = {"mode": "exact", "ratio": 1, "boundaries": [5, 9]}
    assert RequestOptions.parse(said, defaults) == RequestOptions("exact", 1.0, (5, 9))
    assert RequestOptions.parse(None, Options.parse({"mode": "off"})).mode == "off"


@pytest.mark.parametrize(
    ("said", "command"),
    [
        ({"stats": True}, Command("stats")),
        ({"forget": "everything"}, Command("forget")),
        ({"forget": [[5, 6], [7]]}, Command("forget", ((5, 6), (7,)))),
    ],
)
def test_a_request_may_carry_a_command(said: dict[str, object], command: Command) -> None:
    asked = RequestOptions.parse(said, Options.parse({}))
    assert asked.command == command and asked.mode == "off"  # it reads and stores nothing
    with pytest.raises(ConfigError, match="commands are off"):
        RequestOptions.parse(said, Options.parse({"commands": False}))


@pytest.mark.parametrize(
    "said",
    [
        "fast",
        5,
        ["exact"],
        {"mod": "exact"},
        {"mode": None},
        {"mode": ["exact"]},
        {"ratio": 1.5},
        {"ratio": float("nan")},
        {"ratio": "0.5"},
        {"ratio": True},
        {"boundaries": "12"},
        {"boundaries": 5},
        {"boundaries": [1.5]},
        {"boundaries": [-1]},
        {"boundaries": [True]},
        {"stats": 1},
        {"stats": True, "forget": "everything"},
        {"stats": True, "mode": "exact"},
        {"forget": True},
        {"forget": "all"},
        {"forget": []},
        {"forget": [[]]},
        {"forget": [5, 6]},
        {"forget": [[5], "six"]},
        {"forget": [[2**31]]},
    ],
)
def test_what_a_request_may_not_say(said: object) -> None:
    with pytest.raises(ConfigError):
        RequestOptions.parse(said, Options.parse({}))


HOSTILE: dict[str, object] = {
    "arguments that are a text": "kvboost",
    "arguments that are a list": [1, 2],
    "arguments that are a number": 5,
    "parameters that are a text": {"kv_transfer_params": "kvboost"},
    "parameters that are a list": {"kv_transfer_params": ["kvboost"]},
    "parameters that are true": {"kv_transfer_params": True},
    "a ratio of 400 digits": {"kvboost": {"ratio": 10**400}},
    "an infinite ratio": {"kvboost": {"ratio": float("inf")}},
    "a mode that is a list": {"kvboost": {"mode": ["exact"] * 1000}},
    "a mode of a megabyte": {"kvboost": "x" * (1 << 20)},
    "names with lines": {"kvboost": {"stats": True, "a\nWARNING forged": 1}},
    "many names": {"kvboost": {f"name {number}": 1 for number in range(100_000)}},
    "many boundaries": {"kvboost": {"boundaries": [1] * (MOST_BOUNDARIES + 1)}},
    "boundaries beyond any text": {"kvboost": {"boundaries": [10**30]}},
    "many texts": {"kvboost": {"forget": [[1]] * (MOST_TEXTS + 1)}},
    "a long text": {"kvboost": {"forget": [[1] * (MOST_TOKENS + 1)]}},
    "long texts together": {"kvboost": {"forget": [[1] * (MOST_TOKENS // 2 + 1)] * 2}},
    "texts of texts": {"kvboost": {"forget": [["1"] * 1000]}},
    "tokens of 400 digits": {"kvboost": {"forget": [[10**400]]}},
    "statistics of a megabyte": {"kvboost": {"stats": "x" * (1 << 20)}},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_whatever_a_client_sends_is_one_short_line(case: str) -> None:
    """Any other exception would stop vLLM's scheduler, and with it the answers of all clients."""
    for defaults in (Options.parse({}), Options.parse({"commands": False})):
        with pytest.raises(ConfigError) as raised:
            RequestOptions.of_request(HOSTILE[case], defaults)
        assert len(str(raised.value)) < 1000 and "\n" not in str(raised.value)


def test_where_a_request_says_what_it_wants() -> None:
    defaults = Options.parse({})
    exact = RequestOptions.parse("exact", defaults)
    for extra in ({"kvboost": "exact"}, {"kv_transfer_params": {"kvboost": "exact"}}):
        assert RequestOptions.of_request(extra, defaults) == exact
    for nothing in (None, {}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}):
        assert RequestOptions.of_request(nothing, defaults) == RequestOptions.parse(None, defaults)
