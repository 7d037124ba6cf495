"""The dashboard asks for metrics that the server really has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvboost.serve.metrics import Metrics
from support.fake_engine import FakeEngine

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "kvboost.json"
NAME = re.compile(r"\bkvboost_\w+")
BY = re.compile(r"\bby \(([^)]*)\)")
LEGEND = re.compile(r"\{\{(\w+)\}\}")
SCRAPED = {"job", "instance", "le"}
"""Labels that Prometheus adds, and that of histograms."""


class BusyEngine(FakeEngine):
    """An engine with a value for everything."""

    def cache_stats(self) -> dict[str, Any]:
        audit = dict.fromkeys(("audited", "mean_kl", "max_kl", "token_agreement"), 1)
        tier = {"bytes": 1, "max_bytes": 2, "chunks": 1, "hits": 1, "faults": {"corrupt": 1}}
        return {
            **super().cache_stats(),
            "audit": {**audit, "recompute_ratio": 0.1},
            "tiers": {"ram": tier},
        }

    def serving_stats(self) -> Any:
        return {**super().serving_stats(), "shared_kv_bytes": 1}


def samples() -> dict[str, set[str]]:
    """Every name that the server exports, with its labels."""
    metrics = Metrics(BusyEngine())
    metrics.response(200)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def targets() -> list[tuple[str, str]]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [(one["expr"], one["legendFormat"]) for panel in panels for one in panel["targets"]]


def test_every_metric_and_label_of_the_dashboard_exists() -> None:
    exported = samples()
    assert len(targets()) > 20
    for expression, legend in targets():
        names = NAME.findall(expression)
        assert names, expression
        for name in names:
            assert name in exported, f"{name} in {expression}"
        known = SCRAPED.union(*(exported[name] for name in names))
        used = {label.strip() for by in BY.findall(expression) for label in by.split(",")}
        used |= set(re.findall(r"(\w+)=~?\"", expression))
        assert used <= known, expression
        assert set(LEGEND.findall(legend)) <= used, legend
        assert expression.count("(") == expression.count(")")


def test_counters_are_rates_and_panels_do_not_overlap() -> None:
    for expression, _ in targets():
        for name in NAME.findall(expression):
            if name.endswith(("_total", "_bucket", "_sum", "_count")):
                assert f"rate({name}{{" in expression
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert not taken & cells and place["x"] + place["w"] <= 24
        taken |= cells


def test_the_page_names_the_metrics_that_the_server_has() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    section = page.partition("## Metrics and a dashboard")[2].partition("\n## ")[0]
    rows = [
        row for row in section.splitlines() if row.startswith("| ") and "--kv-events" not in row
    ]
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:\{[\w,]+\})?`", row)}
    exported = {re.sub("^kvboost_|_(bucket|count|sum)$", "", name) for name in samples()}
    assert len(named) > 30
    left_out = re.compile("serving_max_|.*_created$")  # limits, and when a counter began
    assert named == {name for name in exported if not left_out.match(name)}
