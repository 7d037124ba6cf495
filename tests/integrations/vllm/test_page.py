"""What the page says of the connector is what it takes."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from kvboost.integrations.vllm.environment import TRANSFER
from kvboost.integrations.vllm.options import _ENGINE_OPTIONS, Options

PAGE = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()


def test_the_page_names_every_option_and_no_other() -> None:
    section = PAGE.partition("## Options\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {*_ENGINE_OPTIONS, *(one.name for one in fields(Options))} - {"engine"}


def test_the_page_shows_the_command() -> None:
    (config,) = re.findall(r"--kv-transfer-config '(\{.*?\})'", PAGE, re.DOTALL)
    assert json.loads(config) == TRANSFER
