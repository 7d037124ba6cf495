from __future__ import annotations

import subprocess
import sys

import pytest

from kvboost.bench.kit.figures import (
    Value,
    check_plot,
    draw_bars,
    draw_lines,
    save,
)
from kvboost.bench.kit.timing import Sample
from kvboost.errors import ConfigError

PANELS = {
    "same text": {"none": [(0, 0.4)], "late": [(30, 0.01), (10, 0.1), (20, 0.03)]},
    "other text": {"late": [(10, 0.3), (20, 0.2)]},
}


def quality_figure(panels, *, title: str):
    return draw_lines(panels, title=title, x="share", y="KL")


def curve(axes, name):
    (line,) = [line for line in axes.lines if line.get_label() == name]
    return line


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_the_suffix_says_what_is_saved(tmp_path, suffix, beginning) -> None:
    path = tmp_path / f"quality{suffix}"
    save(quality_figure(PANELS, title="Quality"), path)
    assert path.read_bytes().startswith(beginning)


def test_panels_share_an_axis_colours_and_one_legend() -> None:
    figure = quality_figure(PANELS, title="Quality")
    first, second = figure.axes
    assert [first.get_title(), second.get_title()] == list(PANELS)
    assert first.get_yscale() == second.get_yscale() == "log"
    assert first.get_shared_y_axes().joined(first, second)
    low, high = first.get_ylim()
    assert 0.001 < low < 0.01 < 0.4 < high < 1  # every point is within
    line = curve(first, "late")
    assert list(line.get_xdata()) == [10, 20, 30]  # from left to right
    assert list(line.get_ydata()) == [0.1, 0.03, 0.01]
    assert line.get_color() == curve(second, "late").get_color() != curve(first, "none").get_color()
    assert legend(figure) == ["none", "late"]


def test_zero_has_a_place_below_all_others() -> None:
    (axes,) = quality_figure({"": {"late": [(10, 0.02), (100, 0.0)]}}, title="Quality").axes
    assert list(curve(axes, "late").get_ydata()) == [0.02, 0.0]
    assert axes.get_yscale() == "symlog" and axes.get_ylim()[0] < 0


@pytest.mark.parametrize(
    ("panels", "said"),
    [
        *((panels, "nothing to plot") for panels in ({}, {"a": {}}, {"a": {"late": []}})),
        ({"": {"late": [(0, 0.1), (10, float("nan"))]}}, "finite"),
        ({"": {"late": [(0, 0.1), (float("inf"), 0.1)]}}, "finite"),
    ],
)
def test_what_cannot_be_plotted_is_refused(panels, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quality_figure(panels, title="Quality")


def test_missing_matplotlib_says_how_to_install_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvboost\[plot\]'"):
        check_plot(tmp_path / "quality.png")


def test_a_plot_leaves_the_backend_alone(tmp_path) -> None:
    """A user's own pyplot must not change, so ours never imports it."""
    code = (
        "import sys; from kvboost.bench.kit.figures import draw_lines, save\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"figure = draw_lines({PANELS!r}, title='Quality', x='x', y='y')\n"
        f"save(figure, {str(tmp_path / 'quality.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lines_show_their_spread_and_take_a_style() -> None:
    points = [(1, Sample(20.0, 10.0, 40.0)), (2, Value(30.0, 20.0, 60.0))]
    style = {"a": {"linestyle": "--", "label": "_a"}}
    figure = draw_lines({"": {"a": points}}, title="x", x="x", y="y", log_x=True, styles=style)
    (axes,) = figure.axes
    (line,) = axes.lines
    assert line.get_linestyle() == "--" and list(line.get_ydata()) == [20.0, 30.0]
    assert len(axes.collections) == 1 and axes.get_ylim()[1] > 60
    assert axes.get_xscale() == "log" and not figure.legends[0].get_texts()


BARS = {"ours": {"rag": 2.0, "chat": Sample(1.0, 0.5, 3.0)}, "theirs": {"rag": 4.0}}


def test_bars_are_side_by_side_with_their_spread() -> None:
    left, right = draw_bars({"a": BARS, "b": BARS}, title="x", y=["seconds", "rate"]).axes
    assert sorted(bar.get_height() for bar in left.patches) == [1.0, 2.0, 4.0]
    assert [label.get_text() for label in left.get_xticklabels()] == ["rag", "chat"]
    assert (left.get_ylabel(), right.get_ylabel()) == ("seconds", "rate")
    assert len(left.lines) == 3  # the one spread and its caps
    with pytest.raises(ValueError, match="nothing to plot"):
        draw_bars({"a": {"ours": {}}}, title="x", y=["y"])


def test_stacked_series_add_up_and_each_panel_has_its_own_legend() -> None:
    shares = {"exact": {"ours": 0.5, "theirs": 0.2}, "computed": {"ours": 0.5, "theirs": 0.8}}
    panels = {"shares": shares, "rate": BARS}
    left, right = draw_bars(panels, title="x", y=["share", "rate"], stacked=("shares",)).axes
    tops = [(bar.get_x(), bar.get_y() + bar.get_height()) for bar in left.patches]
    assert [top for _, top in tops] == [0.5, 0.2, 1.0, 1.0] and len({at for at, _ in tops}) == 2
    named = [[text.get_text() for text in axes.get_legend().texts] for axes in (left, right)]
    assert named == [["exact", "computed"], list(BARS)]
