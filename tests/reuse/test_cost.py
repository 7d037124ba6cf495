from __future__ import annotations

import pytest

from kvboost.cache.lookup.hits import Hit, KnownRows, MovedRun
from kvboost.config import RepairParams
from kvboost.reuse.cost import CostModel
from kvboost.reuse.plan import Plan, make_plan
from kvboost.reuse.step_times import size_of
from support.chunks import make_chunk

FIXED, ROW, KEY = 0.05, 0.0005, 1e-7


def seconds(rows: int, keys: int) -> float:
    return FIXED + rows * (ROW + KEY * keys)


def learned(path=None) -> CostModel:
    cost = CostModel(3e-4, path)
    for _ in range(5):
        for rows, keys in ((1, 500), (1, 2000), (32, 2000), (500, 250), (2000, 1000)):
            cost.observe(rows, keys, seconds(rows, keys))
    return cost


def test_until_measured_rows_are_the_cost() -> None:
    cost = CostModel(3e-4)
    assert not cost.is_measured
    assert cost.forward(1000, 500) > 5 * cost.forward(100, 500)
    assert cost.forward(100, 10_000) > cost.forward(100, 100)
    assert cost.place(100) == 0


def test_costs_of_forwards_are_learned() -> None:
    cost = learned()
    for rows, keys in ((1, 1000), (64, 2000), (300, 2000), (1500, 750), (4000, 2000)):
        assert cost.forward(rows, keys) == pytest.approx(seconds(rows, keys), rel=0.1)
    cost.observe_place(1000, 0.02)
    assert cost.place(500) == pytest.approx(0.01)


def test_rows_within_a_time_are_those_whose_forward_takes_it() -> None:
    cost = CostModel(1e-4)
    assert cost.rows_within(1.0, 0) is None
    for rows in (1, 64, 512):
        for keys in (0, 1000, 4000):
            cost.observe(rows, keys, 0.02 + rows * (0.004 + keys * 1e-6))
    for seconds, keys in ((0.2, 0), (0.5, 2000), (1.0, 4000)):
        rows = cost.rows_within(seconds, keys)
        assert rows is not None
        assert cost.forward(rows, keys) <= seconds < cost.forward(rows + 1, keys)
    assert cost.rows_within(0.0, 0) == 0


def test_decode_steps_alone_are_no_measure_of_a_prefill() -> None:
    cost = CostModel(3e-4)
    for _ in range(50):
        cost.observe(1, 1000, 0.05)
    assert not cost.is_measured


def test_learned_costs_survive_the_process_and_damage_is_ignored(tmp_path) -> None:
    path = tmp_path / "costs" / "model.json"
    learned(path).save()
    again = CostModel(3e-4, path)
    assert again.is_measured
    assert again.forward(300, 2000) == pytest.approx(seconds(300, 2000), rel=0.1)
    assert [file.name for file in path.parent.iterdir()] == ["model.json"]
    path.write_text('{"gram": [[1]], "target": "x"')
    assert not CostModel(3e-4, path).is_measured
    CostModel(3e-4, tmp_path / "no" / "file").save()  # nothing learned, nothing written
    assert not (tmp_path / "no").exists()


def moved_plan(num_tokens: int, start: int, end: int, tier: str = "ram") -> Plan:
    hit = Hit(make_chunk(range(end - start)).info, start, end - start, tier=tier)
    return make_plan(num_tokens, KnownRows(moved=(MovedRun((hit,), 0.0),)))


def test_moving_pays_where_it_is_faster_by_a_tenth() -> None:
    cost, auto = learned(), RepairParams()
    assert cost.moving_pays(moved_plan(4000, 16, 3900), auto)
    assert not cost.moving_pays(moved_plan(4000, 16, 3900), auto, more_seconds=3.0)
    assert not cost.moving_pays(moved_plan(400, 16, 80), auto)


def test_rows_from_a_slow_folder_do_not_make_those_in_memory_seem_slow(tmp_path) -> None:
    cost, auto = learned(tmp_path / "costs.json"), RepairParams()
    cost.observe_place(4000, 0.01)
    cost.observe_place(4000, 9.0, slow=True)
    cost.save()
    for known in (cost, CostModel(3e-4, tmp_path / "costs.json")):
        assert known.moving_pays(moved_plan(4000, 16, 3900), auto)
        for tier in ("disk", "remote"):
            assert not known.moving_pays(moved_plan(4000, 16, 3900, tier), auto)


def test_only_auto_weighs_and_only_what_is_moved() -> None:
    cost, short = learned(), moved_plan(400, 16, 80)
    assert cost.moving_pays(short, RepairParams("query"))
    assert cost.moving_pays(short, RepairParams(reuse_moved="always"))
    assert cost.moving_pays(short.without_moved(), RepairParams())


def test_padded_forwards_cost_what_is_computed() -> None:
    """As on a GPU, where forwards of up to 64 rows are one."""
    cost = CostModel(3e-4)
    cost.computed_rows = lambda rows: 1 if rows == 1 else -(-rows // 64) * 64
    for _ in range(5):
        for rows, keys in ((1, 500), (3, 2000), (60, 2000), (100, 250), (2000, 1000)):
            cost.observe(rows, keys, seconds(cost.computed_rows(rows), keys))
    assert cost.forward(3, 2000) == cost.forward(60, 2000)
    assert cost.forward(40, 1000) == pytest.approx(seconds(64, 1000), rel=0.1)
    assert cost.forward(1, 1000) == pytest.approx(seconds(1, 1000), rel=0.1)


def test_steps_of_about_as_many_rows_are_measured_together() -> None:
    sizes = {1: 1, 9: 9, 12: 12, 13: 16, 16: 16, 32: 32, 33: 40, 41: 48}
    assert {rows: size_of(rows) for rows in sizes} == sizes
    cost = CostModel(1e-4)
    for rows in (8, 8, 8, 29, 30, 31):
        cost.observe_step(rows, 1.0 if rows == 8 else 3.0)
    assert cost.step(32, 0) == cost.step(29, 0) == 3.0
