from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.integrations.vllm.environment import TRANSFER
from kvboost.integrations.vllm.options import (
    _ENGINE_OPTIONS,
    STRATEGIES,
    Options,
    RequestOptions,
)

PAGE = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()


def test_without_options_moved_text_is_reused_and_the_gpu_is_left_to_vllm() -> None:
    options = Options.parse({})
    assert options.mode == "repaired" and options.self_check
    assert options.engine.gpu_cache_bytes == 0
    assert options.engine.recompute_ratio == EngineConfig.recompute_ratio


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cache_dir": "/kv"}, r"unknown options: cache_dir\. Known are: .*disk_cache_dir"),
        ({"mode": "moved"}, "mode='moved'"),
        ({"slice_rows": 8}, "slice_rows=8"),
        ({"recompute_strategy": "cacheblend"}, "recompute_strategy='cacheblend'"),
    ],
)
def test_what_is_not_possible_stops_the_start(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Options.parse(given)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_other_strategies_are_accepted(strategy: str) -> None:
    assert Options.parse({"recompute_strategy": strategy}).engine.repair.strategy == strategy


def test_a_request_chooses_by_word_or_by_object() -> None:
    defaults = Options.parse({"recompute_ratio": 0.2})
    assert RequestOptions.parse(None, defaults) == RequestOptions("repaired", 0.2)
    assert RequestOptions.parse("off", defaults).mode == "off"
    asked = RequestOptions.parse({"mode": "exact", "ratio": 1, "boundaries": [5, 9]}, defaults)
    assert asked == RequestOptions("exact", 1.0, (5, 9))
    for wrong in ("all", 3, {"rate": 0.1}, {"ratio": 2}, {"boundaries": [-1]}):
        with pytest.raises(ConfigError):
            RequestOptions.parse(wrong, defaults)


def test_the_page_names_every_option_and_no_other() -> None:
    section = PAGE.partition("## Options\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {*_ENGINE_OPTIONS, *(one.name for one in fields(Options))} - {"engine"}


def test_the_page_and_the_readme_show_the_command() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    for page in (PAGE, readme):
        (config,) = re.findall(r"--kv-transfer-config '(\{.*?\})'", page, re.DOTALL)
        assert json.loads(config) == TRANSFER
