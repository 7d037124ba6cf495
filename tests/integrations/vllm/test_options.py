from __future__ import annotations

from typing import Any

import pytest

from kvboost.errors import ConfigError
from kvboost.integrations.vllm.options import Command, Options, RequestOptions


def test_defaults() -> None:
    options = Options.parse({})
    assert (options.mode, options.slice_rows, options.self_check) == ("repaired", 2048, True)
    assert options.engine.gpu_cache_bytes == 0  # vLLM takes the GPU's memory


def test_options_of_the_cache_and_the_repair_are_passed_on() -> None:
    extra = {"chunk_size": 32, "recompute_ratio": 0.5, "mode": "exact", "slice_rows": 64}
    options = Options.parse(extra)
    assert (options.engine.chunk_size, options.engine.repair.ratio) == (32, 0.5)
    assert (options.mode, options.slice_rows) == ("exact", 64)


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
