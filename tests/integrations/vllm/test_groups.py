from __future__ import annotations

import pytest

from kvboost.integrations.vllm.groups import Groups, first_row

NAMES = (("layers.1", "layers.3"), ("layers.0", "layers.2"))


def test_layers_are_numbered_as_the_model_runs_them() -> None:
    groups = Groups((None, 128), NAMES)
    names = ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert groups.layers(dict.fromkeys(names)) == [[1, 3], [0, 2]]


def test_a_layer_that_reads_the_rows_of_another_is_in_its_group() -> None:
    groups = Groups((None, 128), (("layers.0",), ("layers.1",)))
    targets = {"layers.0": None, "layers.1": None, "layers.2": "layers.1", "layers.3": "layers.0"}
    assert groups.layers(targets) == [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("windows", "window", "is_one"),
    [
        ((None,), None, True),
        ((64,), 64, False),
        ((None, 128, 64), 64, False),
        ((None,) * 2, None, False),
    ],
)
def test_the_smallest_window_counts(
    windows: tuple[int | None, ...], window: int | None, is_one: bool
) -> None:
    groups = Groups(windows, ((),) * len(windows))
    assert (groups.window, groups.is_one) == (window, is_one)


def test_a_group_with_states_is_not_alone() -> None:
    groups = Groups((None, None), NAMES, with_states=(1,))
    assert groups.stateful == {"layers.0": 1, "layers.2": 1} and not groups.is_one
    assert not Groups((None,), (("layers.0",),), with_states=(0,)).is_one
    assert groups.layers(dict.fromkeys(NAMES[0])) == [[0, 1], []]


@pytest.mark.parametrize(
    ("tables", "row"),
    [([[5, 6]], 0), ([[5, 6, 7], [0, 8, 9]], 16), ([[5, 6], [0, 0]], 32), ([[], []], 0)],
)
def test_the_first_row_is_the_first_that_all_groups_have(tables: list[list[int]], row: int) -> None:
    assert first_row(tables, 16) == row
